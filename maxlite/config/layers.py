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
        LayerSpec(attention[layer % len(attention)], mlp[layer % len(mlp)]) for layer in range(model.num_decoder_layers)
    )


def layer_groups(model: ModelConfig) -> tuple[LayerGroup, ...]:
    """Folds the layers into the shortest repeating pattern and, if the count leaves one, a remainder."""
    specs = layer_specs(model)
    period = next(p for p in range(1, len(specs) + 1) if all(specs[i] == specs[i % p] for i in range(len(specs))))
    repeats, remainder = divmod(len(specs), period)
    groups = [LayerGroup(specs[:period], repeats)]
    if remainder:
        groups.append(LayerGroup(specs[:remainder], 1))
    return tuple(groups)


def layer_places(groups: tuple[LayerGroup, ...]) -> tuple[LayerPlace, ...]:
    """Returns the place of every layer, first to last."""
    return tuple(
        LayerPlace(index, position, repeat)
        for index, group in enumerate(groups)
        for repeat in range(group.repeats)
        for position in range(len(group.pattern))
    )


def attention_window(model: ModelConfig, spec: LayerSpec) -> int | None:
    """Returns how many keys a token of such a layer sees, itself included; None is all before it."""
    return model.sliding_window_size if spec.attention == "local" else None
