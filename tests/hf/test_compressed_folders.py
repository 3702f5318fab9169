"""Folders that compressed-tensors itself writes: maxlite's logits are those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # noqa: E402

from maxlite.errors import ConversionError  # noqa: E402
from maxlite.hf.folder import read_folder  # noqa: E402
from tests.hf.cases import LONG_PROMPTS  # noqa: E402
from tests.hf.folders import all_logits, load_folder, read_golden, write_folder  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def args(**given: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, **given}


WEIGHTS = {
    "int4-groups": args(num_bits=4, strategy="group", group_size=16),
    "int4-channels": args(num_bits=4, strategy="channel"),
    "int8-tensor": args(strategy="tensor"),
    "fp8-channels": args(type="float", strategy="channel"),
    "fp8-blocks": args(type="float", strategy="block", block_structure=[16, 32]),
}
# With these the format is int-quantized or float-quantized, and transformers rounds activations unless told otherwise.
ROUNDED = {
    "w8a8": {"weights": args(strategy="channel"), "input_activations": args(strategy="token", dynamic=True)},
    "fp8-dynamic": {
        "weights": WEIGHTS["fp8-channels"],
        "input_activations": args(type="float", strategy="token", dynamic=True),
    },
    "fp8-static": {"weights": WEIGHTS["fp8-channels"], "input_activations": args(type="float", strategy="tensor")},
}
SCHEMES = {**{name: {"weights": weights} for name, weights in WEIGHTS.items()}, **ROUNDED}
FORMATS = {"int4-groups": "pack-quantized", "w8a8": "int-quantized", "fp8-dynamic": "float-quantized"}


def largest(weight: Any, weights: Any) -> Any:
    """The largest absolute value of what shares a scale."""
    rows, columns = weight.shape
    if weights.strategy == "tensor":
        return weight.abs().max()
    height, width = {"group": (1, weights.group_size), "block": weights.block_structure}.get(
        weights.strategy, (1, columns)
    )
    parts = weight.abs().reshape(rows // height, height, columns // width, width)
    return parts.amax((1, 3))


def write_compressed(folder: Path, scheme: dict[str, Any]) -> None:
    """A tiny Llama, rounded and saved by compressed-tensors."""
    write_folder(read_golden("llama"), folder.with_name("whole"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder.with_name("whole"), dtype=torch.float32)
    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            weights = module.quantization_scheme.weights
            most = 448 if weights.type == "float" else 2 ** (weights.num_bits - 1) - 0.5
            scale = largest(module.weight.data, weights) / most
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    write_compressed(tmp_path / "few", SCHEMES[name])
    folder = read_folder(tmp_path / "few")
    assert folder.config["quantization_config"]["format"] == FORMATS.get(
        name, folder.config["quantization_config"]["format"]
    )
    assert len(folder.remarks) == (name in ROUNDED)
    as_floats = transformers.CompressedTensorsConfig(dequantize=True) if name in ROUNDED else None
    options = {} if as_floats is None else {"quantization_config": as_floats}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32, **options).eval()
    ours = all_logits(load_folder(tmp_path / "few"))
    for prompt, found in zip(LONG_PROMPTS, ours, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(found, expected, atol=5e-5, rtol=0)


def test_codes_around_other_values_than_zero_are_refused(tmp_path):
    write_compressed(tmp_path / "few", {"weights": args(num_bits=4, strategy="group", group_size=16, symmetric=False)})
    with pytest.raises(ConversionError, match="weights.symmetric=False is not supported; it may be True"):
        read_folder(tmp_path / "few")
