"""What rounding changes in each product of each layer: its kernel, and what it gives for inputs from real text."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.config.layers import layer_groups, layer_places
from maxlite.data.batch import Batch
from maxlite.model.build import Model, Params
from maxlite.model.equip import Product
from maxlite.nn.observe import observing
from maxlite.ops.experts import RowGroups, grouped_product
from maxlite.ops.product import product as einsum_product
from maxlite.ops.stored import dequantize_kernel
from maxlite.quantize.measure import Side
from maxlite.quantize.tree import at_path
from maxlite.train.eval_setup import EvalSetup

# Path of a product -> [repeats, 2]: sums of squares of what rounding changed, and of what was there.
Squares = dict[str, Any]


class LayerError(NamedTuple):
    """One product of one layer; both errors are root mean squares relative to what they change, 0.01 for 1%.

    layer: its number, from 0. path: as group_0/block_0/mlp/down.
    kernel: of the weights. output: of the product of held-out text's activations in the float model; None without text.
    """

    layer: int
    path: str
    kernel: float
    output: float | None

    @property
    def name(self) -> str:
        """The path inside its layer, as mlp/down."""
        return self.path.split("/", 2)[2]

    @property
    def size(self) -> float:
        """What products are ranked by."""
        return self.kernel if self.output is None else self.output


class _Form(NamedTuple):
    """How codes become floats."""

    contracted: tuple[int, ...]
    qtype: str


def stored_products(model: Model) -> tuple[Product, ...]:
    """Returns the products whose kernels are stored in few bits."""
    return tuple(product for product in model.products if product.equipment.stored is not None)


def kernel_squares(setup: EvalSetup, whole: Side, stored: Side) -> Squares:
    """Returns the sums over each kernel, of one product after the other, so that few floats are made at once."""
    replicated = NamedSharding(setup.mesh, PartitionSpec())

    @functools.partial(jax.jit, static_argnums=0, out_shardings=replicated)
    def of_product(form: _Form, kernel: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        def of_repeat(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return _pair(_change(form, *arrays), arrays[0])

        return jax.lax.map(of_repeat, (kernel, codes, scale))

    return {
        product.path: of_product(_form(product), *_arrays(product, whole.params, stored.params))
        for product in stored_products(stored.model)
    }


def build_output_step(
    setup: EvalSetup, whole: Model, stored: Model
) -> Callable[[tuple[Params, Params], Batch], Squares]:
    """Returns the compiled `step((whole params, stored params), batch) -> Squares` of what products give.

    To be called outside of the setup's mesh: inside of it the inputs of experts belong to one device's part of the
    program. The partitioner cuts the work by the parameters all the same. Padding does not count, but what experts
    make of it.
    """
    products = {product.path: product for product in stored_products(stored)}

    def step(params: tuple[Params, Params], batch: Batch) -> Squares:
        batch = _in_order(setup, batch)
        kernels, codes = whole.unstack(params[0]), stored.unstack(params[1])
        found: Squares = {path: [] for path in products}

        def note(path: str, x: jax.Array, groups: RowGroups | None) -> None:
            if path in products:
                product, repeat = products[path], len(found[path])
                kernel, values, scale = (array[repeat] for array in _arrays(product, kernels, codes))
                real = None if product.is_experts else batch.segment_ids
                found[path].append(_output_pair(product, x, groups, (kernel, values, scale), real))

        with observing(note):
            whole.apply(kernels, batch.inputs, batch.positions, batch.segment_ids)
        assert all(len(found[path]) == product.repeats for path, product in products.items()), "each is called once"
        return {path: jnp.stack(pairs) for path, pairs in found.items()}

    return jax.jit(step, out_shardings=NamedSharding(setup.mesh, PartitionSpec()))


def layer_errors(stored: Model, kernels: Squares, outputs: Squares | None) -> tuple[LayerError, ...]:
    """Returns the errors of all stored products, layer by layer, from sums over kernels and over held-out text."""
    of_kernels, of_outputs = _ratios(kernels), None if outputs is None else _ratios(outputs)
    return tuple(
        LayerError(
            layer,
            product.path,
            float(of_kernels[product.path][place.repeat]),
            None if of_outputs is None else float(of_outputs[product.path][place.repeat]),
        )
        for layer, place in enumerate(layer_places(layer_groups(stored.config)))
        for product in stored_products(stored)
        if product.path.startswith(f"group_{place.group}/block_{place.position}/")
    )


def _arrays(product: Product, kernels: Params, codes: Params) -> tuple[Any, Any, Any]:
    """The float kernel, the codes and their scale: stacked, or a tuple of the repeats' arrays."""
    stored = at_path(codes, product.params_path)
    return at_path(kernels, product.params_path)["kernel"], stored["codes"], stored["scale"]


def _form(product: Product) -> _Form:
    assert product.equipment.stored is not None
    return _Form(product.summed_dims, product.equipment.stored.qtype)


def _change(form: _Form, kernel: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    made = dequantize_kernel(codes, scale, form.contracted, form.qtype, jnp.dtype("float32"))
    return made - kernel.astype(jnp.float32)


def _output_pair(
    product: Product,
    x: jax.Array,
    groups: RowGroups | None,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    real: jax.Array | None,
) -> jax.Array:
    """x: [B, T, ...], of which `real` [B, T] are not 0; of experts as note_input says. Returns [2]."""
    x = x.astype(jnp.float32)
    if real is not None:
        x = jnp.where((real != 0).reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)

    def given(kernel: jax.Array) -> jax.Array:
        return grouped_product(x, kernel, groups) if product.is_experts else einsum_product(product.equation, x, kernel)

    return _pair(given(_change(_form(product), *arrays)), given(arrays[0].astype(jnp.float32)))


def _pair(change: jax.Array, whole: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(jnp.square(part.astype(jnp.float32))) for part in (change, whole)])


def _in_order(setup: EvalSetup, batch: Batch) -> Batch:
    """Undoes the order in which rows that are cut over their length lie on the mesh."""
    order = setup.batches.orders[batch.inputs.shape[1]]
    return batch if order is None else jax.tree.map(lambda part: part[:, np.argsort(order)], batch)


def _ratios(squares: Squares) -> dict[str, np.ndarray]:
    """Path -> [repeats]; 0 where nothing was there, for then nothing changed."""
    ratios = {}
    for path, pairs in squares.items():
        change, whole = np.moveaxis(np.asarray(pairs, np.float64), -1, 0)
        ratios[path] = np.sqrt(change / np.where(whole == 0, 1, whole))
    return ratios
