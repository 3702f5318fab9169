"""GPTQ for a whole model: each layer's kernels are rounded with their inputs in view, those of the float model."""

from collections.abc import Sequence
from typing import TextIO

import jax
import jax.numpy as jnp

from maxlite.data.batch import Batch
from maxlite.model.build import Params
from maxlite.model.equip import Product, describe_products
from maxlite.ops.stored import pack
from maxlite.quantize.calibrate import num_inputs, observed_inputs, places_of
from maxlite.quantize.gptq_rounding import gptq_codes
from maxlite.quantize.measure import Side
from maxlite.quantize.tree import at_path, with_path


def quantize_gptq(whole: Side, stored: Side, batches: Sequence[Batch], notes: TextIO) -> Params:
    """Returns the stored model's parameters with codes that give nearly the same products on text.

    whole: the float model. stored: the same in int4, rounded to nearest; its scales stay. batches: on the mesh.
    notes: where is told what stays rounded to nearest: experts, of which each sees a text of its own.
    """
    kept = [product for product in stored.model.products if product.equipment.stored is not None]
    experts = [product for product in kept if product.is_experts]
    if experts:
        print(f"Rounded to nearest, where GPTQ does not reach: {describe_products(experts)}", file=notes)
    chosen = [product for product in kept if not product.is_experts]
    codes: dict[str, list[jax.Array]] = {product.path: [] for product in chosen}
    for (product, repeat), inputs in observed_inputs(whole.model, whole.params, places_of(chosen), batches):
        kernel = at_path(whole.params, product.params_path)["kernel"][repeat]
        scale = at_path(stored.params, product.params_path)["scale"][repeat]
        codes[product.path].append(_codes(product, kernel, scale, inputs.products))
    params = stored.params
    for product in chosen:
        old = at_path(params, product.params_path)["codes"]
        new = jax.device_put(jnp.stack(codes.pop(product.path)), old.sharding)
        params = with_path(params, f"{product.params_path}/codes", new)
    return params


def _codes(product: Product, kernel: jax.Array, scale: jax.Array, products: jax.Array) -> jax.Array:
    form, rows = product.equipment.stored, num_inputs(product)
    assert form is not None and product.summed_dims[0] == 0, "the summed dimensions of a Linear come first"
    columns = kernel.size // rows
    values = gptq_codes(kernel.reshape(rows, columns), scale.reshape(-1, columns), products)
    return pack(values.reshape(kernel.shape), product.summed_dims, form.qtype)
