"""The logits file: what is in it, and what is left when it can't be written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.decode.logits import check_writable, write_logits
from maxlite.decode.model import rules_for_rows
from maxlite.decode.prompts import Prompt
from maxlite.errors import ConfigError
from maxlite.model.build import build_model
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import use_mesh

PROMPTS = [Prompt(None, (9, 8, 7)), Prompt(None, (5, 4, 3, 2, 1, 11, 12, 13)), Prompt(None, (1,))]


@pytest.fixture(scope="module")
def tiny(tiny_config, noisy_params):
    config = tiny_config()
    model = build_model(config.model, config.compute)
    return model, noisy_params(model)


@pytest.fixture(scope="module")
def of_one_device(tiny, tmp_path_factory):
    model, params = tiny
    path = tmp_path_factory.mktemp("logits") / "logits.npz"
    write_logits(str(path), model, jax.jit(model.unstack)(params), PROMPTS)
    with np.load(path) as file:
        return [file[key] for key in sorted(file)]


def test_holds_the_logits_of_a_plain_forward_pass(tiny, tmp_path):
    model, params = tiny

    @jax.jit
    def plain(params, tokens):
        return model.logits(params, model.apply(params, tokens, jnp.arange(tokens.shape[1])[None]).hidden)[0]

    write_logits(str(tmp_path / "logits.npz"), model, jax.jit(model.unstack)(params), PROMPTS)
    with np.load(tmp_path / "logits.npz") as file:
        assert sorted(file) == ["logits_0", "logits_1", "logits_2"]
        for index, prompt in enumerate(PROMPTS):
            found = file[f"logits_{index}"]
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, plain(params, np.asarray([prompt.ids], np.int32)), atol=2e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npz"]


@pytest.mark.parametrize("degrees", ["context=2", "expert=2", "pipeline=2", "tensor=2"])
def test_a_mesh_gives_the_logits_of_one_device(tiny, of_one_device, tiny_config, tmp_path, degrees):
    model, params = tiny
    axis, size = degrees.split("=")
    config = tiny_config("ici_fsdp_parallelism=1", f"ici_{axis}_parallelism={size}")
    mesh = build_mesh(config.parallel, jax.devices()[:2])
    params = jax.jit(model.unstack)(params)
    with use_mesh(mesh, rules_for_rows(config, mesh, 1)):
        write_logits(str(tmp_path / "logits.npz"), model, params, PROMPTS)
    with np.load(tmp_path / "logits.npz") as file:
        for got, expected in zip([file[key] for key in sorted(file)], of_one_device, strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tiny, tmp_path, monkeypatch):
    model, params = tiny
    path = tmp_path / "logits.npz"
    path.write_text("old")

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", no_space)
    with pytest.raises(ConfigError, match="can't be written: No space left on device"):
        write_logits(str(path), model, jax.jit(model.unstack)(params), PROMPTS)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npz"]


def test_a_folder_that_is_not_there_is_noticed_first(tmp_path):
    with pytest.raises(ConfigError, match="is not there or can't be written"):
        check_writable(str(tmp_path / "missing" / "logits.npz"))
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(str(tmp_path))
