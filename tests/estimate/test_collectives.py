"""What the training step sends, as the TPU compiler has it. UPDATE_GOLDEN=1 writes the files anew."""

import os
from pathlib import Path

import jax
import pytest

from maxlite.estimate.compile import Target, compile_train_step
from maxlite.estimate.groups import layout_of
from maxlite.estimate.hlo import Collective, Program
from maxlite.estimate.roofline import crosses_slices
from maxlite.parallel.topology import build_topology
from tests.conftest import load_tiny

GOLDEN = Path(__file__).parents[1] / "golden" / "collectives"
HEADER = "# kind | mesh axes | in loops | times a step | payload bytes | between slices"
pytestmark = pytest.mark.tpu
DENSE = (
    "emb_dim=512",
    "mlp_dim=1024",
    "num_decoder_layers=4",
    "num_query_heads=8",
    "num_kv_heads=4",
    "head_dim=64",
    "vocab_size=2048",
    "dtype=bfloat16",
    "max_target_length=256",
    "per_device_batch_size=1",
    "dcn_data_parallelism=1",
    "ici_fsdp_parallelism=1",
)
MOE = ("mlp_pattern=[moe]", "num_experts=8", "num_experts_per_tok=2", "moe_mlp_dim=1024")
MESHES = {
    "fsdp": (1, "ici_fsdp_parallelism=8"),
    "fsdp-tensor": (1, "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"),
    "fsdp-context": (1, "ici_fsdp_parallelism=4", "ici_context_parallelism=2"),
    "fsdp-ring": (1, "ici_fsdp_parallelism=4", "ici_context_parallelism=2", "context_parallel_strategy=ring"),
    "fsdp-expert": (1, "ici_fsdp_parallelism=2", "ici_expert_parallelism=4", *MOE),
    "fsdp-stage": (1, "ici_fsdp_parallelism=4", "ici_pipeline_parallelism=2"),
    "slices-data-fsdp": (2, "dcn_data_parallelism=2", "ici_fsdp_parallelism=8"),
}


def collectives_of(mesh: str) -> tuple[list[Collective], list[jax.Device], int]:
    """Returns the step's collectives, its devices, and the size of its largest parameter in bytes of bfloat16."""
    slices, *overrides = MESHES[mesh]
    given = {text.partition("=")[0] for text in overrides}
    dense = [text for text in DENSE if text.partition("=")[0] not in given]
    config = load_tiny(*dense, *overrides, f"compile_topology_num_slices={slices}", "compile_topology=v5e-8")
    topology = build_topology("v5e-8", slices)
    setup, program = compile_train_step(config, Target(topology.devices, topology))
    assert program.compiled is not None
    found = Program(program.compiled.as_text() or "").collectives(layout_of(setup.mesh))
    largest = max(leaf.size for leaf in jax.tree.leaves(setup.model.abstract_params["group_0"]))
    return list(found), list(setup.mesh.devices.flat), 2 * largest


def describe(found: list[Collective], devices: list[jax.Device]) -> str:
    rows: dict[tuple[str, ...], list[int]] = {}
    for one in found:
        way = "network" if crosses_slices(one, devices) else "slice"
        key = (one.kind, "+".join(one.axes), str(len(one.loops)), way)
        total = rows.setdefault(key, [0, 0])
        total[0] += one.times
        total[1] += one.times * one.payload
    lines = [f"{k[0]} | {k[1]} | {k[2]} | {times} | {payload} | {k[3]}" for k, (times, payload) in sorted(rows.items())]
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="the counts are those of jax 0.10's compiler")
@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_are_as_written_down(mesh):
    found, devices, largest = collectives_of(mesh)
    text = describe(found, devices)
    file = GOLDEN / f"{mesh}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    # Weights are gathered layer by layer: nothing as large as a whole stack is gathered outside of the loop over them.
    gathers = [one for one in found if one.kind == "all-gather" and not one.loops]
    assert all(one.payload < largest for one in gathers), gathers
    # What crosses slices goes along the axes that lie between them.
    assert {one.axes for one in found if crosses_slices(one, devices)} <= {("data",)}
