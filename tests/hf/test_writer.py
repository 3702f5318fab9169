import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import maxlite.hf.chunks
import maxlite.hf.writer
from maxlite.errors import ConversionError
from maxlite.hf.plan import check_tensors
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.shards import make_shards
from maxlite.hf.writer import fill_tensors, new_folder, new_tensors
from tests.hf.tiny_tree import by_hand, random_params, read_whole, tiny_plan


def write(plan, params, folder: Path, dtype=None, max_shard_bytes: int = 10**9) -> list[int]:
    counts: list[int] = []
    tensors = new_tensors(plan, dtype)
    fill_tensors(plan, params.__getitem__, make_shards(folder, tensors, max_shard_bytes), tensors, counts.append)
    return counts


@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_one_file_as_the_reference_reads_it(tmp_path, monkeypatch, elements):
    monkeypatch.setattr(maxlite.hf.chunks, "_CHUNK_ELEMENTS", elements)
    plan = tiny_plan()
    params = random_params(plan)
    counts = write(plan, params, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    read, wanted = load_file(tmp_path / "model.safetensors"), by_hand(params)
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(read[name], tensor, err_msg=name)
    assert sum(counts) == sum(tensor.nbytes for tensor in wanted.values())
    with safe_open(tmp_path / "model.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_shards_and_their_index(tmp_path):
    plan = tiny_plan()
    params = random_params(plan)
    write(plan, params, tmp_path, max_shard_bytes=700)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    wanted, read = by_hand(params), {}
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name in files:
        tensors = load_file(tmp_path / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 700 or len(tensors) == 1
        assert all(index["weight_map"][tensor] == name for tensor in tensors)
        read |= tensors
    assert read.keys() == wanted.keys() == index["weight_map"].keys()
    assert all(np.array_equal(read[name], wanted[name]) for name in wanted)
    assert index["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in wanted.values()),
        "total_parameters": sum(tensor.size for tensor in wanted.values()),
    }
    # Layers lie together, in their order.
    places = [index["weight_map"][f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in range(3)]
    assert places == sorted(places)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_there_and_back_is_bitwise(tmp_path, dtype):
    plan = tiny_plan(dtype)
    params = random_params(plan)
    write(plan, params, tmp_path, max_shard_bytes=500)
    source = SafetensorsSource(tmp_path)
    assert check_tensors(plan, source) == []
    read = dict(read_whole(plan, source, lambda count: None))
    assert all(read[path].tobytes() == params[path].tobytes() for path in params)


def test_another_dtype(tmp_path):
    plan = tiny_plan(np.float32)
    params = random_params(plan)
    write(plan, params, tmp_path, np.dtype(ml_dtypes.bfloat16))
    read = load_file(tmp_path / "model.safetensors")
    for name, tensor in by_hand(params).items():
        wanted = np.float32 if name.endswith("gate.bias") else ml_dtypes.bfloat16
        assert read[name].dtype == wanted
        assert read[name].tobytes() == tensor.astype(wanted).tobytes()


def test_parameters_in_another_memory_order(tmp_path):
    plan = tiny_plan()
    params = random_params(plan)
    write(plan, {path: np.asfortranarray(value) for path, value in params.items()}, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(read[name], tensor) for name, tensor in by_hand(params).items())


def test_a_folder_appears_when_it_is_full(tmp_path):
    destination = tmp_path / "deep" / "out"
    with new_folder(destination) as folder:
        assert not destination.exists()
        (folder / "a").write_text("a")
    assert (destination / "a").read_text() == "a"
    assert stat.S_IMODE(destination.stat().st_mode) == stat.S_IMODE((tmp_path / "deep").stat().st_mode)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path):
    plan = tiny_plan()

    def fetch(path: str) -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConversionError, match="out could not be written: .*No space left on device"):
        with new_folder(tmp_path / "out") as folder:
            tensors = new_tensors(plan, None)
            fill_tensors(plan, fetch, make_shards(folder, tensors, 10**9), tensors, lambda count: None)
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_exists(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError, match="out exists: choose another destination"), new_folder(tmp_path / "out"):
        pytest.fail("entered")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="could not be written"), new_folder(tmp_path / "file" / "out"):
        pytest.fail("entered")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConversionError, match="link exists"), new_folder(tmp_path / "link"):
        pass
    with pytest.raises(ConversionError, match="could not be written"), new_folder(tmp_path / ("n" * 300)):
        pass


def test_what_killed_conversions_left_is_removed_and_what_others_make_stays(tmp_path):
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        dead, alive = tmp_path / ".out.unfinished-999999999", tmp_path / f".out.unfinished-{mine.pid}"
        dead.mkdir()
        alive.mkdir()
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("x")
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [alive.name, "out"]
    finally:
        mine.kill()
        mine.wait()


def test_a_stop_signal_leaves_nothing(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, new_folder(tmp_path / "out"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
