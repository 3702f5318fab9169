import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.load import load_config, model_names
from maxlite.model.build import build_model, resolve_dtype

# Counted by hand from the published sizes: embedding and output V*D each (once if tied), a layer's
# attention 2*D*N*H + 2*D*K*H, its MLP 3*D*F, its two norms 2*D, and the final norm D.
NUM_PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
}
# Of the same models: rotary scaling factor (None: unscaled), context length, theta.
ROTARY = {
    "llama2": (None, 4096, 1e4),
    "llama3": (None, 8192, 5e5),
    "llama3.1": (8, 131072, 5e5),
    "llama3.2": (32, 131072, 5e5),
    "llama3.3": (8, 131072, 5e5),
}


def test_every_model_yaml_has_a_count():
    assert set(model_names()) == NUM_PARAMETERS.keys()


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_parameters(name):
    config = load_config("base.yml", [f"model={name}"], {})
    model = build_model(config.model, config.compute)
    assert model.num_parameters == NUM_PARAMETERS[name]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model.abstract_params))


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_rotary_numbers(name):
    model = load_config("base.yml", [f"model={name}"], {}).model
    factor, length, theta = ROTARY[name.split("-")[0]]
    assert (model.max_position_embeddings, model.rope_max_timescale) == (length, theta)
    assert model.rope_type == ("default" if factor is None else "llama3")
    if factor is not None:
        scaling = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.original_max_position_embeddings)
        assert (model.rope_factor, *scaling) == (factor, 1, 4, 8192)


@pytest.fixture(scope="module")
def tiny(tiny_config):
    config = tiny_config()
    return build_model(config.model, config.compute)


def test_initial_values(tiny):
    init = jax.jit(tiny.init)
    params = init(jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tiny.abstract_params
    )
    layers = params["group_0"]["layers"]["block_0"]
    assert (layers["mlp_norm"]["scale"] == 1).all()
    for weight, fan_in in [
        (params["embedding"]["table"], 64), (layers["attention"]["query"]["kernel"], 64),
        (layers["attention"]["out"]["kernel"], 4 * 16), (layers["mlp"]["down"]["kernel"], 96),
    ]:  # fmt: skip
        assert np.std(weight) * np.sqrt(fan_in) == pytest.approx(1, abs=0.05)
        assert np.abs(weight).max() <= 2 / np.sqrt(fan_in) / 0.8796 + 1e-6
    query = layers["attention"]["query"]["kernel"]
    assert not np.allclose(query[0], query[1])
    jax.tree.map(np.testing.assert_array_equal, params, init(jax.random.key(0)))
    assert not np.array_equal(params["embedding"]["table"], init(jax.random.key(1))["embedding"]["table"])


@pytest.mark.slow
def test_initial_values_are_the_same_on_a_mesh(tiny, tiny_config):
    parallel = tiny_config().parallel
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )  # fmt: skip
    shardings = tiny.shardings(mesh, parallel.logical_axis_rules)
    split = jax.jit(tiny.init, out_shardings=shardings)(jax.random.key(0))
    whole = jax.jit(tiny.init)(jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), split, whole)
    assert split["embedding"]["table"].sharding.spec == jax.sharding.PartitionSpec("tensor", "fsdp")


def test_weight_dtype_and_dtype(tiny_config):
    config = tiny_config("weight_dtype=bfloat16", "dtype=bfloat16")
    model = build_model(config.model, config.compute)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.abstract_params)} == {jnp.dtype("bfloat16")}
    tokens = jnp.zeros((1, 4), jnp.int32)
    output = jax.eval_shape(lambda: model.apply(model.init(jax.random.key(0)), tokens, tokens))
    assert output.hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: model.logits(model.init(jax.random.key(0)), jnp.ones((4, 64)))).dtype == jnp.float32


def test_auto_is_float32_on_a_cpu():
    assert (resolve_dtype("auto"), resolve_dtype("bfloat16")) == ("float32", "bfloat16")


def test_tied_output_is_the_embedding(tiny_config, tiny, noisy_params):
    config = tiny_config("logits_via_embedding=false")
    untied = build_model(config.model, config.compute)
    assert untied.num_parameters - tiny.num_parameters == 64 * 64
    params = noisy_params(tiny)
    np.testing.assert_array_equal(tiny.unembedding(params), params["embedding"]["table"].T)
    params = noisy_params(untied)
    np.testing.assert_array_equal(untied.unembedding(params), params["output"]["kernel"])


@pytest.mark.parametrize(
    ("overrides", "stacked"),
    [
        ((), True),
        (("num_decoder_layers=3", "attention_pattern=local,full", "sliding_window_size=3"), False),
    ],
)
def test_a_cache_gives_the_hidden_states_of_the_whole_row(overrides, stacked, tiny_config, noisy_params):
    config = tiny_config(*overrides)
    model = build_model(config.model, config.compute)
    params = noisy_params(model)
    tokens = jnp.asarray((7 * np.arange(9) ** 2 + 5) % 64, jnp.int32)[None]
    positions, ones = jnp.arange(9, dtype=jnp.int32)[None], jnp.ones((1, 9), jnp.int32)
    step = jax.jit(model.apply)
    whole = step(params, tokens, positions).hidden
    weights, cache = params if stacked else model.unstack(params), model.init_cache(1, 12, stacked=stacked)
    parts = []
    for start, stop in [(0, 6), (6, 7), (7, 8), (8, 9)]:
        part = slice(start, stop)
        hidden, cache = step(weights, tokens[:, part], positions[:, part], ones[:, part], cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)
    assert int(cache.index) == 9
