"""Rules between the keys of quantization and adapters: what works together."""

import re
from collections.abc import Callable, Iterator

from maxlite.config.schema import Config
from maxlite.errors import ConfigError

_PATTERNS = ("weight_quant_module_path", "lora_module_path")


def check_quant_rules(config: Config) -> Iterator[str]:
    """Every rule rounds something sensible, and every pattern is one."""
    for name in _PATTERNS:
        pattern = getattr(config.compute, name)
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{name}={pattern!r} is no regular expression: {error}."
    for rule in config.compute.quant_rules or ():
        if rule.weight_qtype is None and (rule.act_qtype is not None or rule.bwd_qtype is not None):
            yield (
                f"quant_rules: {rule.module_path!r} rounds activations or gradients and not its kernel; give "
                "weight_qtype too, or none of them to leave it as it is."
            )
        if rule.bwd_qtype is not None and rule.act_qtype is None:
            yield f"quant_rules: {rule.module_path!r} has a bwd_qtype and needs an act_qtype: gradients multiply both."


def check_stored_weights(config: Config) -> Iterator[str]:
    """Kernels in few bits do not train, and are multiplied as they are."""
    compute, stored = config.compute, config.compute.weight_quantization
    rounding = [name for name in ("quantization", "quant_rules") if getattr(compute, name) is not None]
    if stored is None:
        return
    if rounding:
        yield (
            f"weight_quantization={stored} stores rounded kernels, and {rounding[0]} rounds them anew in each product; "
            "set one of them to null."
        )
    if stored in ("int4", "nf4") and compute.weight_quant_tile_size is not None and compute.weight_quant_tile_size % 2:
        yield f"weight_quant_tile_size={compute.weight_quant_tile_size} is odd, and two values of {stored} make a byte."


def check_adapters(config: Config) -> Iterator[str]:
    """What an adapter trains beside."""
    compute = config.compute
    if compute.lora_rank and config.train.routed_bias_update_rate:
        yield (
            f"lora_rank={compute.lora_rank} trains adapters alone, and routed_bias_update_rate="
            f"{config.train.routed_bias_update_rate:g} would move the routers; set it to 0."
        )


def check_cache(config: Config) -> Iterator[str]:
    """Two numbers make a byte."""
    model = config.model
    if not config.compute.quantize_kvcache or config.compute.kv_quant_dtype != "int4":
        return
    widths = {"head_dim": model.head_dim, "global_head_dim": model.global_head_dim}
    if "mla" in model.attention_pattern:
        widths = {"kv_lora_rank": model.kv_lora_rank, "qk_rope_head_dim": model.qk_rope_head_dim}
    for name, width in widths.items():
        if width is not None and width % 2:
            yield f"kv_quant_dtype=int4 puts two numbers in a byte, and {name}={width} is odd; use kv_quant_dtype=int8."


def require_trainable(config: Config) -> None:
    """Raises ConfigError where nothing could learn."""
    stored = config.compute.weight_quantization
    if stored is not None and config.compute.lora_rank == 0:
        raise ConfigError(
            f"weight_quantization={stored} stores kernels in few bits, which do not train. Give lora_rank=8 to train "
            "adapters beside them, or train the model that they were made from; quantization=int8 rounds products "
            "while a float model trains."
        )


QUANT_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_quant_rules,
    check_stored_weights,
    check_adapters,
    check_cache,
)
