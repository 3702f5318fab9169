"""The product's gradients against jax's own rule for einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.product import product

EQUATIONS = [
    ("BTD,DNH->BTNH", (2, 3, 4), (4, 5, 6)),
    ("BTNH,NHD->BTD", (2, 3, 5, 6), (5, 6, 4)),
    ("BTD,DF->BTF", (2, 3, 4), (4, 7)),
    ("BTF,FD->BTD", (2, 3, 7), (7, 4)),
    ("BTD,DF->BTF", (2, 3, 4), (4, 4)),
]


@pytest.mark.parametrize(("equation", "x_shape", "kernel_shape"), EQUATIONS)
def test_values_and_gradients_are_those_of_einsum(equation, x_shape, kernel_shape):
    generator = np.random.default_rng(0)
    x, kernel = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in (x_shape, kernel_shape))

    def gradients(multiply):
        return jax.value_and_grad(lambda x, kernel: jnp.sum(jnp.sin(multiply(equation, x, kernel))), (0, 1))(x, kernel)

    ours, theirs = gradients(product), gradients(jnp.einsum)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_bfloat16_gradients_keep_their_dtype():
    x, kernel = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)
    gradients = jax.grad(lambda x, w: jnp.sum(product("BTD,DF->BTF", x, w).astype(jnp.float32)), (0, 1))(x, kernel)
    assert [leaf.dtype for leaf in gradients] == [jnp.bfloat16, jnp.bfloat16]
