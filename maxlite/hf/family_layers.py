"""Lines of a family's table that say which layer is what: windows, experts, layers without rotary positions."""

import dataclasses
from collections.abc import Callable, Sequence

from maxlite.config.layers import layer_specs
from maxlite.config.schema import ModelConfig
from maxlite.hf.family_canonical import fold_mlp, shortest_pattern
from maxlite.hf.family_fields import ABSENT, ConfigReader, Json, ModelKeys, is_count
from maxlite.hf.rules import Ignored

# Which layers have a window: (the config.json, number of the layer) -> bool.
IsLocal = Callable[[ConfigReader, int], bool]
_KINDS = {"full_attention": "full", "sliding_attention": "local"}


def every_layer(reader: ConfigReader, layer: int) -> bool:
    """All layers have the window."""
    return True


def all_but_each(period: int, key: str | None = None) -> IsLocal:
    """All layers but each `period`-th; `key` of config.json may say another period."""

    def is_local(reader: ConfigReader, layer: int) -> bool:
        given = reader.take_count(key, period, least=1) if key is not None else period
        return (layer + 1) % given != 0

    return is_local


def from_max_window_layers(reader: ConfigReader, layer: int) -> bool:
    """Layers from max_window_layers on have the window (Qwen2, Qwen3)."""
    return layer >= reader.take_count("max_window_layers", 28)


def even_below_max_window_layers(reader: ConfigReader, layer: int) -> bool:
    """Each other layer below max_window_layers has it (Qwen2-MoE)."""
    return layer % 2 == 0 and layer < reader.take_count("max_window_layers", 28)


@dataclasses.dataclass(frozen=True)
class Windows:
    """`sliding_window` and which layers have it; the others see everything before them.

    default: the window of a config.json without the key. is_local: which layers have it if there is no `layer_types`.
    listed: the family has the key `layer_types`. switched: it has `use_sliding_window`, and without it no window.
    always: transformers makes the mask of the window even if no layer has one, and wants a number. last_full: the last
    layer has no window, whatever is written.
    """

    default: int | None
    is_local: IsLocal
    listed: bool = False
    switched: bool = False
    always: bool = False
    last_full: bool = False

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads attention_pattern and sliding_window_size."""
        window = reader.take("sliding_window")
        window = self.default if window is ABSENT else window
        if self.switched and not reader.take_bool("use_sliding_window", False):
            window = None
        elif window is not None and not (is_count(window) and window > 0):
            reader.refuse(f"sliding_window={window!r}: it must be a whole number above 0, or null")
            window = None
        layers = range(keys["num_decoder_layers"])
        # Asked also if there is no window, so that a key that says where it would be counts as understood.
        local = ["local" if self.is_local(reader, layer) and window is not None else "full" for layer in layers]
        kinds = read_layer_types(reader, len(layers), _KINDS) if self.listed else None
        if kinds is not None and "local" in kinds and window is None:
            reader.refuse("layer_types has sliding_attention layers, but the window is null or switched off")
        kinds = local if kinds is None else kinds
        kinds = [*kinds[:-1], "full"] if self.last_full else kinds
        keys["attention_pattern"] = shortest_pattern(kinds)
        keys["sliding_window_size"] = window if "local" in kinds else None

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the window, and the layers one by one."""
        kinds = [spec.attention for spec in layer_specs(model)]
        window = model.sliding_window_size
        json["sliding_window"] = model.max_position_embeddings if window is None and self.always else window
        if self.switched:
            json["use_sliding_window"] = window is not None
        if self.listed:
            json["layer_types"] = ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds]
        if self.switched and self.listed:
            json["max_window_layers"] = next((n for n, kind in enumerate(kinds) if kind == "local"), len(kinds))


