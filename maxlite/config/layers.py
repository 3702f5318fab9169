"""Which layer is what, and how layers fold into groups that are each scanned once."""

import dataclasses

from maxlite.config.schema import ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The kinds of the two parts of one residual block."""

    attention: str
    mlp: str


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """`repeats` runs through `pattern`: parameters are stored stacked over the repeats."""

    pattern: tuple[LayerSpec, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """Where layer n's parameters lie: group, position in its pattern, index of the repeat."""

    group: int
    position: int
    repeat: int


def layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Returns the spec of every layer, first to last."""
    attention, mlp = model.attention_pattern, model.mlp_pattern
    return tuple(
        LayerSpec(
            attention[layer % len(attention)],
            "dense" if layer < model.num_dense_layers else mlp[layer % len(mlp)],
        )
        for layer in range(model.num_decoder_layers)
    )


def layer_groups(model: ModelConfig) -> tuple[LayerGroup, ...]:
    """Folds the layers into the shortest repeating pattern and, if the count leaves one, a remainder.

    Leading layers that break the pattern (num_dense_layers, a window that begins at some layer) are folded apart.
    """
    specs = layer_specs(model)
    # The longest pattern that is worth its place repeats at least once; else a cut may find two that do.
    cuts = range(1) if _period(specs) * 2 <= len(specs) else range(len(specs))
    folded = [_fold(specs[:cut]) + _fold(specs[cut:]) for cut in cuts]
    return min(folded, key=lambda groups: sum(len(group.pattern) for group in groups))


def _fold(specs: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    if not specs:
        return ()
    period = _period(specs)
    repeats, remainder = divmod(len(specs), period)
    groups = (LayerGroup(specs[:period], repeats),)
    return groups + ((LayerGroup(specs[:remainder], 1),) if remainder else ())


def _period(specs: tuple[LayerSpec, ...]) -> int:
    return next(p for p in range(1, len(specs) + 1) if all(specs[i] == specs[i % p] for i in range(len(specs))))


def layer_places(groups: tuple[LayerGroup, ...]) -> tuple[LayerPlace, ...]:
    """Returns the place of every layer, first to last."""
    return tuple(
        LayerPlace(index, position, repeat)
        for index, group in enumerate(groups)
        for repeat in range(group.repeats)
        for position in range(len(group.pattern))
    )


def attention_window(model: ModelConfig, kind: str) -> int | None:
    """Returns how many positions back a token of such a layer sees, itself included; None is all before it."""
    return model.sliding_window_size if kind == "local" else None


def attention_chunk(model: ModelConfig, kind: str) -> int | None:
    """Returns the positions in a chunk, before which a token of such a layer sees nothing; None: no chunks."""
    return model.chunk_attn_window_size if kind == "chunked" else None


def attention_head_dim(model: ModelConfig, kind: str) -> int:
    """Returns the width of a head in such a layer."""
    return model.global_head_dim if kind == "full" and model.global_head_dim is not None else model.head_dim


def attention_kv_heads(model: ModelConfig, kind: str) -> int:
    """Returns the number of key and value heads in such a layer."""
    return model.global_num_kv_heads if kind == "full" and model.global_num_kv_heads is not None else model.num_kv_heads


def attention_shares_kv(model: ModelConfig, kind: str) -> bool:
    """Says whether one matrix makes keys and values in such a layer."""
    return kind == "full" and model.share_kv_projections


def has_experts(model: ModelConfig) -> bool:
    """Says whether a kind of layer in mlp_pattern has experts."""
    return any(kind != "dense" for kind in model.mlp_pattern)


def rotary_dim(model: ModelConfig, kind: str) -> int:
    """Returns how many features of a head turn with its position in such a layer."""
    if kind in ("nope", "gated_delta_net"):
        return 0
    if kind == "mla":
        assert model.qk_rope_head_dim is not None, "checked with the config"
        return model.qk_rope_head_dim
    width = attention_head_dim(model, kind)
    # proportional: pairs that do not turn are pairs all the same.
    return width if model.rope_type == "proportional" else int(width * model.partial_rotary_factor)
