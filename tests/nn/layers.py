"""Layers with numbers in every weight, which no program draws, and their call as one program instead of many."""

import functools

import jax
import numpy as np
from flax import nnx


def filled(layer, *, width=0.3, **values):
    """The layer, made without rngs, with seeded noise in every weight: scales of one and biases of zero hide mistakes.

    values: what some weights' noise is added to, by the last part of their path; scales' is added to 1.
    """
    random, values = np.random.default_rng(1), {"scale": 1.0, **values}
    graphdef, state = nnx.split(layer)

    def fill(path, leaf):
        base = values.get(path[-1], 0.0) + random.normal(size=leaf.shape) * width
        return leaf.replace(np.asarray(base, leaf.get_raw_value().dtype))

    flat = {path: fill(path, leaf) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def weights_of(layer):
    """{"experts/gate/kernel": array, ...}."""
    return {"/".join(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(nnx.state(layer))}


def in_float64(layer):
    return {path: np.asarray(value, np.float64) for path, value in weights_of(layer).items()}


def new_run():
    """A `run` that shares no program with another: for a test that replaces something inside of a layer."""

    @functools.partial(jax.jit, static_argnums=0)
    def program(graphdef, state, *arguments):
        return nnx.merge(graphdef, state)(*arguments)

    return lambda layer, *arguments: program(*nnx.split(layer), *arguments)


# run(layer, *arguments) is layer(*arguments); equal layers with arguments of equal shapes share a program.
run = new_run()
