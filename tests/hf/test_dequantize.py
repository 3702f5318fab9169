import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlite.errors import ConversionError
from maxlite.hf.dequantize import dequantize
from maxlite.hf.safetensors import SafetensorsSource

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def source_of(folder, tensors: dict[str, np.ndarray], quantization: dict):
    save_file(tensors, folder / "model.safetensors")
    return dequantize(SafetensorsSource(folder), quantization)


def fp8_tensors(rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    scales = rng.uniform(1e-4, 1e-2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    values = rng.normal(size=(rows, columns), scale=50).astype(ml_dtypes.float8_e4m3fn)
    return {"a.weight": values, "a.weight_scale_inv": scales, "norm.weight": np.ones(3, ml_dtypes.bfloat16)}


def mxfp4_tensors(experts: int, outputs: int, groups: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "experts.gate_up_proj_blocks": rng.integers(0, 256, (experts, outputs, groups, 16)).astype(np.uint8),
        "experts.gate_up_proj_scales": rng.integers(110, 135, (experts, outputs, groups)).astype(np.uint8),
        "experts.gate_up_proj_bias": np.ones((experts, outputs), ml_dtypes.bfloat16),
    }


@pytest.mark.parametrize("rows, columns", [(256, 128), (300, 200), (5, 7), (129, 513)])
def test_fp8_blocks(tmp_path, rows, columns):
    tensors = fp8_tensors(rows, columns)
    source = source_of(tmp_path, tensors, FP8)
    assert source.tensors.keys() == {"a.weight", "norm.weight"}
    assert source.tensors["a.weight"].dtype == np.float32
    assert source.tensors["a.weight"].nbytes == rows * columns + tensors["a.weight_scale_inv"].nbytes
    at = np.arange(rows)[:, None] // 128, np.arange(columns)[None, :] // 128
    wanted = tensors["a.weight"].astype(np.float32) * tensors["a.weight_scale_inv"][at]
    for start, stop in ((0, rows), (1, 3), (rows - 2, rows), (rows // 3, rows)):
        np.testing.assert_array_equal(source.rows("a.weight", start, stop), wanted[start:stop])
    for left, right in ((0, columns), (1, 5), (columns - 3, columns), (columns // 2, columns)):
        part = source.part("a.weight", ((rows // 3, rows), (left, right)))
        np.testing.assert_array_equal(part, wanted[rows // 3 :, left:right])
    np.testing.assert_array_equal(source.rows("norm.weight", 0, 3), tensors["norm.weight"])
    np.testing.assert_array_equal(source.part("norm.weight", ((1, 3),)), tensors["norm.weight"][1:])


def test_mxfp4(tmp_path):
    tensors = mxfp4_tensors(3, 70, 2)
    source = source_of(tmp_path, tensors, MXFP4)
    name = "experts.gate_up_proj"
    assert source.tensors.keys() == {name, f"{name}_bias"}
    assert source.tensors[name].shape == (3, 64, 70)
    assert source.tensors[name].nbytes == 3 * 70 * 2 * 17
    wanted = np.zeros((3, 64, 70))
    for (expert, output, group, byte), packed in np.ndenumerate(tensors[f"{name}_blocks"]):
        scale = 2.0 ** (int(tensors[f"{name}_scales"][expert, output, group]) - 127)
        for half, code in enumerate((int(packed) & 15, int(packed) >> 4)):
            value = FP4_VALUES[code & 7] * (-1 if code & 8 else 1) * scale
            wanted[expert, 32 * group + 2 * byte + half, output] = value
    for start, stop in ((0, 3), (1, 2)):
        rows = source.rows(name, start, stop)
        assert rows.dtype == source.tensors[name].dtype == ml_dtypes.bfloat16
        # Four bits and a power of two: bfloat16 holds every value exactly.
        np.testing.assert_array_equal(rows.astype(np.float64), wanted[start:stop])
    for first, last in ((0, 64), (5, 31), (30, 40), (32, 64)):
        part = source.part(name, ((1, 3), (first, last), (7, 70)))
        np.testing.assert_array_equal(part.astype(np.float64), wanted[1:, first:last, 7:])
    assert source.rows(f"{name}_bias", 0, 3).shape == (3, 70)
    assert source.part(f"{name}_bias", ((0, 2), (3, 70))).shape == (2, 67)


@pytest.mark.parametrize(
    "quantization", [{}, {"quant_method": "gptq"}, {"quant_method": "fp8"}, {**FP8, "weight_block_size": [128]}]
)
def test_other_methods_are_refused(tmp_path, quantization):
    with pytest.raises(ConversionError, match="are not read; known are 'fp8' .* and 'mxfp4'"):
        source_of(tmp_path, {"a": np.zeros(1)}, quantization)


@pytest.mark.parametrize("scale", [None, np.ones((2, 3), np.float32), np.ones((), np.float32)])
def test_an_fp8_scale_that_does_not_fit(tmp_path, scale):
    tensors = {**fp8_tensors(300, 200), "a.weight_scale_inv": scale}
    found = "missing" if scale is None else str(list(scale.shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ConversionError, match=rf"a.weight is \[300, 200\], .*_scale_inv {found}, not \[3, 2\]"):
        source_of(tmp_path, {name: array for name, array in tensors.items() if array is not None}, FP8)


def test_mxfp4_scales_that_do_not_fit(tmp_path):
    name = "experts.gate_up_proj"
    tensors = mxfp4_tensors(3, 70, 2)
    with pytest.raises(ConversionError, match=rf"{name}_blocks is .* its {name}_scales \[3, 70\] uint8"):
        source_of(tmp_path, {**tensors, f"{name}_scales": tensors[f"{name}_scales"][..., 0].copy()}, MXFP4)
    del tensors[f"{name}_scales"]
    with pytest.raises(ConversionError, match=rf"{name}_blocks is .* its {name}_scales missing"):
        source_of(tmp_path, tensors, MXFP4)


@pytest.mark.torch
def test_fp8_as_transformers_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    tensors = fp8_tensors(256, 384)
    source = source_of(tmp_path, tensors, FP8)
    values = torch.from_numpy(tensors["a.weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(tensors["a.weight_scale_inv"])
    for dtype, ours in ((torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16)):
        wanted = reference._dequantize_one(values, scales, dtype).float().numpy()
        np.testing.assert_array_equal(source.rows("a.weight", 0, 256).astype(ours).astype(np.float32), wanted)


@pytest.mark.torch
def test_mxfp4_as_transformers_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    tensors = mxfp4_tensors(2, 96, 3)
    source = source_of(tmp_path, tensors, MXFP4)
    blocks, scales = (torch.from_numpy(tensors[f"experts.gate_up_proj_{part}"]) for part in ("blocks", "scales"))
    wanted = reference(blocks, scales, dtype=torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(source.rows("experts.gate_up_proj", 0, 2).astype(np.float32), wanted)
