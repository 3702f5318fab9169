import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.load import load_config
from maxlite.hf.kernels import kernel_reader, plain_model
from maxlite.model.build import build_model
from maxlite.ops.stored import dequantize_kernel
from tests.conftest import TINY

_dequantize_kernel = jax.jit(dequantize_kernel, static_argnums=(2, 3, 4))


def adapter_by_hand(lora_a: np.ndarray, lora_b: np.ndarray, kernel: np.ndarray, alpha_over_rank: float) -> np.ndarray:
    """Of a stacked dense kernel [layers, in..., out...]."""
    rank = lora_a.shape[-1]
    flat_a = lora_a.reshape(len(lora_a), -1, rank).astype(np.float64)
    flat_b = lora_b.reshape(len(lora_b), rank, -1).astype(np.float64)
    return kernel + alpha_over_rank * (flat_a @ flat_b).reshape(kernel.shape)


@pytest.mark.parametrize("stored", [None, "int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("rank", [0, 4])
def test_kernels_as_floats(stored, rank):
    keys = [
        f"weight_quantization={stored or 'null'}",
        "weight_quant_tile_size=32" if stored else "",
        f"lora_rank={rank}",
    ]
    config = load_config("base.yml", [*TINY, *filter(None, keys), "lora_alpha=8", "lora_module_path=.*"])
    model = build_model(config.model, config.compute)
    rng = np.random.default_rng(0)
    params = {}
    for path, leaf in leaf_paths(model.abstract_params).items():
        if leaf.dtype == np.float32:
            params[path] = np.float32(rng.uniform(0.1, 1, leaf.shape))
        else:
            params[path] = rng.integers(0, 100, leaf.shape).astype(np.uint8).view(leaf.dtype)
    arrays = {path: np.asarray(value) for path, value in params.items()}

    def read(path: str) -> jax.Array:
        return jnp.asarray(arrays[path])

    fetch = kernel_reader(model, read)
    plain = leaf_paths(plain_model(model).abstract_params)
    for path, leaf in plain.items():
        value = fetch(path)
        assert (value.shape, value.dtype) == (leaf.shape, leaf.dtype), path
    for product in model.products:
        path, dims = product.params_path, tuple(dim + 1 for dim in product.summed_dims)
        if stored:
            kernel = _dequantize_kernel(arrays[f"{path}/codes"], arrays[f"{path}/scale"], dims, stored, np.float32)
        else:
            kernel = arrays[f"{path}/kernel"]
        kernel = np.asarray(kernel)
        if rank:
            kernel = adapter_by_hand(arrays[f"{path}/lora_a"], arrays[f"{path}/lora_b"], kernel, 8 / rank)
        np.testing.assert_allclose(fetch(f"{path}/kernel"), kernel, rtol=1e-5, atol=1e-5)
