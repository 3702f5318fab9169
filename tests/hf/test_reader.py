import json

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import maxlite.hf.chunks
from maxlite.config.schema import ModelConfig
from maxlite.hf.boxes import index_of, num_elements, whole
from maxlite.hf.config_json import read_config
from maxlite.hf.family_canonical import default_config
from maxlite.hf.load import plan_of
from maxlite.hf.plan import Plan, check_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.model.build import build_model
from tests.hf.cases import CASES
from tests.hf.folders import read_golden, write_folder
from tests.hf.tiny_tree import by_hand, random_params, read_whole, tiny_plan, whole_boxes


@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_tensors_laid_out_by_hand(tmp_path, monkeypatch, elements):
    # Few elements a chunk cut tensors at every row, also those whose rows take turns between parameters.
    monkeypatch.setattr(maxlite.hf.chunks, "_CHUNK_ELEMENTS", elements)
    plan = tiny_plan()
    wanted = random_params(plan)
    save_file(by_hand(wanted), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    check_tensors(plan, source)
    counts: list[int] = []
    read = dict(read_whole(plan, source, counts.append))
    assert list(read) == [path for paths in plan.bundles for path in paths]
    for path, value in read.items():
        assert value.dtype == plan.parameters[path].dtype
        assert value.tobytes() == wanted[path].tobytes(), path
        # What lets jax take the array without copying it.
        assert value.ctypes.data % 64 == 0 and value.flags.c_contiguous
    size = sum(value.nbytes for value in wanted.values())
    assert sum(counts) == num_bytes(plan, source, whole_boxes(plan)) == size


def test_values_take_the_dtype_of_the_model(tmp_path):
    wanted = random_params(tiny_plan(np.float32))
    save_file(by_hand(wanted), tmp_path / "model.safetensors")
    plan = tiny_plan(ml_dtypes.bfloat16)
    for path, value in read_whole(plan, SafetensorsSource(tmp_path), lambda count: None):
        float32 = path.endswith("selection_bias")
        assert value.dtype == (np.float32 if float32 else ml_dtypes.bfloat16)
        assert value.tobytes() == wanted[path].astype(value.dtype).tobytes()


def test_arrays_are_made_one_at_a_time(tmp_path):
    plan = tiny_plan()
    save_file(by_hand(random_params(plan)), tmp_path / "model.safetensors")
    counts: list[int] = []
    parameters = read_whole(plan, SafetensorsSource(tmp_path), counts.append)
    path, value = next(parameters)
    assert sum(counts) == value.nbytes == plan.parameters[path].dtype.itemsize * value.size


@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_boxes_of_tensors_laid_out_by_hand(tmp_path, monkeypatch, read_counts, elements):
    monkeypatch.setattr(maxlite.hf.chunks, "_CHUNK_ELEMENTS", elements)
    plan = tiny_plan()
    wanted = random_params(plan)
    save_file(by_hand(wanted), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    # The last third of every dimension, and beside it a second box that begins where the first ends.
    boxes = {
        path: [
            tuple((2 * size // 3, size) for size in leaf.shape),
            tuple((size // 3, 2 * size // 3) for size in leaf.shape),
        ]
        for path, leaf in plan.parameters.items()
    }
    counts: list[int] = []
    for path, arrays in read_parameters(plan, source, boxes, counts.append):
        assert list(arrays) == boxes[path]
        for box, value in arrays.items():
            np.testing.assert_array_equal(value, wanted[path][index_of(box, whole(wanted[path].shape))])
    size = sum(4 * num_elements(box) for parts in boxes.values() for box in parts)
    assert sum(read_counts) == sum(counts) == num_bytes(plan, source, boxes) == size


def test_nothing_is_read_for_nothing(tmp_path, read_counts):
    plan = tiny_plan()
    save_file(by_hand(random_params(plan)), tmp_path / "model.safetensors")
    boxes = {path: [] for path in plan.parameters}
    assert dict(read_parameters(plan, SafetensorsSource(tmp_path), boxes, lambda count: None)) == {
        path: {} for path in plan.parameters
    }
    assert read_counts == []


# One case of each family, and those whose tensors are laid out in another way than their family's first.
_FAMILIES = dict(reversed([(case.config_class, name) for name, case in CASES.items()]))
# Two processes of four devices each, and one that has devices here and there.
_OWN = {"first": (0, 1, 2, 3), "second": (4, 5, 6, 7), "scattered": (0, 3, 5, 6)}


@pytest.fixture(scope="module")
def open_family(tmp_path_factory):
    """open_family(name): a case's plan and source, and all of its parameters."""
    opened: dict[str, tuple] = {}

    def open_once(name: str):
        if name not in opened:
            folder, golden = tmp_path_factory.mktemp(name), read_golden(name)
            write_folder(golden, folder)
            family, keys = read_config(json.loads((folder / "config.json").read_text()), name)
            plan = plan_of(family.table, build_model(ModelConfig(**keys), default_config().compute))
            source = SafetensorsSource(folder)
            opened[name] = plan, source, dict(read_whole(plan, source, lambda count: None))
        return opened[name]

    return open_once


def _boxes(plan: Plan, turn: int, own: tuple[int, ...]) -> dict[str, list]:
    """Which parts of each parameter some of eight devices hold.

    turn: which dimension is the first to be cut, counted from the last. It is cut in eight, or in four and the next in
        two, or in what it and the others can be.
    """
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("four", "two"))
    boxes = {}
    for path, leaf in plan.parameters.items():
        spec: list = [None] * len(leaf.shape)
        axes = {"four": 4, "two": 2}
        for number in range(len(leaf.shape)):
            dimension = -1 - (turn + number) % len(leaf.shape)
            for names in (("four", "two"), ("four",), ("two",)):
                if (
                    all(name in axes for name in names)
                    and leaf.shape[dimension] % np.prod([axes[n] for n in names]) == 0
                ):
                    spec[dimension] = names
                    for name in names:
                        del axes[name]
                    break
        indices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(leaf.shape)
        held = {
            tuple(
                along.indices(size)[:2] for along, size in zip(indices[jax.devices()[number]], leaf.shape, strict=True)
            )
            for number in own
        }
        boxes[path] = sorted(held)
    return boxes


@pytest.mark.parametrize("own", _OWN.values(), ids=_OWN)
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("name", _FAMILIES.values())
def test_a_process_reads_what_its_devices_hold(open_family, read_counts, name, turn, own):
    plan, source, wanted = open_family(name)
    boxes = _boxes(plan, turn, own)
    read_counts.clear()
    for path, arrays in read_parameters(plan, source, boxes, lambda count: None):
        assert list(arrays) == boxes[path]
        for box, value in arrays.items():
            held = wanted[path][index_of(box, whole(wanted[path].shape))]
            assert value.shape == held.shape and np.array_equal(value, held), path
            assert value.ctypes.data % 64 == 0 and value.flags.c_contiguous
    # All of these files are float32: not a byte that no device holds, and none twice.
    size = sum(4 * num_elements(box) for parts in boxes.values() for box in parts)
    assert sum(read_counts) == num_bytes(plan, source, boxes) == size
    assert size < 0.8 * sum(value.nbytes for value in wanted.values())