def read_layer_types(reader: ConfigReader, num_layers: int, kinds: dict[str, str]) -> list[str] | None:
    """Returns our kind of each layer in `layer_types`; None if there is no such list or a wrong one."""
    given = reader.take_given("layer_types")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != num_layers:
        reader.refuse(f"layer_types must be a list of num_hidden_layers={num_layers} words")
        return None
    unknown = sorted({repr(word) for word in given if not isinstance(word, str) or word not in kinds})
    if unknown:
        reader.refuse(f"layer_types names {', '.join(unknown)}; it may name {' or '.join(kinds)}")
        return None
    return [kinds[word] for word in given]


@dataclasses.dataclass(frozen=True)
class LinearLayers:
    """layer_types, or every full_attention_interval-th layer is full and the others are Gated DeltaNet (Qwen3-Next)."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads attention_pattern."""
        interval = reader.take_count("full_attention_interval", 4, least=1)
        layers = _layers(keys)
        words = {"full_attention": "full", "linear_attention": "gated_delta_net"}
        kinds = read_layer_types(reader, len(layers), words)
        if kinds is None:
            kinds = ["gated_delta_net" if (layer + 1) % interval else "full" for layer in layers]
        keys["attention_pattern"] = shortest_pattern(kinds)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the layers one by one."""
        kinds = [spec.attention for spec in layer_specs(model)]
        json["layer_types"] = ["linear_attention" if kind == "gated_delta_net" else "full_attention" for kind in kinds]


@dataclasses.dataclass(frozen=True)
class SparseStep:
    """Each decoder_sparse_step-th layer has experts, but those in mlp_only_layers (Qwen)."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads mlp_pattern and num_dense_layers."""
        step = reader.take_count("decoder_sparse_step", 1, least=1)
        dense = read_layer_numbers(reader, "mlp_only_layers", keys["num_decoder_layers"]) or []
        has_experts = keys["num_experts"] > 0
        sparse = [has_experts and n not in dense and (n + 1) % step == 0 for n in _layers(keys)]
        set_mlp_kinds(keys, sparse)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the layers without experts one by one."""
        dense = [n for n, spec in enumerate(layer_specs(model)) if spec.mlp == "dense"]
        json["decoder_sparse_step"] = 1
        json["mlp_only_layers"] = dense if model.num_experts else []


@dataclasses.dataclass(frozen=True)
class DenseFirst:
    """The first first_k_dense_replace layers have no experts, all others do (DeepSeek)."""

    default: int

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads mlp_pattern and num_dense_layers."""
        first = reader.take_count("first_k_dense_replace", self.default)
        set_mlp_kinds(keys, [n >= first for n in _layers(keys)])

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes how many."""
        kinds = [spec.mlp for spec in layer_specs(model)]
        json["first_k_dense_replace"] = kinds.index("moe") if "moe" in kinds else len(kinds)


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """n_shared_experts: the shared expert is so many routed ones wide (DeepSeek)."""

    default: int

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads shared_expert_mlp_dim."""
        number = reader.take_count("n_shared_experts", self.default)
        if number == 0:
            reader.refuse("n_shared_experts=0 is not supported: transformers has no DeepSeek without a shared expert")
        keys["shared_expert_mlp_dim"] = max(number, 1) * (keys["moe_mlp_dim"] or 1)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes how many; a width that is no multiple shows when it is read back."""
        width = model.shared_expert_mlp_dim
        json["n_shared_experts"] = 1 if width is None or not model.moe_mlp_dim else width // model.moe_mlp_dim


@dataclasses.dataclass(frozen=True)
class Llama4Layers:
    """no_rope_layers, attention_chunk_size and layer_types: chunked layers turn with positions, the others do not."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads attention_pattern and chunk_attn_window_size."""
        layers = _layers(keys)
        chunk = reader.take("attention_chunk_size")
        chunk = 8192 if chunk is ABSENT else chunk
        if chunk is not None and not (is_count(chunk) and chunk > 0):
            reader.refuse(f"attention_chunk_size={chunk!r}: it must be a whole number above 0, or null")
            chunk = None
        period = reader.take_count("no_rope_layer_interval", 4, least=1)
        rotary = reader.take_given("no_rope_layers")
        rotary = [int((n + 1) % period != 0) for n in layers] if rotary in (None, []) else rotary
        if not isinstance(rotary, list) or len(rotary) < len(layers) or any(flag not in (0, 1) for flag in rotary):
            reader.refuse(f"no_rope_layers must be a list of at least num_hidden_layers={len(layers)} times 0 or 1")
            rotary = [1 for _ in layers]
        masks = read_layer_types(reader, len(layers), {"full_attention": "full", "chunked_attention": "chunked"})
        masks = ["chunked" if rotary[n] and chunk is not None else "full" for n in layers] if masks is None else masks
        if chunk is None and "chunked" in masks:
            reader.refuse("layer_types has chunked_attention layers, but attention_chunk_size is null")
        if any(masks[n] == "chunked" and not rotary[n] for n in layers):
            reader.refuse("layers that are chunked_attention and 0 in no_rope_layers are not supported")
        kinds = [masks[n] if rotary[n] else "nope" for n in layers]
        keys["attention_pattern"] = shortest_pattern(kinds)
        keys["chunk_attn_window_size"] = chunk if "chunked" in kinds else None

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes both lists, layer by layer."""
        kinds = [spec.attention for spec in layer_specs(model)]
        json["attention_chunk_size"] = model.chunk_attn_window_size
        json["no_rope_layers"] = [int(kind != "nope") for kind in kinds]
        json["layer_types"] = ["chunked_attention" if kind == "chunked" else "full_attention" for kind in kinds]


@dataclasses.dataclass(frozen=True)
class Llama4Experts:
    """moe_layers, or each interleave_moe_layer_step-th: the layers with experts."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads mlp_pattern and num_dense_layers."""
        step = reader.take_count("interleave_moe_layer_step", 1, least=1)
        sparse = read_layer_numbers(reader, "moe_layers", keys["num_decoder_layers"])
        sparse = list(range(step - 1, keys["num_decoder_layers"], step)) if sparse is None else sparse
        set_mlp_kinds(keys, [n in sparse for n in _layers(keys)])

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes their numbers."""
        json["moe_layers"] = [n for n, spec in enumerate(layer_specs(model)) if spec.mlp == "moe"]


@dataclasses.dataclass(frozen=True)
class NextTokenLayers:
    """num_nextn_predict_layers: layers after the last that guess further tokens. They are not read."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Notes their tensors as ones that are not read."""
        last = keys["num_decoder_layers"]
        number = reader.take("num_nextn_predict_layers", "num_mtp_layers")
        number = 1 if number is ABSENT else number
        if not is_count(number) or number > last:
            reader.refuse(f"num_nextn_predict_layers={number!r}: it must be a whole number from 0 to {last}")
            return
        for layer in range(last, last + number):
            reason = "multi-token prediction, without which the model answers"
            reader.ignored.append(Ignored(rf"model\.layers\.{layer}\..*", reason))

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes that there are none."""
        json["num_nextn_predict_layers"] = 0


def read_layer_numbers(reader: ConfigReader, name: str, num_layers: int) -> list[int] | None:
    """Returns a list of numbers of layers; None if it is absent, null or wrong."""
    given = reader.take_given(name)
    if given is None:
        return None
    if not isinstance(given, list) or any(not is_count(n) or n >= num_layers for n in given):
        reader.refuse(f"{name}={given!r}: it must be a list of numbers of layers, from 0 to {num_layers - 1}")
        return None
    return given


def set_mlp_kinds(keys: ModelKeys, sparse: Sequence[bool]) -> None:
    """Sets the keys that make just these layers have experts."""
    keys["num_dense_layers"], keys["mlp_pattern"] = fold_mlp(["moe" if flag else "dense" for flag in sparse])


def _layers(keys: ModelKeys) -> range:
    return range(keys["num_decoder_layers"])
