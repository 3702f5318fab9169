import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlite.errors import ConversionError
from maxlite.hf.safetensors import DTYPES, INDEX_FILE, SafetensorsSource, read_header


def save(folder: Path, shards: dict[str, dict[str, np.ndarray]], index: bool = True) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index:
        weights = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def two_shards() -> dict[str, dict[str, np.ndarray]]:
    return {
        "model-00001-of-00002.safetensors": {"a": np.arange(6, dtype=np.float32).reshape(3, 2)},
        "model-00002-of-00002.safetensors": {"b": np.arange(4, dtype=np.int64), "c": np.array(7, np.float16)},
    }


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("place", ["file", "folder"])
def test_every_dtype_as_written_by_the_reference(tmp_path, place):
    rng = np.random.default_rng(0)
    wanted = {
        name: rng.integers(0, 2, size=(5, 3)).astype(dtype) for name, dtype in DTYPES.items() if name != "F8_E8M0"
    }
    file = tmp_path / "model.safetensors"
    save_file(wanted, file)
    source = SafetensorsSource(file if place == "file" else tmp_path)
    assert source.tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        assert source.tensors[name].dtype == array.dtype
        assert source.tensors[name].nbytes == array.nbytes
        np.testing.assert_array_equal(source.rows(name, 0, 5), array)
        np.testing.assert_array_equal(source.rows(name, 2, 4), array[2:4])


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 5, 6), (1, 5, 1)])
def test_only_the_bytes_of_a_box_are_read(tmp_path, read_counts, shape):
    wanted = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    save_file({"before": np.zeros(3), "a": wanted, "b": np.zeros(9)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for box in itertools.product(*(itertools.combinations(range(size + 1), 2) for size in shape)):
        inside = wanted[tuple(slice(*bounds) for bounds in box)]
        read_counts.clear()
        np.testing.assert_array_equal(source.part("a", box), inside)
        assert sum(read_counts) == inside.nbytes
        # Entries that follow one another in the file are read at once.
        starts = np.flatnonzero(np.diff(inside.reshape(-1), prepend=-9) != 1)
        assert len(read_counts) == len(starts)


def test_shards_with_and_without_an_index(tmp_path):
    for index in (True, False):
        folder = tmp_path / str(index)
        folder.mkdir()
        source = SafetensorsSource(save(folder, two_shards(), index))
        np.testing.assert_array_equal(source.rows("a", 1, 3), [[2, 3], [4, 5]])
        np.testing.assert_array_equal(source.rows("b", 0, 4), np.arange(4))
        assert source.rows("c", 0, 1) == np.float16(7) and source.rows("c", 0, 1).shape == ()
        assert source.tensors["c"].file.name == "model-00002-of-00002.safetensors"


def test_files_beside_those_of_the_index_are_left_alone(tmp_path):
    save(tmp_path, two_shards())
    save_file({"consolidated": np.zeros(3)}, tmp_path / "consolidated.safetensors")
    assert SafetensorsSource(tmp_path).tensors.keys() == {"a", "b", "c"}


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, index):
    save(tmp_path, two_shards(), index)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"lacks these files.*\n  model-00001-of-00002\.safetensors"):
        SafetensorsSource(tmp_path)


def test_an_index_that_disagrees(tmp_path):
    save(tmp_path, two_shards())
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"] |= {"a": "model-00002-of-00002.safetensors", "d": "model-00001-of-00002.safetensors"}
    del index["weight_map"]["b"]
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ConversionError) as error:
        SafetensorsSource(tmp_path)
    assert "a should be in model-00002-of-00002.safetensors" in str(error.value)
    assert "d should be in model-00001-of-00002.safetensors" in str(error.value)
    assert "b is in model-00002-of-00002.safetensors, unlisted" in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a"'])
def test_a_garbled_index(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ConversionError, match="index.json is garbled"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    save(tmp_path, {"x.safetensors": {"a": np.zeros(2)}, "y.safetensors": {"a": np.zeros(2)}}, index=False)
    with pytest.raises(ConversionError, match="a is both in x.safetensors and y.safetensors"):
        SafetensorsSource(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(ConversionError, match=r"has no weights: no \*\.safetensors$"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match="pytorch_model.bin would have to be saved as safetensors first"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ConversionError, match="nowhere cannot be read: No such file"):
        SafetensorsSource(tmp_path / "nowhere")


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_truncated_file(tmp_path, cut):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.arange(100.0)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ConversionError, match=r"model.safetensors is (truncated|not a safetensors file)"):
        SafetensorsSource(tmp_path)


GARBLED = {
    "text": b"hello, this is not one",
    "json": (5).to_bytes(8, "little") + b"{{{{{",
    "list": header([1]),
    "no dtype": header({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "shape": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
    "offsets": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)),
    "gap": header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, bytes(2)),
    "rest": header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, bytes(2)),
    "overlap": header(
        {
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        },
        bytes(3),
    ),
    "huge": (1 << 60).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED)
def test_a_garbled_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConversionError, match="model.safetensors is not a safetensors file"):
        SafetensorsSource(tmp_path)


def test_an_unknown_dtype(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)))
    with pytest.raises(ConversionError, match="a in .*model.safetensors has the dtype 'F4'; known are F64, "):
        SafetensorsSource(tmp_path)


def test_a_file_cut_while_it_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.arange(100.0)}, file)
    source = SafetensorsSource(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConversionError, match="model.safetensors has become shorter"):
        source.rows("a", 50, 100)
    file.unlink()
    with pytest.raises(ConversionError, match="model.safetensors cannot be read"):
        source.rows("a", 0, 1)


def test_a_tensor_without_entries(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((0, 3)), "b": np.ones(2, ml_dtypes.bfloat16)}, file)
    tensors = read_header(file)
    assert tensors["a"][0].shape == (0, 3)
    assert SafetensorsSource(file).rows("a", 0, 0).shape == (0, 3)
