import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlite.errors import ConversionError
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.source import Respelled, listing, row_ranges


def test_other_names(tmp_path):
    save_file({"language_model.model.norm": np.arange(3.0), "lm_head": np.zeros(1)}, tmp_path / "model.safetensors")
    source = Respelled(SafetensorsSource(tmp_path), ((r"^language_model\.", ""), (r"^model\.", "")))
    assert source.tensors.keys() == {"norm", "lm_head"}
    np.testing.assert_array_equal(source.rows("norm", 1, 3), [1, 2])
    np.testing.assert_array_equal(source.part("norm", ((2, 3),)), [2])


def test_two_tensors_under_one_name(tmp_path):
    save_file({"x.a": np.zeros(1), "a": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"(x\.a and a|a and x\.a) are two names of one tensor, a"):
        Respelled(SafetensorsSource(tmp_path), ((r"^x\.", ""),))


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((), [(0, 1)]),
        ((0, 4), []),
        ((5, 4), [(0, 2), (2, 4), (4, 5)]),
        ((2, 100), [(0, 1), (1, 2)]),
        ((3, 0), [(0, 3)]),
        ((20,), [(0, 8), (8, 16), (16, 20)]),
    ],
)
def test_row_ranges(shape, expected):
    assert row_ranges(shape, 8) == expected


def test_listing():
    assert listing(["a", "b"]) == "a\n  b"
    assert listing(list("abcdefg")).splitlines()[-2:] == ["  e", "  and 2 more"]
