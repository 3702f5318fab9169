"""AWQ (Lin et al. 2024, arXiv:2306.00978): inputs that matter most are rounded most finely, and nothing is stored more.

An input that is divided by a factor, its row of the matrix multiplied by it, gives the same product. What makes the
input, a norm or the product `up` of an MLP, divides by the factor on its own: its weights take it in.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

import jax
import jax.numpy as jnp

from maxlite.data.batch import Batch
from maxlite.model.build import Model, Params
from maxlite.model.equip import Product, describe_products
from maxlite.nn.equipment import StoredForm
from maxlite.ops.stored import dequantize_kernel, quantize_kernel
from maxlite.quantize.calibrate import Inputs, observed_inputs, places_of
from maxlite.quantize.measure import Side
from maxlite.quantize.tree import at_path, has_path, with_path

# A norm of a block -> all that multiplies what it gives, by the names that some kind of block has.
_BEHIND_NORMS = {
    "attention_norm": tuple(
        f"attention/{name}" for name in ("query", "key", "value", "gate", "beta", "step", "query_a", "key_value_a")
    ),
    "attention/query_a_norm": ("attention/query_b",),
    "attention/key_value_a_norm": ("attention/key_value_b",),
    "mlp_norm": ("mlp/gate", "mlp/up"),
    "mlp/dense_norm": ("mlp/dense/gate", "mlp/dense/up"),
}
_GATED_MLPS = ("mlp", "mlp/shared", "mlp/dense")
# Factors are powers of the inputs' mean sizes: 0, 1/20, ... 19/20; the first leaves all as it is.
_NUM_POWERS = 20
_SMALLEST_SIZE = 1e-4


class Fold(NamedTuple):
    """A place where inputs can be divided by factors.

    source: path, among the parameters, of the norm or of the product that makes the inputs.
    consumers: paths of all that multiplies them. rounded: those of them that are stored in few bits, at least one.
    """

    source: str
    consumers: tuple[str, ...]
    rounded: tuple[Product, ...]


def fold_input_scales(whole: Side, stored_model: Model, batches: Sequence[Batch], notes: TextIO) -> Params:
    """Returns float parameters of the same function, whose kernels lose less when they are rounded to nearest.

    whole: the float model. stored_model: says which kernels are to be stored, and how. batches: on the mesh.
    notes: where is told what could not be reached.
    """
    model, params = whole
    folds = {fold.rounded[0].path: fold for fold in find_folds(params, stored_model)}
    reached = [product.path for fold in folds.values() for product in fold.rounded]
    rest = [one for one in stored_model.products if one.equipment.stored and one.path not in reached]
    if rest:
        print(f"Rounded to nearest as they are, where AWQ does not reach: {describe_products(rest)}", file=notes)
    factors: dict[str, list[jax.Array]] = {path: [] for path in folds}
    places = places_of([fold.rounded[0] for fold in folds.values()])
    for place, inputs in observed_inputs(model, params, places, batches):
        fold = folds[place.product.path]
        form = fold.rounded[0].equipment.stored
        assert form is not None, "a fold has something to round"
        matrix = jnp.concatenate([_matrix(params, product, place.repeat) for product in fold.rounded], axis=1)
        factors[place.product.path].append(search_factors(matrix, inputs, form))
    for path, found in factors.items():
        params = apply_factors(params, folds[path], jnp.stack(found), model.config.norm_scale_offset)
    return params


def find_folds(params: Params, stored_model: Model) -> Iterator[Fold]:
    """Yields the folds of a model's blocks that have something to round behind them."""
    products = {product.params_path: product for product in stored_model.products}
    # gate may join another function than up's multiple, as GPT-OSS's.
    linear_up = stored_model.config.mlp_activation != "swigluoai"
    blocks = {"/".join(path.split("/")[:3]) for path in products}
    for block in sorted(blocks):
        names = [(norm, consumers) for norm, consumers in _BEHIND_NORMS.items()]
        names += [(f"{mlp}/up", (f"{mlp}/down",)) for mlp in _GATED_MLPS if linear_up]
        for source, consumers in names:
            found = tuple(f"{block}/{name}" for name in consumers if has_path(params, f"{block}/{name}"))
            rounded = tuple(
                products[path] for path in found if path in products and products[path].equipment.stored is not None
            )
            if rounded and has_path(params, f"{block}/{source}"):
                yield Fold(f"{block}/{source}", found, rounded)


@functools.partial(jax.jit, static_argnames="form")
def search_factors(matrix: jax.Array, inputs: Inputs, form: StoredForm) -> jax.Array:
    """Returns the factor of each input [K] by which the rounded matrix's products are nearest to the matrix's.

    matrix: [K, N]. inputs: [K, K] and [K].
    """
    matrix = matrix.astype(jnp.float32)
    sizes = inputs.magnitudes / jnp.maximum(jnp.max(inputs.magnitudes), jnp.finfo(jnp.float32).tiny)
    sizes = jnp.maximum(sizes, _SMALLEST_SIZE)

    def factors_of(power: jax.Array) -> jax.Array:
        factors = sizes**power
        return factors / jnp.sqrt(jnp.max(factors) * jnp.min(factors))

    def loss(power: jax.Array) -> jax.Array:
        factors = factors_of(power)[:, None]
        codes, scale = quantize_kernel(matrix * factors, (0,), form.qtype, form.tile_size)
        error = dequantize_kernel(codes, scale, (0,), form.qtype, jnp.dtype("float32")) / factors - matrix
        return jnp.sum(error * jnp.matmul(inputs.products, error, precision=jax.lax.Precision.HIGHEST))

    powers = jnp.arange(_NUM_POWERS) / _NUM_POWERS
    return factors_of(powers[jnp.argmin(jax.lax.map(loss, powers))])


def apply_factors(params: Params, fold: Fold, factors: jax.Array, norm_offset: float) -> Params:
    """Returns the parameters of a model whose inputs at the fold are divided by `factors`, and their rows multiplied.

    factors: [repeats, K]. norm_offset: is added to the scale of norms.
    """
    source = at_path(params, fold.source)
    if "kernel" in source:
        new = {
            # Its last dimension makes the inputs; of a norm of several dimensions there is no fold.
            name: (weight / factors.reshape(len(factors), *[1] * (weight.ndim - 2), -1)).astype(weight.dtype)
            for name, weight in source.items()
        }
    else:
        old = source["scale"].astype(jnp.float32) + norm_offset
        scale = (old / factors - norm_offset).astype(source["scale"].dtype)
        # What the norm's dtype made of it is what the rows must undo.
        made = scale.astype(jnp.float32) + norm_offset
        factors = jnp.where(made == 0, 1.0, old / jnp.where(made == 0, 1.0, made))
        new = {"scale": scale}
    params = with_path(params, fold.source, source | new)
    for path in fold.consumers:
        node = at_path(params, path)
        kernel = node["kernel"]
        wide = factors.reshape(*factors.shape, *[1] * (kernel.ndim - 2))
        params = with_path(params, path, node | {"kernel": (kernel * wide).astype(kernel.dtype)})
    return params


def _matrix(params: Params, product: Product, repeat: int) -> jax.Array:
    kernel = at_path(params, product.params_path)["kernel"][repeat]
    return kernel.reshape(kernel.shape[0], -1)
