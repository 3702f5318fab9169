"""Every parameter of every model as text. UPDATE_GOLDEN=1 in the environment writes the files anew."""

import os
from pathlib import Path

import jax
import pytest

from maxlite.config.load import load_config, model_names
from maxlite.model.build import build_model
from maxlite.parallel.sharding import partition_spec

GOLDEN = Path(__file__).parents[1] / "golden"
HEADER = "# path | shape | dtype | logical axes | mesh axes"


def describe(name: str) -> str:
    lines = [HEADER]
    for title, overrides in [("full", []), ("smoke=true", ["smoke=true"])]:
        config = load_config("base.yml", [f"model={name}", *overrides], {})
        model = build_model(config.model, config.compute)
        active = "" if not config.model.num_experts else f" ({model.num_active_parameters:,} active)"
        lines += ["", f"# {title}: {model.num_parameters:,} parameters{active}"]
        leaves = jax.tree_util.tree_leaves_with_path(model.abstract_params)
        axes = jax.tree.leaves(model.logical_axes, is_leaf=lambda node: isinstance(node, tuple))
        for (path, leaf), names in zip(leaves, axes, strict=True):
            where = "/".join(step.key for step in path)
            spec = partition_spec(names, config.parallel.logical_axis_rules)
            entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
            placed = [entry if isinstance(entry, str) else "+".join(entry or ["-"]) for entry in entries]
            shape = "x".join(str(size) for size in leaf.shape)
            lines.append(f"{where} | {shape} | {leaf.dtype} | {' '.join(names)} | {' '.join(placed)}")
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
