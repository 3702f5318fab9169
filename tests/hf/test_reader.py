import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import maxlite.hf.chunks
from maxlite.hf.plan import check_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.safetensors import SafetensorsSource
from tests.hf.tiny_tree import by_hand, random_params, tiny_plan


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
    read = dict(read_parameters(plan, source, counts.append))
    assert list(read) == [path for paths in plan.bundles for path in paths]
    for path, value in read.items():
        assert value.dtype == plan.parameters[path].dtype
        assert value.tobytes() == wanted[path].tobytes(), path
        # What lets jax take the array without copying it.
        assert value.ctypes.data % 64 == 0 and value.flags.c_contiguous
    assert sum(counts) == num_bytes(plan, source) == sum(value.nbytes for value in wanted.values())


def test_values_take_the_dtype_of_the_model(tmp_path):
    wanted = random_params(tiny_plan(np.float32))
    save_file(by_hand(wanted), tmp_path / "model.safetensors")
    plan = tiny_plan(ml_dtypes.bfloat16)
    for path, value in read_parameters(plan, SafetensorsSource(tmp_path), lambda count: None):
        float32 = path.endswith("selection_bias")
        assert value.dtype == (np.float32 if float32 else ml_dtypes.bfloat16)
        assert value.tobytes() == wanted[path].astype(value.dtype).tobytes()


def test_arrays_are_made_one_at_a_time(tmp_path):
    plan = tiny_plan()
    save_file(by_hand(random_params(plan)), tmp_path / "model.safetensors")
    counts: list[int] = []
    parameters = read_parameters(plan, SafetensorsSource(tmp_path), counts.append)
    path, value = next(parameters)
    assert sum(counts) == value.nbytes == plan.parameters[path].dtype.itemsize * value.size
