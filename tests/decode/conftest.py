"""Models with parameters in run directories, as the decode command finds them."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_map_with_path

from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.load import dump_config, load_config
from maxlite.decode.run import run_decode
from maxlite.model.build import build_model

ONE_DEVICE = ("cpu_devices=1", "jax_cache_dir=null")


@pytest.fixture(scope="session")
def noisy_params() -> Callable[..., Any]:
    """noisy_params(model): seeded noise in every parameter, norms around one: logits without ties."""

    def make(model):
        random = np.random.default_rng(0)

        def fill(path, leaf):
            return jnp.asarray(random.normal(size=leaf.shape) * 0.15 + (path[-1].key == "scale"), leaf.dtype)

        return tree_map_with_path(fill, model.abstract_params)

    return make


@pytest.fixture(scope="session")
def make_run(tmp_path_factory, noisy_params) -> Callable[..., Path]:
    """make_run(config, params): a run directory with one checkpoint; random parameters if none are given."""

    def make(config, params=None) -> Path:
        folder = tmp_path_factory.mktemp("run")
        params = noisy_params(build_model(config.model, config.compute)) if params is None else params
        params = jax.tree.map(jnp.asarray, params)
        (folder / "config.yml").write_text(dump_config(config))
        checkpointer = Checkpointer(folder, config.checkpoint)
        checkpointer.save(1, {"step": jnp.int32(1), "params": params, "opt_state": {}}, {})
        checkpointer.close()
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_run(tiny_config, make_run) -> Path:
    """A run of the tiny model, of one layer: 64 tokens, no tokenizer."""
    return make_run(
        tiny_config("num_decoder_layers=1", "num_query_heads=8", "num_kv_heads=8", "head_dim=8", *ONE_DEVICE)
    )


@pytest.fixture(scope="session")
def text_run(tiny_config, make_run) -> Path:
    """A run of a tiny model over bytes, of one layer."""
    return make_run(tiny_config("num_decoder_layers=1", "vocab_size=264", "dataset_type=text", *ONE_DEVICE))


@pytest.fixture(scope="session")
def decoded() -> Callable[..., list[dict]]:
    """decoded(run, *overrides): as decode, computed once; for what others are compared with."""
    found: dict[tuple, str] = {}

    def run(folder, *overrides: str) -> list[dict]:
        if (folder, *overrides) not in found:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                run_decode(load_config(str(folder), overrides, {}), str(folder), json_output=True)
            found[folder, *overrides] = out.getvalue()
        return [json.loads(line) for line in found[folder, *overrides].splitlines()]

    return run


@pytest.fixture
def decode(capsys) -> Callable[..., list[dict]]:
    """decode(run, *overrides): what the command prints with --json, a dict for each prompt."""

    def run(folder, *overrides: str) -> list[dict]:
        capsys.readouterr()
        run_decode(load_config(str(folder), overrides, {}), str(folder), json_output=True)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
