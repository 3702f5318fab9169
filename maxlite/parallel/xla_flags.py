"""Flags of the compiler for one program, and named sets of them. Unlike XLA_FLAGS they can't end the process."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config.schema import CompileConfig
from maxlite.errors import ConfigError
from maxlite.parallel.topology import without_compile_cache


class Options(dict[str, Any]):
    """Flags of the step, name -> value."""

    def __init__(self) -> None:
        """No flags. sources: name -> key of the config that the flag came from."""
        super().__init__()
        self.sources: dict[str, str] = {}

    def add(self, source: str, flags: Mapping[str, Any]) -> None:
        """Sets flags that come from the key `source`; a later one replaces an earlier of its name."""
        self.update(flags)
        self.sources |= dict.fromkeys(flags, source)


class _Preset(NamedTuple):
    """platform: where its flags exist."""

    platform: str
    flags: Mapping[str, str | bool | int]


PRESETS: dict[str, _Preset] = {
    # Gathers run beside the layers' arithmetic, cut into steps of it. v5e does so without being asked, v6e does not.
    "async_collectives": _Preset(
        "tpu",
        {
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_enable_async_all_gather": True,
            "xla_tpu_overlap_compute_collective_tc": True,
        },
    ),
    # Each collective by itself, to see in a profile what it costs.
    "sync_collectives": _Preset(
        "tpu", {"xla_tpu_enable_async_collective_fusion": False, "xla_enable_async_all_gather": False}
    ),
    # Large weights are gathered before the product they are for. Otherwise the compiler cuts such products into pieces
    # and sends the weights round by neighbours beside them, which takes memory for the pieces.
    "no_collective_matmul": _Preset("tpu", {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}),
    # Collectives on the sparse cores (v5p, v6e, tpu7x), while the tensor cores compute.
    "sparse_core_collectives": _Preset(
        "tpu",
        {
            "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
        },
    ),
}


def compiler_options(section: CompileConfig, platform: str) -> Options:
    """Returns the flags of the step, name -> value: the preset's, then those given.

    Raises:
        ConfigError: no such preset, it is another platform's, or a flag is not written --name=value.
    """
    options, preset = Options(), section.xla_flags_preset
    if preset is not None:
        options.add(f"xla_flags_preset={preset}", _preset(preset, platform))
    for text in (section.compile_xla_flags or "").split():
        name, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not name or not equals:
            raise ConfigError(f"compile_xla_flags: {text} is not written --name=value.")
        options.add("compile_xla_flags", {name: _value(value)})
    return options


def check_options(options: Options, device: jax.Device) -> None:
    """Compiles next to nothing with the flags, so that a wrong one is found before a long compile.

    Raises:
        ConfigError: names the flag that the compiler refuses, and the key that it came from.
    """
    if not options:
        return
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(jnp.negative).lower(number)
    for name, value in options.items():
        try:
            with without_compile_cache():
                lowered.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0].partition(": ")[2] or str(error)
            raise ConfigError(
                f"{options.sources[name]}: the compiler for {device.platform} refuses --{name}={value}: {reason}"
            ) from error


def _preset(name: str, platform: str) -> Mapping[str, str | bool | int]:
    if name not in PRESETS:
        raise ConfigError(f"xla_flags_preset={name} is not known; it is one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    if preset.platform != platform:
        raise ConfigError(f"xla_flags_preset={name} is for {preset.platform}, and the step is compiled for {platform}.")
    return preset.flags


def _value(text: str) -> str | bool | int | float:
    """Flags that are written in XLA as numbers or booleans must come as such."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", text) else text
