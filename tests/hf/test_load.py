"""Folders onto a mesh: of one process, and of two that each read what their own devices hold."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.schema import ModelConfig
from maxlite.hf.family_canonical import default_config
from maxlite.hf.folder import read_folder
from maxlite.hf.load import load_folder, own_boxes
from maxlite.model.build import build_model
from tests.hf.folders import read_golden, write_folder

# Loads a folder in process argv[1] of 2, first as it is and then with a file that process 1 cannot read.
_PROGRAM = """
import io, json, os, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.load import load_config
from maxlite.config.schema import ModelConfig
from maxlite.errors import ConversionError
from maxlite.hf.folder import read_folder
from maxlite.hf.load import load_folder
from maxlite.model.build import build_model
from maxlite.parallel.devices import prepare_jax, run_devices

process, coordinator, path, answer = int(sys.argv[1]), *sys.argv[2:]
keys = ["num_processes=2", f"process_id={process}", f"coordinator_address={coordinator}", "cpu_devices=4"]
config = load_config("base.yml", [*keys, "jax_distributed_initialization_timeout=60", "jax_cache_dir=null"], {})
prepare_jax(config)
mesh = Mesh(np.array(run_devices(config.run)), ("all",))
folder = read_folder(path)
model = build_model(ModelConfig(**folder.keys), config.compute)

def sharding(leaf):
    cut = [place for place, size in enumerate(leaf.shape) if size % 8 == 0]
    return NamedSharding(mesh, PartitionSpec(*[None] * cut[-1], "all") if cut else PartitionSpec())

shardings, notes, counts = jax.tree.map(sharding, model.abstract_params), io.StringIO(), []
preadv = os.preadv
def counting(*arguments):
    counts.append(preadv(*arguments))
    return counts[-1]
os.preadv = counting
params = leaf_paths(load_folder(folder, model, shardings, notes))
num_read, held, parts = sum(counts), 0, {}
for name, array in params.items():
    pieces = {tuple(bounds.indices(size)[:2] for bounds, size in zip(shard.index, array.shape)): shard.data
              for shard in array.addressable_shards}
    held += sum(piece.nbytes for piece in pieces.values())
    parts[name] = [[box, np.asarray(piece).tolist()] for box, piece in pieces.items()]
total = jax.jit(lambda arrays: sum(abs(array).sum() for array in arrays))(list(params.values()))

if process == 1:
    def failing(*arguments):
        raise OSError(5, "Input/output error")
    os.preadv = failing
try:
    load_folder(folder, model, shardings, io.StringIO())
    error = None
except ConversionError as raised:
    error = str(raised)
with open(answer, "w") as file:
    json.dump({"read": num_read, "held": held, "parts": parts, "total": float(total), "error": error,
               "notes": notes.getvalue(), "devices": jax.device_count()}, file)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    write_folder(read_golden("qwen2-moe"), path)
    return path


def load(folder: Path, place) -> dict[str, jax.Array]:
    found = read_folder(folder)
    model = build_model(ModelConfig(**found.keys), default_config().compute)
    return leaf_paths(load_folder(found, model, jax.tree.map(place, model.abstract_params), io.StringIO()))


def on_one(leaf) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def test_arrays_are_made_in_their_shardings(folder):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("four", "two"))

    def place(leaf) -> NamedSharding:
        spec: list = [None] * len(leaf.shape)
        for dimension, axis in ((-1, "four"), (-2, "two"))[: len(spec)]:
            spec[dimension] = axis if leaf.shape[dimension] % mesh.shape[axis] == 0 else None
        return NamedSharding(mesh, PartitionSpec(*spec))

    wanted, found = load(folder, on_one), load(folder, place)
    assert wanted.keys() == found.keys()
    for name, array in found.items():
        assert array.sharding == place(array) and array.dtype == wanted[name].dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(wanted[name]))
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(wanted[name])[shard.index])


def test_a_donated_copy_leaves_the_others_alone(folder):
    # Devices of one host that hold the same may share its memory.
    mesh = Mesh(np.array(jax.devices()), ("all",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    wanted = np.asarray(load(folder, on_one)["final_norm/scale"])
    array = load(folder, lambda leaf: everywhere)["final_norm/scale"]
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0, out_shardings=everywhere)(array)
    for shard in doubled.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), 2 * wanted)


def test_own_boxes():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("four", "two"))
    boxes = own_boxes(NamedSharding(mesh, PartitionSpec("two", None, "four")), (6, 5, 8))
    assert boxes[jax.devices()[0]] == ((0, 3), (0, 5), (0, 2))
    assert boxes[jax.devices()[7]] == ((3, 6), (0, 5), (6, 8))
    assert own_boxes(on_one(None), ()) == {jax.devices()[0]: ()}


def test_two_processes_read_what_their_devices_hold(folder, process_environment, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(process), coordinator, str(folder), str(tmp_path / f"{process}.json")],
            env=process_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    answers = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    wanted = {name: np.asarray(array) for name, array in load(folder, on_one).items()}
    seen = {name: np.zeros(array.shape, bool) for name, array in wanted.items()}
    for answer in answers:
        assert answer["devices"] == 8
        # The files are float32, as the parameters: nothing is read that is not held.
        assert 0 < answer["read"] == answer["held"] < 0.6 * os.path.getsize(folder / "model.safetensors")
        assert answer["total"] == pytest.approx(sum(np.abs(array).sum() for array in wanted.values()), rel=1e-5)
        for name, parts in answer["parts"].items():
            for box, values in parts:
                inside = tuple(slice(*bounds) for bounds in box)
                np.testing.assert_array_equal(np.float32(values), wanted[name][inside])
                seen[name][inside] = True
        # Both say what only one of them met.
        assert "model.safetensors cannot be read: Input/output error" in answer["error"]
    assert all(mask.all() for mask in seen.values())
    assert "process 0 of 2" in answers[0]["notes"] and answers[1]["notes"] == ""
