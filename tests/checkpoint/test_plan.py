"""The plan against orbax's own slices of real arrays, and against the files that processes of a run wrote."""

import collections
import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization.replica_slices import get_replica_slices

from maxlite.checkpoint.plan import plan_writes, process_bytes
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.verify import verify_step
from tests import forks


def orbax_regions(array):
    """What orbax would write of an array: Counter of (device, region)."""
    pieces = get_replica_slices(array, replica_id=0, use_replica_parallel=True).replica_slices
    regions = [
        tuple(places.indices(size)[:2] for places, size in zip(piece.index, array.shape, strict=True))
        for piece in pieces
    ]
    return collections.Counter(
        (piece.unsliced_data.device, region) for piece, region in zip(pieces, regions, strict=True)
    )


def planned_regions(array):
    # With a process of its own for each device, a piece says which device it is of.
    numbers = {device: number for number, device in enumerate(jax.devices())}
    (leaf,) = plan_writes([array], numbers.__getitem__).values()
    return collections.Counter((jax.devices()[piece.process], piece.region) for piece in leaf.pieces)


SPECS = [
    (),
    ("data",),
    ("fsdp",),
    (None, "fsdp"),
    (("data", "fsdp"),),
    ("fsdp", "tensor"),
    ("tensor", None, ("fsdp", "data")),
    (("fsdp", "data", "tensor"),),
]
SHAPES = [(), (3,), (8,), (16, 24), (8, 5), (24, 7, 16), (16, 8, 8), (0,), (8, 0)]


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "fsdp": 1, "tensor": 2}])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_as_orbax_slices(states, sizes, dtype):
    mesh, compared = states.mesh(**sizes), 0
    for shape in SHAPES:
        for spec in SPECS:
            parts = [np.prod([sizes[axis] for axis in ([entry] if isinstance(entry, str) else entry or ())])
                     for entry in spec]  # fmt: skip
            if len(spec) > len(shape) or any(size % part for size, part in zip(shape, parts, strict=False)):
                continue
            array = jax.device_put(np.zeros(shape, dtype), NamedSharding(mesh, PartitionSpec(*spec)))
            assert planned_regions(array) == orbax_regions(array), (shape, spec)
            compared += 1
    assert compared > 25


@pytest.mark.parametrize("shape", [(), (1024,), (8, 128), (16, 128), (64, 128), (64, 64), (16, 8, 256)])
def test_as_orbax_slices_in_the_hosts_memory(states, shape):
    sharding = NamedSharding(states.mesh(data=8), PartitionSpec(), memory_kind="pinned_host")
    array = jax.device_put(np.zeros(shape, np.float32), sharding)
    assert planned_regions(array) == orbax_regions(array)


def test_every_element_is_written_once(states):
    mesh = states.mesh(data=2, fsdp=2, tensor=2)
    for spec in [(), ("fsdp",), ("fsdp", "tensor"), (None, "tensor")]:
        leaf = jax.ShapeDtypeStruct((8, 12), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        (planned,) = plan_writes({"a": leaf}).values()
        written = np.zeros((8, 12), int)
        for piece in planned.pieces:
            written[tuple(slice(*bounds) for bounds in piece.region)] += 1
        assert (written == 1).all()
        assert sum(piece.num_bytes for piece in planned.pieces) == planned.num_bytes == 8 * 12 * 2


def test_copies_share_the_work_and_scalars_are_the_first_ones(states):
    everywhere = NamedSharding(states.mesh(data=8), PartitionSpec())
    state = {
        "params": {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=everywhere)},
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    }
    first = states.mesh(data=8).devices[0]
    plan = plan_writes(state, lambda device: 0 if device.id < first.id + 4 else 1)
    assert plan.keys() == {"params/w", "step"}
    assert plan["params/w"].bytes_of() == {0: 128, 1: 128} and plan["step"].bytes_of() == {0: 4}
    assert process_bytes(plan, 2) == [132, 128]
    assert process_bytes(plan, 3) == [132, 128, 0]


SAVER = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec, AxisType
import numpy as np
from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.load import load_config

port, process, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
state = {}
for name, shape, spec in %r:
    values = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    state[name] = jax.make_array_from_callback(shape, sharding, lambda index: values[index])
config = load_config("base.yml", ["dtype=float32", "dataset_type=synthetic"], {}).checkpoint
checkpointer = Checkpointer(folder, config)
checkpointer.save(1, {"params": state}, {})
checkpointer.close()
jax.distributed.shutdown()
"""
LEAVES = [
    ("copied", (16, 6), ()),
    ("scalar", (), ()),
    ("uneven", (3, 5), ()),
    ("fsdp", (8, 12), ("fsdp",)),
    ("both", (8, 4), ("fsdp", "tensor")),
    ("crossed", (4, 8), (None, "tensor")),
    ("last", (3, 5, 16), (None, None, ("fsdp", "tensor"))),
    ("all", (8, 2), (("data", "fsdp", "tensor"),)),
]


@pytest.fixture(scope="module")
def written_by_two(process_environment, tmp_path_factory):
    """The folder of arrays that two processes of four devices saved."""
    folder = tmp_path_factory.mktemp("two") / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [[str(port), str(process), str(folder)] for process in range(2)]
    ended = forks.run_programs(SAVER % (LEAVES,), arguments, process_environment, timeout=120)
    assert [process.code for process in ended] == [0, 0], ended
    return folder / "checkpoints" / "1" / "items"


def elements_written(folder, process, name, shape):
    """Which elements lie in the files of one process, by the chunks that its own database lists."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/ocdbt.process_{process}/"}).result()
    written = np.zeros(shape, bool)
    keys = [key.decode() for key in store.list().result() if key.decode().startswith(f"params.{name}/")]
    # Orbax has every process describe the arrays, in the files of the first.
    described = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    chunk = json.loads(described.read(f"params.{name}/.zarray").result().value)["chunks"]
    for key in keys:
        place = key.partition("/")[2]
        if place != ".zarray":
            starts = [int(number) * size for number, size in zip(place.split("."), chunk, strict=False)]
            written[tuple(slice(start, start + size) for start, size in zip(starts, chunk, strict=True))] = True
    return written


def test_the_files_of_two_processes_hold_what_was_planned(states, written_by_two):
    mesh = states.mesh(data=2, fsdp=2, tensor=2)
    state = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for name, shape, spec in LEAVES
    }
    early = set(mesh.devices.flat[:4])
    for name, planned in plan_writes(state, lambda device: int(device not in early)).items():
        for process in range(2):
            expected = np.zeros(planned.shape, bool)
            for piece in planned.pieces:
                if piece.process == process:
                    expected[tuple(slice(*bounds) for bounds in piece.region)] = True
            found = elements_written(written_by_two, process, name, planned.shape)
            np.testing.assert_array_equal(found, expected, f"{name}, process {process}")


def test_what_two_processes_wrote_is_sound_to_one(written_by_two):
    step = written_by_two.parent
    assert read_record(step).num_processes == 2
    found = verify_step(step)
    assert found.problems == () and found.num_arrays == len(LEAVES)
