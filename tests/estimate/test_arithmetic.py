import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxlite.estimate.arithmetic import program_flops

ROWS, WIDTH, HIDDEN, LAYERS = 4, 8, 16, 5
PRODUCT = 2 * ROWS * WIDTH * HIDDEN


def flops(function, *shapes, platform="cpu"):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_flops(jax.jit(function).trace(*arguments).jaxpr, platform)


def test_products():
    assert flops(jnp.matmul, (ROWS, WIDTH), (WIDTH, HIDDEN)) == PRODUCT
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (3, 4, 8), (3, 5, 8)) == 2 * 3 * 4 * 5 * 8


def chain(x, up, down):
    def layer(x, weights):
        return jnp.tanh(x @ weights[0]) @ weights[1], None

    return jax.lax.scan(layer, x, (up, down))[0].sum()


SHAPES = ((ROWS, WIDTH), (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))


def test_a_loop_counts_as_often_as_it_runs():
    assert flops(chain, *SHAPES) == LAYERS * 2 * PRODUCT


def test_a_backward_pass_is_twice_the_forward():
    gradient = jax.grad(chain, argnums=(0, 1, 2))
    assert flops(gradient, *SHAPES) == 3 * LAYERS * 2 * PRODUCT


def test_what_is_computed_again_counts_again():
    def loss(x, up, down):
        def layer(x, weights):
            return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]), None

        # The second product of a layer is an input of the backward pass of its tanh.
        return jax.lax.scan(jax.checkpoint(layer), x, (up, down))[0].sum()

    assert flops(jax.grad(loss, argnums=(0, 1, 2)), *SHAPES) == 4 * LAYERS * 2 * PRODUCT


def test_a_conditional_counts_its_most_costly_branch():
    def either(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((ROWS, HIDDEN)))

    assert flops(either, (ROWS, WIDTH), (WIDTH, HIDDEN)) == PRODUCT


def test_what_each_device_does_counts_for_all_of_them():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    product = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data")
    )
    assert flops(product, (8 * ROWS, WIDTH), (WIDTH, HIDDEN)) == 8 * PRODUCT


@pytest.mark.parametrize(("platform", "products"), [("cpu", 3), ("gpu", 2), ("tpu", 1)])
def test_of_what_the_platform_decides_its_own_branch_counts(platform, products):
    def times(count):
        return lambda x, w: sum((x + number) @ w for number in range(count))

    def either(x, w):
        return jax.lax.platform_dependent(x, w, cpu=times(3), cuda=times(2), default=times(1)).sum()

    assert flops(either, (ROWS, WIDTH), (WIDTH, HIDDEN), platform=platform) == products * PRODUCT


@pytest.mark.parametrize(("pass_", "products"), [("forward", 1), ("backward", 3)])
def test_a_ragged_product_meets_one_matrix_a_row(pass_, products):
    def grouped(x, w):
        return jax.lax.ragged_dot(x, w, jnp.array([1, ROWS - 1], jnp.int32)).sum()

    function = grouped if pass_ == "forward" else jax.grad(grouped, argnums=(0, 1))
    assert flops(function, (ROWS, WIDTH), (2, WIDTH, HIDDEN)) == products * PRODUCT
