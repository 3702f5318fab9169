"""The quantization_config of a config.json: how the weights of a folder are stored, if it can be undone."""

from collections.abc import Mapping
from typing import Any

from maxlite.hf.compressed_json import METHOD as COMPRESSED
from maxlite.hf.compressed_json import compressed_problems
from maxlite.hf.family_fields import is_count

# dequantize says what transformers would make of the weights; here they become floats in any case.
_FP8_KEYS = frozenset(
    {"quant_method", "activation_scheme", "fmt", "weight_block_size", "scale_fmt", "modules_to_not_convert"}
    | {"modules_to_convert", "dequantize", "expert_dtype"}
)
_MXFP4_KEYS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})


def quantization_method(json: Mapping[str, Any]) -> str | None:
    """Returns how the weights of a folder are stored: fp8 in blocks, mxfp4, compressed-tensors, or None as they are."""
    quantization = json.get("quantization_config")
    return quantization["quant_method"] if isinstance(quantization, dict) else None


def quantization_problems(json: Mapping[str, Any], where: str) -> list[str]:
    """Returns what is wrong with quantization_config: a method or a form that maxlite cannot undo."""
    given = json.get("quantization_config")
    if given is None:
        return []
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(given, dict) or method not in ("fp8", "mxfp4", COMPRESSED):
        known = f"fp8, mxfp4 or {COMPRESSED}"
        return [f"{where}: quantization_config.quant_method={method!r} is not supported; it may be {known}."]
    if method == COMPRESSED:
        return compressed_problems(given, where)
    problems = [
        f"{where}: quantization_config.{name}={given[name]!r} is not known for {method}."
        for name in sorted(given.keys() - (_FP8_KEYS if method == "fp8" else _MXFP4_KEYS))
    ]
    block = given.get("weight_block_size")
    if method == "fp8" and not (isinstance(block, list) and len(block) == 2 and all(is_count(n) and n for n in block)):
        problems.append(
            f"{where}: quantization_config.weight_block_size={block!r} is not supported; it may be a block's rows and "
            "columns, as in [128, 128]."
        )
    for name, allowed in (("fmt", "e4m3"), ("expert_dtype", "fp8"), ("modules_to_convert", None)):
        if method == "fp8" and given.get(name, allowed) != allowed:
            problems.append(
                f"{where}: quantization_config.{name}={given[name]!r} is not supported; it may be {allowed}."
            )
    if method == "mxfp4" and json.get("model_type") != "gpt_oss":
        problems.append(f"{where}: quantization_config.quant_method='mxfp4' is supported for model_type gpt_oss only.")
    return problems
