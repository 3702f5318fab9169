"""A float model and what rounding its kernels makes of it, without the command."""

import functools
from typing import Any

import jax
import numpy as np

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.model.build import Model, Params, build_model
from maxlite.ops.stored import dequantize_kernel, quantize_kernel
from maxlite.quantize.measure import Side
from maxlite.train.eval_setup import EvalSetup, build_eval_setup
from tests.conftest import load_tiny

ROWS, LENGTH, VOCAB = 8, 24, 72
# Compiled once for each shape of a kernel.
round_kernel = jax.jit(quantize_kernel, static_argnums=(1, 2, 3))
float_kernel = jax.jit(dequantize_kernel, static_argnums=(2, 3, 4))


@functools.cache
def two_models(*keys: str, devices: int = 1) -> tuple[Config, EvalSetup, Side, Side]:
    """keys: of both, and the weight_quant keys of the rounded one. Returns the config of the float one, and both."""
    config, setup = setup_of(*(key for key in keys if not key.startswith("weight_quant")), devices=devices)
    rounded = load_tiny(*_fixed(devices), *keys)
    stored = build_model(rounded.model, rounded.compute)
    params = noisy(setup.model)
    sides = []
    for model, own in ((setup.model, params), (stored, rounded_params(params, stored))):
        sides.append(Side(model, jax.device_put(own, model.shardings(setup.mesh, setup.rules))))
    return config, setup, sides[0], sides[1]


def setup_of(*keys: str, devices: int = 1) -> tuple[Config, EvalSetup]:
    """A tiny model with a soft cap, and batches of ROWS whatever the devices."""
    config = load_tiny(*_fixed(devices), *keys)
    return config, build_eval_setup(config)


def rounded_params(params: Params, stored: Model) -> Params:
    """The parameters of `stored`, each kernel rounded to nearest."""
    params = jax.tree.map(lambda leaf: leaf, params)
    for product in stored.products:
        form = product.equipment.stored
        if form is not None:
            node = node_of(params, product.params_path)
            dims = tuple(dim + 1 for dim in product.summed_dims)
            node["codes"], node["scale"] = round_kernel(node.pop("kernel"), dims, form.qtype, form.tile_size)
    return params


def node_of(params: Params, path: str) -> Any:
    for step in path.split("/"):
        params = params[step]
    return params


def noisy(model: Model) -> Params:
    """Matrices large enough that logits differ, and norms around one."""
    random = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> jax.Array:
        noise = random.normal(size=leaf.shape) * 0.15 + (path[-1].key == "scale")
        return jax.numpy.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, model.abstract_params)


def batch_of(seed: int) -> Batch:
    """Two documents in each row, then padding; some tokens are only read."""
    random = np.random.default_rng(seed)
    first = random.integers(3, 12, (ROWS, 1))
    second = random.integers(14, LENGTH, (ROWS, 1))
    place = np.arange(LENGTH)[None]
    segments = np.where(place < first, 1, np.where(place < second, 2, 0)).astype(np.int32)
    positions = np.where(segments == 2, place - first, np.where(segments == 1, place, 0)).astype(np.int32)
    inputs, targets = random.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
    mask = (segments > 0) & (random.random((ROWS, LENGTH)) < 0.8)
    return Batch(inputs, targets, mask.astype(np.float32), positions, segments)


def _fixed(devices: int) -> tuple[str, ...]:
    return (
        f"vocab_size={VOCAB}",
        f"max_target_length={LENGTH}",
        "final_logits_soft_cap=5",
        "jax_cache_dir=null",
        f"per_device_batch_size={ROWS / devices}",
        f"cpu_devices={devices}",
    )
