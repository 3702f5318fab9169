import jax
import pytest
from flax import nnx


@pytest.fixture
def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(0))
