"""Rows of quant_rules, and the names that quantization goes by."""

from typing import NamedTuple

# What a product's operands may be rounded to, and what weights may be stored as.
QTYPES = ("int8", "int4", "fp8", "fp8_e5m2")
STORED_TYPES = ("int8", "int4", "nf4", "fp8")
QUANTIZE_METHODS = ("int8", "int4", "nf4", "fp8", "gptq", "awq")
CALIBRATIONS = ("absmax", "rms")


class QuantRule(NamedTuple):
    """One row of quant_rules: how the products whose module path matches are quantized; the first match decides.

    module_path: a regular expression that the whole path must match, as group_0/block_0/mlp/up.
    weight_qtype, act_qtype, bwd_qtype: one of QTYPES, of kernels, activations and incoming gradients; None rounds
        none of them. A row without any leaves what it matches as it is.
    tile_size: products are cut into so many summed elements, each with its own scales; None = one scale a channel.
    calibration: how a scale comes from values.
    """

    module_path: str
    weight_qtype: str | None = None
    act_qtype: str | None = None
    bwd_qtype: str | None = None
    tile_size: int | None = None
    calibration: str = "absmax"


QuantRules = tuple[QuantRule, ...]
