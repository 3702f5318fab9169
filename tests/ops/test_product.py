"""The product and its gradients against numpy's einsum."""

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
    x, kernel = (generator.normal(size=shape).astype(np.float32) for shape in (x_shape, kernel_shape))

    def total(x, kernel):
        y = product(equation, x, kernel)
        return jnp.sum(jnp.sin(y)), y

    (of_x, of_kernel), y = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, kernel)
    left, right, made = equation.replace("->", ",").split(",")
    expected = np.einsum(equation, x, kernel)
    gradient = np.cos(expected)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(of_x, np.einsum(f"{made},{right}->{left}", gradient, kernel), atol=1e-5)
    np.testing.assert_allclose(of_kernel, np.einsum(f"{left},{made}->{right}", x, gradient), atol=1e-5)


def test_bfloat16_gradients_keep_their_dtype():
    x, kernel = np.ones((2, 3, 4), jnp.bfloat16), np.ones((4, 5), jnp.bfloat16)
    total = jax.grad(lambda x, w: jnp.sum(product("BTD,DF->BTF", x, w).astype(jnp.float32)), (0, 1))
    gradients = jax.jit(total)(x, kernel)
    assert [leaf.dtype for leaf in gradients] == [jnp.bfloat16, jnp.bfloat16]
