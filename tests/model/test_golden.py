"""Every parameter of every model as text. UPDATE_GOLDEN=1 in the environment writes the files anew."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from maxlite.config.load import load_config, model_names
from maxlite.model.build import build_model

GOLDEN = Path(__file__).parents[1] / "golden"
HEADER = "# path | shape | dtype | logical axes | mesh axes, with data=2, fsdp=2, tensor=2"


def describe(name: str) -> str:
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    lines = [HEADER]
    for title, overrides in [("full", []), ("smoke=true", ["smoke=true"])]:
        config = load_config("base.yml", [f"model={name}", *overrides], {})
        model = build_model(config.model, config.compute)
        shardings = model.shardings(mesh, config.parallel.logical_axis_rules)
        lines += ["", f"# {title}: {model.num_parameters:,} parameters"]
        leaves = jax.tree_util.tree_leaves_with_path(model.abstract_params)
        axes = jax.tree.leaves(model.logical_axes, is_leaf=lambda node: isinstance(node, tuple))
        for (path, leaf), names, sharding in zip(leaves, axes, jax.tree.leaves(shardings), strict=True):
            where = "/".join(step.key for step in path)
            entries = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
            spec = [entry if isinstance(entry, str) else "+".join(entry or ["-"]) for entry in entries]
            shape = "x".join(str(size) for size in leaf.shape)
            lines.append(f"{where} | {shape} | {leaf.dtype} | {' '.join(names)} | {' '.join(spec)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", ["default", *model_names()])
def test_parameters_are_as_written_down(name):
    file = GOLDEN / f"{name}.txt"
    found = describe(name)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(found)
    assert found == file.read_text()


def test_no_golden_is_left_over():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {"default", *model_names()}
