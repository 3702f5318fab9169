import jax
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import layer_groups, layer_places
from maxlite.model.build import build_model

PATTERN = ("num_decoder_layers=5", "attention_pattern=local,full", "sliding_window_size=3")
TOKENS = np.asarray((7 * np.arange(12) ** 2 + 3 * np.arange(12) + 5) % 64, np.int32)[None]
POSITIONS = np.arange(12, dtype=np.int32)[None]


def build(tiny_config, *overrides):
    config = tiny_config("emb_dim=32", "mlp_dim=48", "head_dim=8", *overrides)
    return build_model(config.model, config.compute)


def hidden(model, params):
    return jax.jit(model.apply)(params, TOKENS, POSITIONS).hidden


def test_parameters_of_a_group_are_stacked_over_its_repeats(tiny_config):
    model = build(tiny_config, *PATTERN)
    groups = {name: tree["layers"] for name, tree in model.abstract_params.items() if name.startswith("group_")}
    assert {name: list(tree) for name, tree in groups.items()} == {
        "group_0": ["block_0", "block_1"],
        "group_1": ["block_0"],
    }
    repeats = {name: {leaf.shape[0] for leaf in jax.tree.leaves(tree)} for name, tree in groups.items()}
    assert repeats == {"group_0": {2}, "group_1": {1}}
    assert model.logical_axes["group_0"]["layers"]["block_0"]["mlp"]["up"]["kernel"] == ("layers", "embed", "mlp")


def test_what_is_stored_does_not_depend_on_the_loop(tiny_config):
    scanned, unrolled = (build(tiny_config, *PATTERN, f"scan_layers={flag}") for flag in ("true", "false"))
    assert scanned.abstract_params == unrolled.abstract_params
    assert scanned.logical_axes == unrolled.logical_axes


@pytest.fixture(scope="module")
def params(tiny_config, noisy_params):
    return noisy_params(build(tiny_config, *PATTERN))


@pytest.fixture(scope="module")
def scanned_hidden(tiny_config, params):
    return hidden(build(tiny_config, *PATTERN), params)


def test_unrolled_equals_scanned(tiny_config, params, scanned_hidden):
    unrolled = build(tiny_config, *PATTERN, "scan_layers=false")
    program = jax.jit(unrolled.apply).trace(params, TOKENS, POSITIONS)
    assert "unroll=2" in str(program.jaxpr)
    found = program.lower().compile()(params, TOKENS, POSITIONS).hidden
    np.testing.assert_allclose(found, scanned_hidden, atol=1e-5)


def test_unstacked_parameters_give_the_same(tiny_config, params, scanned_hidden):
    model = build(tiny_config, *PATTERN)
    np.testing.assert_allclose(hidden(model, model.unstack(params)), scanned_hidden, atol=1e-5)


def test_layers_run_in_their_order(tiny_config, params, scanned_hidden):
    """The same layers, one group a layer, each put where layer_places says that it lies."""
    model = build(tiny_config, *PATTERN)
    places = layer_places(layer_groups(model.config))
    x = params["embedding"]["table"][TOKENS]
    kinds = {
        kind: build(tiny_config, "num_decoder_layers=1", f"attention_pattern={kind}", *window)
        for kind, window in (("local", ["sliding_window_size=3"]), ("full", []))
    }
    alone = {kind: residual_of(model) for kind, model in kinds.items()}
    for layer, place in enumerate(places):
        block = params[f"group_{place.group}"]["layers"][f"block_{place.position}"]
        block = jax.tree.map(lambda w, n=place.repeat: w[n][None], block)
        x = one_layer(alone["full" if layer % 2 else "local"], block, x)
    norm = params["final_norm"]["scale"]
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5) * norm
    np.testing.assert_allclose(scanned_hidden, expected, atol=1e-4)


def residual_of(model):
    """The model of one layer as a program without its last norm."""

    @jax.jit
    def residual(params):
        module = nnx.merge(model.graphdef, params)
        module.final_norm = lambda x: x
        return module(POSITIONS, POSITIONS, None, None).hidden

    return residual


def one_layer(residual, block, x):
    """Runs one layer on x: [1, T, D], which stands in an embedding that tokens 0, 1, ... read in order."""
    table = np.zeros((64, 32), np.float32)
    table[: x.shape[1]] = x[0]
    params = {
        "embedding": {"table": table},
        "final_norm": {"scale": np.ones(32, np.float32)},
        "group_0": {"layers": {"block_0": block}},
    }
    return np.asarray(residual(params))
