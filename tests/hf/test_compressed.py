"""Folders of compressed-tensors as floats, against values worked out bit by bit, and against its own code."""

import ml_dtypes
import numpy as np
import pytest

from maxlite.errors import ConversionError
from maxlite.hf.compressed import CompressedSource, pack, packed_shape
from maxlite.hf.compressed_json import Scheme
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.shards import NewTensor, make_shards
from maxlite.hf.writer import write_array

NAME = "mlp.up_proj.weight"
SCHEMES = {
    "int4-groups": Scheme("int", 4, True, 1, 16),
    "int4-channels": Scheme("int", 4, True, 1, None),
    "int8-channels": Scheme("int", 8, True, 1, None),
    "int8-tensor": Scheme("int", 8, True, None, None),
    "plain-int8": Scheme("int", 8, False, 1, None),
    "plain-int8-groups": Scheme("int", 8, False, 1, 16),
    "fp8-channels": Scheme("float", 8, False, 1, None),
    "fp8-tensor": Scheme("float", 8, False, None, None),
    "fp8-blocks": Scheme("float", 8, False, 20, 32),
}
# Groups divide columns; the last word of a row, and the last blocks, may be part empty otherwise.
SHAPES = {name: (45, 80) if "groups" in name else (45, 77) for name in SCHEMES}


def packed_by_hand(values: np.ndarray, bits: int) -> np.ndarray:
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns * bits // 32)), np.int64)
    for (row, column), value in np.ndenumerate(values):
        words[row, column * bits // 32] += (int(value) + 2 ** (bits - 1)) << column * bits % 32
    return words.astype(np.uint32).view(np.int32)


def stored_by_hand(scheme: Scheme, shape: tuple[int, int], scale_dtype=np.float32):
    """The tensors of a weight, and its values in float32."""
    rng = np.random.default_rng(0)
    count = 1 if scheme.rows is None else None
    parts = [part or size for part, size in zip((scheme.rows, scheme.columns), shape, strict=True)]
    grid = (1, 1) if count else tuple(-(-size // part) for size, part in zip(shape, parts, strict=True))
    scale = rng.uniform(0.01, 0.1, grid).astype(scale_dtype)
    if scheme.kind == "float":
        codes = rng.normal(0, 80, shape).astype(ml_dtypes.float8_e4m3fn)
    else:
        codes = rng.integers(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1), shape).astype(np.int8)
    rows, columns = (np.arange(size) // (size if count else part) for size, part in zip(shape, parts, strict=True))
    values = codes.astype(np.float32) * scale.astype(np.float32)[rows[:, None], columns[None]]
    tensors = {f"{NAME}_scale": scale.reshape(1) if count else scale}
    if scheme.packed:
        tensors[f"{NAME}_packed"] = packed_by_hand(codes, scheme.bits)
        tensors[f"{NAME}_shape"] = np.array(shape)
    else:
        tensors[NAME] = codes
    return tensors, values


def source_of(folder, tensors: dict[str, np.ndarray], *schemes: Scheme) -> CompressedSource:
    tensors = {**tensors, "norm.weight": np.ones(3, ml_dtypes.bfloat16)}
    locations = make_shards(folder, [NewTensor(n, a.shape, a.dtype) for n, a in tensors.items()], 10**9)
    for name, array in tensors.items():
        write_array(locations[name], np.ascontiguousarray(array))
    return CompressedSource(SafetensorsSource(folder), schemes)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_box_is_what_its_codes_and_scales_say(name, tmp_path):
    scheme, (rows, columns) = SCHEMES[name], SHAPES[name]
    tensors, wanted = stored_by_hand(scheme, (rows, columns))
    # What other weights of the folder are stored as does not matter.
    source = source_of(tmp_path, tensors, *SCHEMES.values())
    assert source.tensors.keys() == {NAME, "norm.weight"}
    held = sum(array.nbytes for part, array in tensors.items() if not part.endswith("_shape"))
    assert source.tensors[NAME].shape == (rows, columns)
    assert source.tensors[NAME].dtype == np.float32 and source.tensors[NAME].nbytes == held
    np.testing.assert_array_equal(source.rows(NAME, 0, rows), wanted)
    for some_rows in ((0, rows), (3, 4), (19, 41), (rows - 1, rows)):
        for some_columns in ((0, columns), (1, 2), (7, 9), (15, 50), (columns - 3, columns)):
            part = source.part(NAME, (some_rows, some_columns))
            np.testing.assert_array_equal(part, wanted[slice(*some_rows), slice(*some_columns)])
    np.testing.assert_array_equal(source.rows("norm.weight", 1, 3), np.ones(2))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_scales_of_other_dtypes(dtype, tmp_path):
    tensors, wanted = stored_by_hand(SCHEMES["int8-channels"], (6, 8), dtype)
    np.testing.assert_array_equal(source_of(tmp_path, tensors, SCHEMES["int8-channels"]).rows(NAME, 0, 6), wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 77])
def test_packing(bits, columns):
    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns)).astype(np.int8)
    packed = pack(values, bits)
    np.testing.assert_array_equal(packed, packed_by_hand(values, bits))
    assert packed.shape == packed_shape(values.shape, bits) and packed.dtype == np.int32


@pytest.mark.parametrize(
    "changed, message",
    [
        ({f"{NAME}_scale": None}, r"its mlp.up_proj.weight_scale missing"),
        ({f"{NAME}_scale": np.ones((45, 4), np.float32)}, r"its mlp.up_proj.weight_scale \[45, 4\]"),
        ({f"{NAME}_scale": np.ones((45, 5), np.int32)}, r"its mlp.up_proj.weight_scale \[45, 5\]"),
        ({f"{NAME}_shape": None}, r"_packed is \[45, 10\] int32"),
        ({f"{NAME}_shape": np.array([45, 90])}, r"_packed is \[45, 10\] int32"),
        ({f"{NAME}_packed": np.zeros((45, 10), np.uint8)}, r"_packed is \[45, 10\] uint8"),
        ({f"{NAME}_zero_point": np.ones((45, 5), np.int8)}, "weight_zero_point is not zero everywhere"),
    ],
)
def test_what_does_not_fit_is_named(changed, message, tmp_path):
    tensors, _ = stored_by_hand(SCHEMES["int4-groups"], (45, 80))
    tensors = {name: array for name, array in {**tensors, **changed}.items() if array is not None}
    with pytest.raises(ConversionError, match=f"(?s)4-bit int with scales for 1 x 16 values.*{message}"):
        source_of(tmp_path, tensors, SCHEMES["int4-groups"])


def test_zero_points_of_zero_are_nothing(tmp_path):
    tensors, wanted = stored_by_hand(SCHEMES["plain-int8"], (6, 8))
    zero = {f"{NAME}_zero_point": np.zeros((6, 1), np.int8)}
    source = source_of(tmp_path, {**tensors, **zero}, SCHEMES["plain-int8"])
    assert source.tensors.keys() == {NAME, "norm.weight"}
    np.testing.assert_array_equal(source.rows(NAME, 0, 6), wanted)


@pytest.mark.torch
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_as_compressed_tensors_does(bits):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for columns in (5, 64, 77):
        values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (9, columns)).astype(np.int8)
        theirs = helpers.pack_to_int32(torch.from_numpy(values), bits)
        np.testing.assert_array_equal(pack(values, bits), theirs.numpy())
