import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.load import load_config
from maxlite.errors import ConfigError
from maxlite.model.build import build_model, resolve_dtype
from maxlite.parallel.mesh import build_mesh

# A model of every kind of part.
KINDS = (
    "default", "gemma3-1b", "gemma4-26b-a4b", "deepseek3-671b", "gpt-oss-20b", "llama4-17b-128e", "qwen2-57b-a14b",
    "olmo3-7b", "qwen3-next-80b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_shapes_are_those_of_the_values(name):
    config = load_config("base.yml", [f"model={name}", "smoke=true"], {})
    model = build_model(config.model, config.compute)
    made = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.abstract_params
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model.abstract_params))


def test_what_decays_is_what_is_multiplied_with():
    config = load_config("base.yml", ["model=gpt-oss-20b", "smoke=true"], {})
    decays = jax.tree_util.tree_leaves_with_path(build_model(config.model, config.compute).decays)
    names = {"/".join(step.key for step in path): decayed for path, decayed in decays}
    for name, decayed in names.items():
        assert decayed == name.endswith(("kernel", "table")), name
    assert any(name.endswith("bias") for name in names) and any(name.endswith("sinks") for name in names)


def test_a_token_uses_its_experts_only(tiny_config):
    sizes = ("num_experts=8", "num_experts_per_tok=2", "moe_mlp_dim=16", "mlp_pattern=moe", "router_bias=true")
    config = tiny_config(*sizes, "mlp_bias=true", "shared_expert_mlp_dim=24")
    model = build_model(config.model, config.compute)
    one_expert = 3 * 64 * 16 + 2 * 16 + 64
    assert model.num_parameters - model.num_active_parameters == 2 * 6 * one_expert


def test_taken_apart_is_unstacked(tiny, noisy_params):
    expected = tiny.unstack(noisy_params(tiny))
    params = jax.device_put(noisy_params(tiny))
    stacked = params["group_0"]["layers"]["block_0"]["mlp"]["up"]["kernel"]
    found = tiny.take_apart(params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert stacked.is_deleted()


@pytest.fixture(scope="module")
def tiny(tiny_config):
    config = tiny_config()
    return build_model(config.model, config.compute)


def test_initial_values(tiny):
    init = jax.jit(tiny.init)
    params, again, other = (jax.device_get(init(jax.random.key(seed))) for seed in (0, 0, 1))
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
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert not np.array_equal(params["embedding"]["table"], other["embedding"]["table"])


@pytest.mark.slow
def test_initial_values_are_the_same_on_a_mesh(tiny, tiny_config):
    parallel = tiny_config("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2").parallel
    mesh = build_mesh(parallel, jax.devices()[:4])
    shardings = tiny.shardings(mesh, parallel.logical_axis_rules)
    split = jax.jit(tiny.init, out_shardings=shardings)(jax.random.key(0))
    whole = jax.jit(tiny.init)(jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), split, whole)
    table = split["embedding"]["table"]
    assert table.sharding.shard_shape(table.shape) == tuple(size // 2 for size in table.shape)


def test_sizes_that_the_mesh_does_not_divide_are_named(tiny_config):
    heads = ("global_num_kv_heads=1", "attention_pattern=local,full", "sliding_window_size=4")
    config = tiny_config(*heads)
    degrees = ("ici_tensor_parallelism=2", "ici_fsdp_parallelism=1")
    mesh = build_mesh(tiny_config(*heads, *degrees).parallel, jax.devices()[:2])
    with pytest.raises(ConfigError, match="^global_num_kv_heads: .* of size 1 is not divided by mesh axes tensor=2"):
        build_model(config.model, config.compute).shardings(mesh, config.parallel.logical_axis_rules)


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
        # Two groups, one of them of two repeats.
        (("num_decoder_layers=5", "attention_pattern=chunked,nope", "chunk_attn_window_size=4"), True),
        (
            ("attention_pattern=local,full", "sliding_window_size=3", "attention_sink=true", "attn_logits_soft_cap=2",
             "use_qk_norm=true", "use_post_norms=true"),
            False,
        ),
    ],
)  # fmt: skip
def test_a_cache_gives_the_hidden_states_of_the_whole_row(overrides, stacked, tiny_config, noisy_params, empty_cache):
    config = tiny_config(*overrides)
    model = build_model(config.model, config.compute)
    params = noisy_params(model)
    tokens = np.asarray((7 * np.arange(9) ** 2 + 5) % 64, np.int32)[None]
    positions, ones = np.arange(9, dtype=np.int32)[None], np.ones((1, 9), np.int32)
    step = jax.jit(model.apply)
    whole = step(params, tokens, positions).hidden
    weights, cache = params if stacked else model.unstack(params), empty_cache(model, 1, 12, stacked=stacked)
    parts = []
    for start, stop in [(0, 6), (6, 7), (7, 8), (8, 9)]:
        part = slice(start, stop)
        hidden, cache, _ = step(weights, tokens[:, part], positions[:, part], ones[:, part], cache)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)
    assert int(cache.index) == 9
