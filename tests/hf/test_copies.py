import ml_dtypes
import numpy as np
import pytest

from maxlite.hf.copies import copy_values

FLOATS = [np.dtype(dtype) for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("of", FLOATS, ids=str)
@pytest.mark.parametrize("crossed", [False, True])
def test_all_pairs_of_dtypes(of, to, crossed):
    # More than one tile each way, and neither size a multiple of it.
    source = np.random.default_rng(0).normal(size=(3, 300, 131)).astype(of)
    target = np.zeros((3, 131, 300) if crossed else source.shape, to)
    copy_values(target.swapaxes(1, 2) if crossed else target, source)
    expected = source.astype(to)
    assert target.tobytes() == (expected.swapaxes(1, 2) if crossed else expected).tobytes()


def test_every_bit_pattern_survives():
    # NaNs of every kind too: no arithmetic is done.
    source = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    target = np.empty_like(source)
    copy_values(target.T, source)
    assert target.tobytes() == source.T.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 5), (5, 0), (1, 1), (7, 1), (1, 700), (2, 2, 0, 3)])
def test_odd_shapes(shape):
    source = np.ones(shape, np.float32)
    target = np.zeros(shape, ml_dtypes.bfloat16)
    copy_values(target, source)
    assert (target == 1).all()
    turned = np.zeros(shape[::-1], np.float32)
    copy_values(turned.T, source)
    assert (turned == 1).all()


def test_strided_target():
    target = np.zeros((5, 20, 30), np.float32)
    source = np.random.default_rng(0).normal(size=(5, 15, 20)).astype(np.float32)
    copy_values(target[:, :, 1::2].swapaxes(1, 2), source)
    np.testing.assert_array_equal(target[:, :, 1::2].swapaxes(1, 2), source)
    assert not target[:, :, ::2].any()
