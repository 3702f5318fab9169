"""The quantization_config of compressed-tensors, the form in which llm-compressor and vLLM keep weights of few bits."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlite.hf.rules import Ignored

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
_FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
_KEYS = frozenset(
    {"quant_method", "config_groups", "format", "quantization_status", "ignore", "kv_cache_scheme", "version"}
    | {"global_compression_ratio", "sparsity_config", "transform_config", "moe_sparsity_config"}
)
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
# observer and its like say how the scales were found; scale_dtype and zp_dtype what the files say anyway.
_WEIGHT_KEYS = frozenset(
    {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"}
    | {"scale_dtype", "zp_dtype", "observer", "observer_kwargs"}
)
# Of what is rounded besides weights; of a fixed scale there is a tensor.
ROUNDED_INPUTS = Ignored(r".*\.(input|output)_(scale|zero_point)", "activations are not rounded here")


class Scheme(NamedTuple):
    """How some weights [out, in] are stored.

    kind: int or float. bits: of a value. packed: several values an int32.
    rows, columns: how many of each share a scale; None is all of them.
    """

    kind: str
    bits: int
    packed: bool
    rows: int | None
    columns: int | None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the scales of weights of a shape have: [1] if they share one."""
        if self.rows is None:
            return (1,)
        return tuple(-(-size // (part or size)) for size, part in zip(shape, (self.rows, self.columns), strict=True))


def read_schemes(quantization: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns how weights are stored, each way once; of a quantization_config in which nothing is wrong."""
    schemes = []
    for group in quantization["config_groups"].values():
        weights = group["weights"]
        rows, columns = {
            "tensor": (None, None),
            "channel": (1, None),
            "group": (1, weights.get("group_size")),
            "block": tuple(weights.get("block_structure") or (None, None)),
        }[_strategy(weights)]
        packed = _format(group, quantization) == PACKED
        schemes.append(Scheme(weights.get("type", "int"), weights.get("num_bits", 8), packed, rows, columns))
    return tuple(dict.fromkeys(schemes))


def rounds_activations(quantization: Mapping[str, Any]) -> bool:
    """Says whether what goes into products is to be rounded too, and not only the weights."""
    groups = quantization["config_groups"].values()
    return any(group.get(name) for group in groups for name in ("input_activations", "output_activations"))


def quantization_config(scheme: Scheme, ignored: list[str]) -> dict[str, Any]:
    """Returns what says that all linear layers but the ignored ones are stored by a scheme of a channel's scales.

    ignored: names of modules, or `re:` and a regular expression that they begin with.
    """
    stored = PACKED if scheme.packed else "float-quantized"
    weights = {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": True,
        "strategy": "channel" if scheme.columns is None else "group",
        "group_size": scheme.columns,
        "dynamic": False,
    }
    others = {"input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **others, "format": stored}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def compressed_problems(quantization: Mapping[str, Any], where: str) -> list[str]:
    """Returns what of a quantization_config of compressed-tensors cannot be honoured, one phrase a key."""
    name = f"{where}: quantization_config"
    problems = [f"{name}.{key}={quantization[key]!r} is not known for {METHOD}." for key in quantization.keys() - _KEYS]
    # Its first versions left `frozen` in files that hold no floats any more.
    if (status := quantization.get("quantization_status")) not in ("compressed", "frozen"):
        problems.append(f"{name}.quantization_status={status!r} is not supported; it may be 'compressed'.")
    sparsity = quantization.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"):
        problems.append(f"{name}.sparsity_config={sparsity!r} is not supported; it may be empty.")
    problems += [
        f"{name}.{key}={quantization[key]!r} is not supported; it may be null."
        for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config")
        if quantization.get(key)
    ]
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [*problems, f"{name}.config_groups={groups!r} is not supported; it may be an object of groups."]
    return problems + [
        problem
        for key, group in groups.items()
        for problem in _group_problems(group, f"{name}.config_groups.{key}", quantization)
    ]


def _group_problems(group: Any, name: str, quantization: Mapping[str, Any]) -> list[str]:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return [f"{name}.weights is not there: it needs the weights' num_bits, type and strategy."]
    problems = [f"{name}.{key}={group[key]!r} is not known." for key in group.keys() - _GROUP_KEYS]
    problems += [f"{name}.weights.{key}={weights[key]!r} is not known." for key in weights.keys() - _WEIGHT_KEYS]
    stored = _format(group, quantization)
    kind = weights.get("type", "int")
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "format": (stored, _FORMATS),
        "weights.type": (kind, ("int", "float")),
        "weights.num_bits": (weights.get("num_bits", 8), (8,) if kind == "float" else (4, 8)),
        "weights.symmetric": (weights.get("symmetric", True), (True,)),
        "weights.dynamic": (weights.get("dynamic", False), (False,)),
        "weights.strategy": (_strategy(weights), ("tensor", "channel", "group", "block")),
        # By `group` the columns of the files are in another order than the model's.
        "weights.actorder": (weights.get("actorder") or None, (None, "weight", "static")),
    }
    problems += [
        f"{name}.{key}={value!r} is not supported; it may be {' or '.join(map(repr, values))}."
        for key, (value, values) in allowed.items()
        if value not in values
    ]
    if (stored == PACKED) != (kind == "int") and stored in (PACKED, "float-quantized"):
        problems.append(f"{name}: {stored} cannot hold weights of the type {kind!r}.")
    if weights.get("num_bits", 8) != 8 and stored != PACKED:
        problems.append(f"{name}: {stored} cannot hold weights of {weights['num_bits']} bits; {PACKED} can.")
    return problems + _size_problems(weights, f"{name}.weights")


def _size_problems(weights: Mapping[str, Any], name: str) -> list[str]:
    strategy, size, block = _strategy(weights), weights.get("group_size"), weights.get("block_structure")
    if strategy == "group" and not (isinstance(size, int) and size > 0):
        return [f"{name}.group_size={size!r} is not supported for groups; it may be a whole number above 0."]
    pair = isinstance(block, list) and len(block) == 2 and all(isinstance(part, int) and part > 0 for part in block)
    if strategy == "block" and not pair:
        return [f"{name}.block_structure={block!r} is not supported; it may be a block's rows and columns."]
    return []


def _strategy(weights: Mapping[str, Any]) -> Any:
    """As compressed-tensors does where none is given: groups if they have a size, else one scale for all."""
    size = weights.get("group_size")
    return weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")


def _format(group: Mapping[str, Any], quantization: Mapping[str, Any]) -> Any:
    return group.get("format") or quantization.get("format")
