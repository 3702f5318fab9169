import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.tree import check_shapes, leaf_paths, nested
from maxlite.errors import CheckpointError


class Moments(NamedTuple):
    count: Any
    mu: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any


def test_paths_of_every_container():
    tree = {"step": 1, "opt_state": (Moments(2, {"w": 3}), (), [4, None])}
    assert leaf_paths(tree) == {"step": 1, "opt_state/0/count": 2, "opt_state/0/mu/w": 3, "opt_state/2/0": 4}
    assert leaf_paths(State(1, {"w": 2})) == {"step": 1, "params/w": 2}


def test_nested_is_the_inverse():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nested(leaf_paths(tree)) == tree


def test_shapes_that_agree_pass():
    check_shapes({"a": ((2, 3), np.dtype("float32"))}, {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}, "it")


def test_parameters_come_first_and_the_rest_is_counted():
    saved = {f"opt_state/{i}": ((1,), None) for i in range(6)} | {"params/w": ((2, 3), None)}
    wanted = {f"opt_state/{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(6)}
    wanted["params/w"] = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    with pytest.raises(CheckpointError) as caught:
        check_shapes(saved, wanted, "checkpoint /run/checkpoints/3")
    lines = str(caught.value).splitlines()
    assert lines[0] == "checkpoint /run/checkpoints/3 does not fit this config:"
    assert lines[1].strip() == "params/w is [2, 3] in the checkpoint and [2, 4] now"
    assert lines[6].strip() == "and 2 more"
