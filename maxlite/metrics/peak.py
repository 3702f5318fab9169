"""The most FLOP/s that a device can do, which MFU is a share of."""

import math
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.errors import ConfigError


class _Peak(NamedTuple):
    """A device whose name holds all of `words`, and its dense bfloat16 TFLOP/s."""

    words: frozenset[str]
    tflops: float


def _peak(words: str, tflops: float) -> _Peak:
    return _Peak(frozenset(words.split()), tflops)


# Per jax device: a TPU v4 or v5p chip is one device, a tpu7x chip is two. From the makers' data sheets, without
# sparsity. The first row that fits decides, so the narrower name stands first.
_PEAKS = (
    _peak("tpu v4", 275),
    _peak("tpu v5 lite", 197),
    _peak("tpu v5e", 197),
    _peak("tpu v5", 459),
    _peak("tpu v5p", 459),
    _peak("tpu v6 lite", 918),
    _peak("tpu v6e", 918),
    _peak("tpu7x", 1153),
    _peak("a100", 312),
    _peak("h100 pcie", 756),
    _peak("h100 nvl", 835),
    _peak("h100", 989),
    _peak("h200", 989),
    _peak("b200", 2250),
)
_MATMUL_SIZE = 1536
_MATMUL_REPEATS = 5


def peak_tflops(setting: str, device: jax.Device, dtype: str) -> float | None:
    """Peak TFLOP/s of `device`, or None where it is not known and MFU has to be left out.

    setting: `peak_tflops_per_device`: a number, or auto for the table of accelerators. The table is bfloat16's
        whatever dtype the run has, as is usual for MFU. A CPU is measured, in under a second.
    dtype: resolved dtype of activations, for the measurement.

    Raises:
        ConfigError: the setting is neither auto nor a number above 0.
    """
    if setting != "auto":
        return _given_peak(setting)
    if device.platform == "cpu":
        return _measured_tflops(device, dtype) / len(device.client.local_devices())
    return table_peak(device.device_kind)


def table_peak(device_kind: str) -> float | None:
    """Looks up a device by the name that jax gives it; a share of a device (MIG) has no entry."""
    words = set(re.findall(r"[a-z0-9]+", device_kind.lower()))
    if "mig" in words:
        return None
    return next((peak.tflops for peak in _PEAKS if peak.words <= words), None)


def _given_peak(setting: str) -> float:
    try:
        tflops = float(setting)
    except ValueError:
        tflops = math.nan
    if not (tflops > 0 and math.isfinite(tflops)):
        raise ConfigError(
            f"peak_tflops_per_device={setting}: allowed are auto or a number above 0, in TFLOP/s for one device "
            "(an H100 has 989); set one of these."
        )
    return tflops


def _measured_tflops(device: jax.Device, dtype: str) -> float:
    """Times a matmul on all cores of the host, which fake devices share."""
    matrix = jax.device_put(jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), dtype), device)
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    best = math.inf
    for _ in range(_MATMUL_REPEATS):
        begin = time.perf_counter()
        multiply(matrix, matrix).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * _MATMUL_SIZE**3 / best / 1e12
