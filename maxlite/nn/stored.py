"""Kernels that are stored in few bits, as the parameters `codes` and `scale` of their product."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.errors import ConfigError
from maxlite.nn.equipment import StoredForm
from maxlite.nn.param import param
from maxlite.ops.stored import (
    code_dtype,
    code_shape,
    contracted_dims,
    dequantize_kernel,
    is_packed,
    quantize_kernel,
    scale_shape,
)


def store_kernel(product: Any, form: StoredForm, *, rngs: nnx.Rngs | None) -> None:
    """Replaces the parameter `kernel` by `codes` and `scale`, of the same logical axes where they have their sizes.

    product: has an `equation` and a `kernel`.

    Raises:
        ConfigError: two values do not make a byte.
    """
    contracted, axes = contracted_dims(product.equation), product.kernel.get_metadata()["axes"]
    kernel = product.kernel.get_raw_value()
    shape = kernel.shape
    if is_packed(form.qtype) and shape[contracted[-1]] % 2:
        raise ConfigError(
            f"{form.qtype} stores two neighbours of a summed dimension in a byte, and {axes[contracted[-1]]} of "
            f"{product.equipment.path} has size {shape[contracted[-1]]}, which is odd. Leave it out by "
            "weight_quant_module_path, or take int8 or fp8."
        )
    scales = scale_shape(shape, contracted, form.tile_size)
    codes, scale = 0.0, 1.0
    if rngs is not None:
        codes, scale = quantize_kernel(kernel, contracted, form.qtype, form.tile_size)
    # Tiles do not lie along the mesh axes that the elements do: a mesh need not divide their number.
    names = tuple(name if size == own else None for name, size, own in zip(axes, scales, shape, strict=True))
    dtype, codes_shape = code_dtype(form.qtype).name, code_shape(shape, contracted, form.qtype)
    del product.kernel
    product.codes = param(rngs, codes_shape, axes, dtype=dtype, value=codes)
    product.scale = param(rngs, scales, names, dtype="float32", value=scale)


def stored_kernel(product: Any, dtype: jnp.dtype, codes: jax.Array) -> jax.Array:
    """Returns the kernel as floats; codes: the product's own, perhaps behind a barrier."""
    contracted = contracted_dims(product.equation)
    qtype = product.equipment.stored.qtype
    return dequantize_kernel(codes, product.scale[...], contracted, qtype, dtype)
