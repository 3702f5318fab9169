"""Quantized weights as floats: a source that shows the tensors of another under their plain names.

Two forms are read: fp8 with a scale a block of rows and columns (DeepSeek V3, Kimi K2), and MXFP4, 4-bit floats with
a power of two for every 32 of them (GPT-OSS).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.boxes import Box
from maxlite.hf.source import Source, StoredTensor, listing

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT = np.dtype(np.float32)
_BFLOAT = np.dtype(ml_dtypes.bfloat16)

# Every byte's value, or two values: looking them up is several times faster than converting.
FP8_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(_FLOAT)
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], _FLOAT)
_FP4_PAIRS = np.stack([np.tile(_FP4_VALUES, 16), np.repeat(_FP4_VALUES, 16)], axis=-1).view(np.uint64)[:, 0]
_POWERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(_FLOAT)
# Rows of an expert that are unpacked at once.
_UNPACKED_ROWS = 64


def dequantize(source: Source, quantization: Mapping[str, Any]) -> Source:
    """Returns a source of plain floats.

    quantization: `quantization_config` of config.json.

    Raises:
        ConversionError: a method or a form of it that is not known; a scale that is missing or of another shape.
    """
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return Mxfp4Source(source)
    block = quantization.get("weight_block_size")
    if method == "fp8" and isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block):
        return Fp8Source(source, (block[0], block[1]))
    raise ConversionError(
        f"{source.place}: weights quantized with quant_method {method!r} and weight_block_size {block!r} are not read; "
        "known are 'fp8' with blocks of [rows, columns], and 'mxfp4'. Use the model's unquantized weights."
    )


class Fp8Source:
    """8-bit floats `X` with a float `X_scale_inv` for every block of rows and columns, shown as float32 `X`."""

    def __init__(self, source: Source, block: tuple[int, int]):
        """Pairs weights with their scales.

        Raises:
            ConversionError: lists the weights whose scale is missing or of another shape.
        """
        self.place: Path = source.place
        self.tensors: dict[str, StoredTensor] = dict(source.tensors)
        self._source, self._block, self._quantized = source, block, set[str]()
        problems = []
        for name, tensor in source.tensors.items():
            if tensor.dtype != _FP8:
                continue
            scale = self.tensors.pop(name + _SCALE, None)
            wanted = tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=False))
            if len(tensor.shape) != 2 or scale is None or scale.shape != wanted:
                found = list(scale.shape) if scale else "missing"
                problems.append(f"{name} is {list(tensor.shape)}, its {name + _SCALE} {found}, not {list(wanted)}")
                continue
            nbytes = tensor.nbytes + scale.nbytes
            self.tensors[name] = StoredTensor(tensor.shape, _FLOAT, nbytes, tensor.file)
            self._quantized.add(name)
        if problems:
            raise ConversionError(
                f"{source.place}: quantized weights need a scale for every block of {list(block)}:\n  "
                + listing(problems)
            )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows start to stop of a tensor, scaled if it is quantized."""
        if name not in self._quantized:
            return self._source.rows(name, start, stop)
        return self.part(name, ((start, stop), (0, self.tensors[name].shape[1])))

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of a tensor, scaled if it is quantized."""
        stored = self._source.part(name, box)
        if name not in self._quantized:
            return stored
        (start, stop), (left, right) = box
        height, width = self._block
        values = np.take(FP8_VALUES, stored.view(np.uint8), mode="clip")
        first, before = start // height, left // width
        blocks = ((first, -(-stop // height)), (before, -(-right // width)))
        scales = self._source.part(name + _SCALE, blocks).astype(_FLOAT)
        for number, scale in enumerate(scales, first):
            begin, end = max(start, number * height) - start, min(stop, (number + 1) * height) - start
            values[begin:end] *= np.repeat(scale, width)[left - before * width : right - before * width]
        return values


class Mxfp4Source:
    """4-bit floats, two a byte: `X_blocks` [E, out, in / 32, 16] and `X_scales`, shown as bfloat16 `X` [E, in, out]."""

    def __init__(self, source: Source):
        """Pairs blocks with their scales.

        Raises:
            ConversionError: lists the blocks whose scales are missing or of another shape.
        """
        self.place: Path = source.place
        self.tensors: dict[str, StoredTensor] = {}
        self._source, self._quantized = source, set[str]()
        problems = []
        for name, tensor in source.tensors.items():
            plain = name.removesuffix(_BLOCKS)
            if plain == name:
                if name.removesuffix(_SCALES) + _BLOCKS not in source.tensors:
                    self.tensors[name] = tensor
                continue
            scales = source.tensors.get(plain + _SCALES)
            fits = tensor.dtype == np.uint8 and len(tensor.shape) == 4 and tensor.shape[-1] == 16
            if not fits or scales is None or (scales.dtype, scales.shape) != (tensor.dtype, tensor.shape[:-1]):
                found = f"{list(scales.shape)} {scales.dtype.name}" if scales else "missing"
                problems.append(f"{name} is {list(tensor.shape)} {tensor.dtype.name}, its {plain + _SCALES} {found}")
                continue
            experts, outputs, groups, _ = tensor.shape
            nbytes = tensor.nbytes + scales.nbytes
            self.tensors[plain] = StoredTensor((experts, 32 * groups, outputs), _BFLOAT, nbytes, tensor.file)
            self._quantized.add(plain)
        if problems:
            raise ConversionError(
                f"{source.place}: 4-bit weights are uint8 [E, out, in / 32, 16], their scales uint8 [E, out, in / 32]:"
                f"\n  {listing(problems)}"
            )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns experts start to stop of a tensor, unpacked if it is quantized: [experts, in, out]."""
        if name not in self._quantized:
            return self._source.rows(name, start, stop)
        _, inputs, outputs = self.tensors[name].shape
        return self.part(name, ((start, stop), (0, inputs), (0, outputs)))

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of a tensor, unpacked if it is quantized: [experts, in, out]."""
        if name not in self._quantized:
            return self._source.part(name, box)
        some_experts, (first, last), some_outputs = box
        before = first // 32
        some_groups = (before, -(-last // 32))
        blocks = self._source.part(name + _BLOCKS, (some_experts, some_outputs, some_groups, (0, 16)))
        scales = self._source.part(name + _SCALES, (some_experts, some_outputs, some_groups))
        experts, outputs, groups, _ = blocks.shape
        values = np.empty((experts, outputs, groups, 32), _BFLOAT)
        for expert in range(experts):
            for row in range(0, outputs, _UNPACKED_ROWS):
                part = (expert, slice(row, row + _UNPACKED_ROWS))
                numbers = np.take(_FP4_PAIRS, blocks[part], mode="clip").view(_FLOAT)
                numbers *= _POWERS[scales[part]][..., None]
                values[part] = numbers
        unpacked = values.reshape(experts, outputs, 32 * groups)
        return unpacked[..., first - 32 * before : last - 32 * before].swapaxes(1, 2)
