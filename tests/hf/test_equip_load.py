"""Parameters onto models that store kernels in few bits or have adapters, from runs and folders with and without."""

import functools
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.errors import CheckpointError
from maxlite.hf.load import load_parameters
from maxlite.model.build import build_model
from maxlite.parallel.mesh import build_mesh
from tests.conftest import load_tiny
from tests.quantize.two_models import noisy, rounded_params
from tests.reference import STORIES, STORIES_KEYS, stories_params

MOE = ("mlp_pattern=[moe]", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32", "num_decoder_layers=1")
STORED = ("weight_quantization=int4", "weight_quant_tile_size=32")
ADAPTERS = ("lora_rank=2", "lora_module_path=.*/(query|gate)")


def model_of(*keys: str):
    config = load_tiny("jax_cache_dir=null", "cpu_devices=8", *keys)
    return config, build_model(config.model, config.compute)


def make_run(folder: Path, params) -> Path:
    config, _ = model_of()
    checkpointer = Checkpointer(folder, config.checkpoint, lean=True)
    checkpointer.save(0, {"step": jnp.int32(0), "params": params}, {})
    checkpointer.close()
    return folder


def load(path: Path, model, shardings=None, seed: int = 0):
    """Parameters by path, and what was said."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    notes = io.StringIO()
    shardings = jax.tree.map(lambda _: here, model.abstract_params) if shardings is None else shardings
    params = load_parameters(path, model, shardings, notes, seed)
    for leaf, wanted, sharding in zip(*map(jax.tree.leaves, (params, model.abstract_params, shardings)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, sharding)
    return leaf_paths(params), notes.getvalue()


def assert_same(found, expected, names=None):
    for name in expected if names is None else names:
        # As bytes: numpy knows of fp8 only what ml_dtypes tells it.
        one, other = (np.asarray(side[name]) for side in (found, expected))
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), name


@functools.cache
def float_params():
    return noisy(model_of(*MOE)[1])


@functools.cache
def rounded_by_hand(*keys: str):
    """The parameters of a model that stores kernels as `keys` say, by path."""
    return leaf_paths(rounded_params(float_params(), model_of(*MOE, *keys)[1]))


@pytest.fixture(scope="module")
def float_run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "float", float_params())


@pytest.fixture(scope="module")
def stored_run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "int4", nested(rounded_by_hand(*STORED)))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("qtype", ("int8", "int4", "nf4", "fp8"))
def test_floats_are_rounded_on_the_way_with_all_their_bits(float_run, qtype, dtype):
    _, model = model_of(*MOE, f"weight_quantization={qtype}", f"weight_dtype={dtype}")
    found, notes = load(float_run, model)
    expected = rounded_by_hand(f"weight_quantization={qtype}")
    if dtype == "bfloat16":
        expected = {name: np.asarray(array).astype(found[name].dtype) for name, array in expected.items()}
    assert_same(found, expected)
    assert f": 7 stacked kernels were rounded to {qtype}" in notes


def test_only_those_that_the_pattern_names(float_run):
    keys = (*STORED, "weight_quant_module_path=.*/experts/up")
    found, notes = load(float_run, model_of(*MOE, *keys)[1])
    assert_same(found, rounded_by_hand(*keys))
    assert sorted(name for name in found if name.endswith("codes")) == ["group_0/layers/block_0/mlp/experts/up/codes"]
    assert ": 1 stacked kernels were rounded" in notes


def test_codes_and_scales_come_back_bit_for_bit(float_run, stored_run, tmp_path):
    _, model = model_of(*MOE, *STORED)
    found, notes = load(stored_run, model)
    assert_same(found, rounded_by_hand(*STORED))
    assert "rounded" not in notes
    for qtype in ("fp8", "nf4", "int8"):
        _, other = model_of(*MOE, f"weight_quantization={qtype}")
        first, _ = load(float_run, other)
        params = jax.tree.unflatten(jax.tree.structure(other.abstract_params), list(first.values()))
        assert_same(load(make_run(tmp_path / qtype, params), other)[0], first)


def test_a_folder_of_floats():
    config = load_tiny(*STORIES_KEYS, "weight_quantization=nf4", "weight_quant_tile_size=64")
    model = build_model(config.model, config.compute)
    found, notes = load(STORIES, model)
    assert_same(found, leaf_paths(rounded_params(jax.tree.map(jnp.asarray, stories_params()), model)))
    assert "7 stacked kernels were rounded to nf4" in notes


@pytest.mark.parametrize("mesh_keys", [("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2")])
def test_on_eight_devices_the_same_codes(float_run, stored_run, mesh_keys):
    config, model = model_of(*MOE, *STORED, *mesh_keys)
    shardings = model.shardings(build_mesh(config.parallel, jax.devices()), config.parallel.logical_axis_rules)
    assert any(not sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))
    expected, _ = load(stored_run, model_of(*MOE, *STORED)[1])
    for source in (stored_run, float_run):
        assert_same(load(source, model, shardings)[0], expected)


def initial_of(model, names):
    """What a model that begins anew has by these names, without compiling what makes the others."""

    @jax.jit
    def init(key: jax.Array) -> dict[str, jax.Array]:
        made = leaf_paths(model.init(key))
        return {name: made[name] for name in names}

    return init(jax.random.key(5))


def test_adapters_begin_anew_where_there_are_none_and_come_back_where_there_are(float_run, stored_run, tmp_path):
    for source, keys in ((float_run, ()), (stored_run, STORED)):
        _, model = model_of(*MOE, *keys, *ADAPTERS)
        found, notes = load(source, model, seed=5)
        assert "adapters of rank 2 begin anew" in notes
        adapters = [name for name in found if name.rpartition("/")[2] in ("lora_a", "lora_b")]
        assert len(adapters) == 4
        initial = initial_of(model, adapters)
        for name in adapters:
            np.testing.assert_allclose(found[name], initial[name], rtol=1e-6)
        without, _ = load(source, model_of(*MOE, *keys)[1])
        assert_same(found, without)
        trained = {
            name: jnp.asarray(np.asarray(array) + 1) if name in adapters else array for name, array in found.items()
        }
        params = jax.tree.unflatten(jax.tree.structure(model.abstract_params), list(trained.values()))
        again, notes = load(make_run(tmp_path / f"run-{len(keys)}", params), model)
        assert_same(again, trained)
        assert "anew" not in notes


def test_a_float_run_with_adapters_below_stored_kernels(float_run, tmp_path):
    _, adapted = model_of(*MOE, *ADAPTERS)
    found, _ = load(float_run, adapted)
    params = jax.tree.unflatten(jax.tree.structure(adapted.abstract_params), list(found.values()))
    run = make_run(tmp_path / "adapted", params)
    _, model = model_of(*MOE, *STORED, *ADAPTERS)
    both, notes = load(run, model)
    assert_same(both, found, [name for name in found if "lora" in name])
    assert "rounded to int4" in notes and "anew" not in notes


def test_what_is_stored_otherwise_is_refused(stored_run, tmp_path):
    _, plain = model_of(*MOE)
    for keys, wants in (((), "floats"), (("weight_quantization=nf4", STORED[1]), "nf4")):
        with pytest.raises(CheckpointError, match=f"kernels in int4, .*attention/key/codes, .*wants {wants}"):
            load(stored_run, model_of(*MOE, *keys)[1])
    with pytest.raises(CheckpointError, match=r"scale is \[1, 2, 2, 16\] in the checkpoint and \[1, 4, 2, 16\] now"):
        load(stored_run, model_of(*MOE, STORED[0], "weight_quant_tile_size=16")[1])
    _, model = model_of(*MOE, *ADAPTERS)
    with pytest.raises(CheckpointError, match="has adapters, .*lora_rank=2"):
        load(make_run(tmp_path / "adapted", noisy(model)), plain)


def test_another_models_floats_are_refused_before_anything_is_read(float_run):
    _, model = model_of(*MOE, *STORED, "emb_dim=32")
    with pytest.raises(CheckpointError, match=r"params/embedding/table is \[64, 64\] in the checkpoint and \[64, 32\]"):
        load(float_run, model)
