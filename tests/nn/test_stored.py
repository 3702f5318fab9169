import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.errors import ConfigError
from maxlite.nn.equipment import Equipment, StoredForm
from maxlite.nn.experts import ExpertLinear
from maxlite.nn.linear import Linear
from maxlite.ops.stored import dequantize_kernel, quantize_kernel

PATH = "group_0/block_0/attention/out"
OUT = ("BTNH,NHD->BTD", (4, 16, 10), ("heads", "head_dim", "embed"))


def make(tiny_config, form, rngs, parts=OUT, **keys):
    linear = Linear(*parts, tiny_config().compute, rngs=rngs, **keys)
    linear.equip(Equipment(PATH, stored=form), rngs=rngs)
    return linear


@pytest.mark.parametrize(
    ("form", "codes", "scale"),
    [
        (StoredForm("int8", None), ((4, 16, 10), "int8"), ((1, 1, 10), (None, None, "embed"))),
        (StoredForm("fp8", 32), ((4, 16, 10), "float8_e4m3fn"), ((2, 1, 10), (None, None, "embed"))),
        (StoredForm("int4", 16), ((4, 8, 10), "int8"), ((4, 1, 10), ("heads", None, "embed"))),
        (StoredForm("nf4", 8), ((4, 8, 10), "uint8"), ((4, 2, 10), ("heads", None, "embed"))),
    ],
)
def test_codes_and_scale_stand_in_place_of_the_kernel(form, codes, scale, tiny_config):
    def made(x):
        kernel = Linear(*OUT, tiny_config().compute, rngs=nnx.Rngs(7)).kernel[...]
        linear = make(tiny_config, form, nnx.Rngs(7))
        assert not hasattr(linear, "kernel")
        for name, (shape, dtype), axes in (("codes", codes, OUT[2]), ("scale", (scale[0], "float32"), scale[1])):
            parameter = getattr(linear, name)
            assert (parameter.shape, parameter[...].dtype) == (shape, jnp.dtype(dtype))
            metadata = parameter.get_metadata()
            assert (metadata["axes"], metadata["decays"]) == (axes, False)
        expected = quantize_kernel(kernel, (0, 1), form.qtype, form.tile_size)
        plain = dequantize_kernel(*expected, (0, 1), form.qtype, jnp.dtype("float32"))
        return (linear.codes[...], linear.scale[...], linear.matrix()), (*expected, plain), linear(x)

    x = np.random.default_rng(0).normal(size=(2, 3, 4, 16)).astype(np.float32)
    found, expected, y = jax.jit(made)(x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(y, np.einsum("BTNH,NHD->BTD", x, expected[2]), rtol=1e-5, atol=1e-5)


def test_shapes_alone_are_those_of_the_arrays_and_layers_are_stacked(tiny_config):
    form = StoredForm("int4", 32)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(rngs):
        return make(tiny_config, form, rngs)

    stacked = nnx.eval_shape(lambda: layers(nnx.Rngs(0)))
    arrays, shapes = (nnx.to_pure_dict(nnx.state(module)) for module in (stacked, make(tiny_config, form, None)))
    assert arrays.keys() == shapes.keys() == {"codes", "scale"}
    for name, array in arrays.items():
        assert (array.shape[1:], array.dtype) == (shapes[name].shape, shapes[name].dtype)
        assert array.shape[0] == 3


def test_a_bias_stays_as_it_is(tiny_config):
    @jax.jit
    def biased(x):
        linear = make(tiny_config, StoredForm("int8", None), nnx.Rngs(0), use_bias=True)
        linear.bias[...] = linear.bias[...] + 1
        return linear(x)

    np.testing.assert_allclose(biased(np.zeros((1, 1, 4, 16), np.float32)), np.ones((1, 1, 10)))


def test_experts_have_scales_of_their_own(tiny_config):
    @jax.jit
    def made(kernel):
        experts = ExpertLinear((3, 8, 6), ("embed", "mlp"), tiny_config().compute, use_bias=False, rngs=nnx.Rngs(0))
        experts.kernel[...] = kernel
        experts.equip(Equipment(PATH, stored=StoredForm("int4", 4)), rngs=nnx.Rngs(0))
        assert experts.weight_axes() == {"codes": ("exp", "embed", "mlp"), "scale": ("exp", None, "mlp")}
        return experts.codes[...], experts.scale[...]

    kernel = np.random.default_rng(0).normal(size=(3, 8, 6)).astype(np.float32)
    kernel *= np.float32([1, 10, 100])[:, None, None]
    codes, scale = made(kernel)
    assert codes.shape == (3, 4, 6) and scale.shape == (3, 2, 6)
    largest = np.abs(kernel).reshape(3, 2, 4, 6).max(2)
    np.testing.assert_allclose(scale, largest / 7.5, rtol=2e-6)


def test_an_odd_size_makes_no_bytes(tiny_config):
    parts = ("BTD,DF->BTF", (7, 4), ("embed", "mlp"))
    with pytest.raises(ConfigError, match=f"embed of {PATH} has size 7, which is odd"):
        make(tiny_config, StoredForm("nf4", None), None, parts)
    assert make(tiny_config, StoredForm("int8", None), None, parts).codes.shape == (7, 4)


def test_only_what_is_multiplied_has_a_gradient(tiny_config):
    graphdef, _ = nnx.split(make(tiny_config, StoredForm("nf4", 16), None))
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(tiny_config, StoredForm("nf4", 16), nnx.Rngs(0)))))()

    def loss(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)))

    def plain_loss(params, x):
        plain = dequantize_kernel(params["codes"], params["scale"], (0, 1), "nf4", jnp.dtype("float32"))
        return jnp.sum(jnp.sin(jnp.einsum("BTNH,NHD->BTD", x, plain)))

    x = np.ones((1, 1, 4, 16), np.float32)
    found, expected = (jax.jit(jax.grad(run, 1))(params, x) for run in (loss, plain_loss))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
