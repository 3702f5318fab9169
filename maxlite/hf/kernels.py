"""Kernels of a run as floats, however it has them: in few bits, or with an adapter beside them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.model.build import Model, build_model
from maxlite.model.equip import Product
from maxlite.nn.lora import with_adapter
from maxlite.ops.stored import dequantize_kernel

KERNEL = "/kernel"
# Compiled as a whole, so that no scale of each element is held.
_dequantize_kernel = jax.jit(dequantize_kernel, static_argnums=(2, 3, 4))


def plain_model(model: Model) -> Model:
    """Returns the same architecture with a float kernel in each product and nothing beside it."""
    return build_model(model.config, dataclasses.replace(model.compute, weight_quantization=None, lora_rank=0))


def kernel_reader(model: Model, read: Callable[[str], jax.Array]) -> Callable[[str], np.ndarray]:
    """Returns a function from the path of a parameter of `plain_model` to its value, adapters merged into kernels.

    read: of the parameters of `model`.
    """
    products = {product.params_path + KERNEL: product for product in model.products}

    def fetch(path: str) -> np.ndarray:
        product = products.get(path)
        if product is None:
            return np.asarray(read(path))
        return np.asarray(_kernel(product, read, jnp.dtype(model.compute.weight_dtype)))

    return fetch


def stacked_dims(product: Product) -> tuple[int, ...]:
    """Returns the summed dimensions of a kernel that is stacked over its layers."""
    return tuple(place + 1 for place in product.summed_dims)


def _kernel(product: Product, read: Callable[[str], jax.Array], dtype: jnp.dtype) -> jax.Array:
    stored, adapter, path = product.equipment.stored, product.equipment.adapter, product.params_path
    if stored is None:
        kernel = read(path + KERNEL)
    else:
        codes, scale = read(f"{path}/codes"), read(f"{path}/scale")
        # What is added comes before the rounding.
        exact = dtype if adapter is None else jnp.dtype("float32")
        kernel = _dequantize_kernel(codes, scale, stacked_dims(product), stored.qtype, exact)
    if adapter is not None:
        lora_a, lora_b = read(f"{path}/lora_a"), read(f"{path}/lora_b")
        kernel = with_adapter(product.equation, kernel, lora_a, lora_b, adapter)
    return kernel.astype(dtype)
