"""What goes into the products of the layers on some text: the ground on which GPTQ and AWQ round."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset
from maxlite.errors import DataError
from maxlite.model.build import Model, Params
from maxlite.model.equip import Product
from maxlite.nn.observe import observing
from maxlite.train.eval_setup import EvalSetup

# Of the inputs' products that are held at once; more text passes are made for what is beyond.
BYTES_AT_ONCE = 4 << 30


class Inputs(NamedTuple):
    """What went into one product of one layer, over all real tokens of the text.

    products: [K, K], the sum of the products of every two inputs. magnitudes: [K], the sum of each one's size.
    Both float32; K counts through the summed dimensions in order.
    """

    products: Any
    magnitudes: Any


class Place(NamedTuple):
    """A product in one layer: the nth repeat of its group."""

    product: Product
    repeat: int


def calibration_batches(config: Config, setup: EvalSetup, dataset: Dataset) -> list[Batch]:
    """Returns the first calibration_steps batches that training would take, on the mesh.

    Raises:
        DataError: there is none.
    """
    steps = config.quantize.calibration_steps
    batches = [setup.place(batch) for batch in itertools.islice(dataset.train, steps)]
    if not batches:
        raise DataError(f"The training data has no batch to calibrate on: {dataset.summary}.")
    return batches


def places_of(products: Sequence[Product]) -> list[Place]:
    """Returns the products of all layers, layer by layer."""
    repeats = max((product.repeats for product in products), default=0)
    return [Place(one, repeat) for repeat in range(repeats) for one in products if repeat < one.repeats]


def observed_inputs(
    model: Model, params: Params, places: Sequence[Place], batches: Sequence[Batch], bytes_at_once: int = BYTES_AT_ONCE
) -> Iterator[tuple[Place, Inputs]]:
    """Yields what goes into each product, in the order of `places`; not of experts, whose rows differ by text.

    params: of the float model, stacked. batches: on the mesh.

    Raises:
        DataError: the model gives no finite numbers on this text.
    """
    for part in _parts(places, bytes_at_once):
        for place, inputs in zip(part, _observed(model, params, part, batches), strict=True):
            if not bool(jnp.isfinite(inputs.products).all()):
                raise DataError(
                    f"On the text to calibrate on, the inputs of {place.product.path} in repeat {place.repeat} are not "
                    "finite: the float model is broken there already. See what `maxlite eval` says of it."
                )
            yield place, inputs


def _parts(places: Sequence[Place], bytes_at_once: int) -> Iterator[list[Place]]:
    """Cuts the places into runs whose inputs' products fit."""
    part: list[Place] = []
    held = 0
    for place in places:
        size = 4 * num_inputs(place.product) ** 2
        if part and held + size > bytes_at_once:
            yield part
            part, held = [], 0
        part.append(place)
        held += size
    if part:
        yield part


def num_inputs(product: Product) -> int:
    """Returns how many elements a product sums over."""
    return math.prod(product.shape[dim] for dim in product.summed_dims)


def _observed(model: Model, params: Params, places: Sequence[Place], batches: Sequence[Batch]) -> list[Inputs]:
    numbers = {(place.product.path, place.repeat): number for number, place in enumerate(places)}
    assert len(numbers) == len(places) and not any(place.product.is_experts for place in places)

    def add(sums: list[Inputs], params: Params, batch: Batch) -> list[Inputs]:
        sums, calls = list(sums), dict.fromkeys((place.product.path for place in places), 0)
        real = batch.segment_ids != 0

        def note(path: str, x: jax.Array, *_: Any) -> None:
            if path not in calls:
                return
            number = numbers.get((path, calls[path]))
            calls[path] += 1
            if number is not None:
                sums[number] = _plus(sums[number], x, real)

        with observing(note):
            # Layer by layer, and no further than to the last one that is asked for: the compiler drops the rest.
            model.apply(model.unstack(params), batch.inputs, batch.positions, batch.segment_ids)
        for place in places:
            assert calls[place.product.path] == place.product.repeats, (
                f"{place.product.path} was not seen in all layers"
            )
        return sums

    sizes = [num_inputs(place.product) for place in places]
    sums = [Inputs(jnp.zeros((size, size)), jnp.zeros(size)) for size in sizes]
    compiled = jax.jit(add, donate_argnums=0)
    for batch in batches:
        sums = compiled(sums, params, batch)
    return sums


def _plus(sums: Inputs, x: jax.Array, real: jax.Array) -> Inputs:
    """x: [B, T, ...], real: [B, T]."""
    rows = jnp.where(real[..., None], x.reshape(*real.shape, -1), 0).astype(jnp.float32)
    # Float32 even where the model is not: small differences decide what follows from these.
    products = jnp.einsum("BTK,BTL->KL", rows, rows, precision=jax.lax.Precision.HIGHEST)
    return Inputs(sums.products + products, sums.magnitudes + jnp.sum(jnp.abs(rows), axis=(0, 1)))
