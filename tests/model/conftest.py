import jax
import numpy as np
import pytest


@pytest.fixture(scope="session")
def noisy_params():
    """noisy_params(model, seed): seeded noise in every parameter, norms around one; nothing is compiled."""

    def make(model, seed=0):
        random = np.random.default_rng(seed)

        def fill(path, leaf):
            noise = random.normal(size=leaf.shape) * 0.15
            return np.asarray(noise + (path[-1].key == "scale"), leaf.dtype)

        return jax.tree_util.tree_map_with_path(fill, model.abstract_params)

    return make


@pytest.fixture(scope="session")
def empty_cache():
    """empty_cache(model, batch, length, stacked=...): the cache that the model makes, its zeros from numpy."""

    def make(model, *sizes, stacked=True):
        empty = jax.eval_shape(lambda: model.init_cache(*sizes, stacked=stacked))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), empty)

    return make
