"""Weights that compressed-tensors keeps in few bits, as floats: a source that shows them under their plain names."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.boxes import Box, whole
from maxlite.hf.compressed_json import Scheme
from maxlite.hf.dequantize import FP8_VALUES
from maxlite.hf.source import Source, StoredTensor, listing

PACKED, SCALE, SHAPE, _ZERO_POINT = "_packed", "_scale", "_shape", "_zero_point"
WORD_BITS = 32
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT = np.dtype(np.float32)
_SCALES = ("float32", "bfloat16", "float16")
_KINDS = {np.dtype(np.int8): "int", _FP8: "float"}

# Packed integers are stored without a sign, the smallest as 0. Of every byte its value, or its two, low bits first.
_BYTES = np.arange(256, dtype=_FLOAT) - 128
_NIBBLES = np.arange(16, dtype=_FLOAT) - 8
_PAIRS = np.stack([np.tile(_NIBBLES, 16), np.repeat(_NIBBLES, 16)], axis=-1).view(np.uint64)[:, 0]


class CompressedSource:
    """`X` [out, in] of int8 or fp8, or `X_packed` of int32, with scales `X_scale`: shown as float32 `X`."""

    def __init__(self, source: Source, schemes: tuple[Scheme, ...]):
        """Pairs weights with their scales.

        schemes: how they may be stored; which way a weight is shows in its shapes.

        Raises:
            ConversionError: lists the weights whose scales are missing or fit none of the schemes.
        """
        self.place: Path = source.place
        self.tensors: dict[str, StoredTensor] = dict(source.tensors)
        self._source, self._schemes = source, dict[str, Scheme]()
        problems = []
        for name, tensor in source.tensors.items():
            plain = name.removesuffix(PACKED)
            if plain == name and (tensor.dtype not in _KINDS or name.endswith(_ZERO_POINT)):
                continue
            parts = [self.tensors.pop(plain + part, None) for part in (PACKED, SCALE, SHAPE, _ZERO_POINT)]
            shape = self._unpacked_shape(plain)
            scheme = None if parts[1] is None else _find_scheme(tensor, parts[1], shape, schemes)
            if scheme is None:
                scale = list(parts[1].shape) if parts[1] else "missing"
                problems.append(f"{name} is {list(tensor.shape)} {tensor.dtype.name}, its {plain + SCALE} {scale}")
                continue
            if parts[3] is not None and self._source.part(plain + _ZERO_POINT, whole(parts[3].shape)).any():
                problems.append(f"{plain + _ZERO_POINT} is not zero everywhere: codes around other values are not read")
            nbytes = tensor.nbytes + (parts[1].nbytes if parts[1] else 0)
            self.tensors[plain] = StoredTensor(shape, _FLOAT, nbytes, tensor.file)
            self._schemes[plain] = scheme
        if problems:
            ways = ", ".join(f"{scheme.bits}-bit {scheme.kind} with scales for {_extent(scheme)}" for scheme in schemes)
            raise ConversionError(
                f"{source.place}: these weights are not stored as quantization_config says, {ways}:\n  "
                + listing(problems)
            )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows start to stop of a tensor, scaled if it is quantized."""
        if name not in self._schemes:
            return self._source.rows(name, start, stop)
        return self.part(name, ((start, stop), (0, self.tensors[name].shape[1])))

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of a tensor, scaled if it is quantized."""
        scheme = self._schemes.get(name)
        if scheme is None:
            return self._source.part(name, box)
        if scheme.packed:
            values = self._unpack(name, box, scheme.bits)
        elif scheme.kind == "float":
            values = np.take(FP8_VALUES, self._source.part(name, box).view(np.uint8), mode="clip")
        else:
            values = self._source.part(name, box).astype(_FLOAT)
        values *= self._scales(name, box, scheme)
        return values

    def _unpack(self, name: str, box: Box, bits: int) -> np.ndarray:
        some_rows, (left, right) = box
        per_word = WORD_BITS // bits
        before = left // per_word
        words = self._source.part(name + PACKED, (some_rows, (before, -(-right // per_word))))
        # The first value is in the lowest bits, and these are in the first byte.
        octets = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
        values = np.take(_BYTES, octets) if bits == 8 else np.take(_PAIRS, octets).view(_FLOAT)
        return values[:, left - before * per_word : right - before * per_word]

    def _scales(self, name: str, box: Box, scheme: Scheme) -> np.ndarray:
        """Returns what to multiply a box with; of one row or column where all have the same."""
        if scheme.rows is None:
            return self._source.part(name + SCALE, ((0, 1),)).astype(_FLOAT)
        shape = self.tensors[name].shape
        sizes = [min(part or size, size) for part, size in zip((scheme.rows, scheme.columns), shape, strict=True)]
        bounds = [(start // part, -(-stop // part)) for (start, stop), part in zip(box, sizes, strict=True)]
        scales = self._source.part(name + SCALE, tuple(bounds)).astype(_FLOAT)
        for axis, ((start, stop), (first, _), part) in enumerate(zip(box, bounds, sizes, strict=True)):
            if scales.shape[axis] > 1 and part > 1:
                scales = np.repeat(scales, part, axis)
                cut = slice(start - first * part, stop - first * part)
                scales = scales[cut] if axis == 0 else scales[:, cut]
        return scales

    def _unpacked_shape(self, plain: str) -> tuple[int, ...]:
        """The shape of a weight's values, as `X_shape` says where they are packed."""
        tensors = self._source.tensors
        if plain in tensors:
            return tensors[plain].shape
        said = tensors.get(plain + SHAPE)
        if said is None or said.shape != (2,):
            return ()
        return tuple(int(size) for size in self._source.part(plain + SHAPE, ((0, 2),)))


def _find_scheme(
    tensor: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], schemes: tuple[Scheme, ...]
) -> Scheme | None:
    """Returns the scheme by which a weight is stored, if any: `tensor` holds its values, `shape` of them."""
    if len(shape) != 2 or len(tensor.shape) != 2:
        return None
    for scheme in schemes:
        if scheme.packed:
            held = tensor.dtype == np.int32 and tensor.shape == packed_shape(shape, scheme.bits)
        else:
            held = _KINDS.get(tensor.dtype) == scheme.kind and tensor.shape == shape
        divided = scheme.rows is not None and scheme.rows > 1 or shape[1] % (scheme.columns or 1) == 0
        if held and divided and scale.shape == scheme.scale_shape(shape) and scale.dtype.name in _SCALES:
            return scheme
    return None


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Returns the shape of the int32 that hold values of so many bits: each row begins a new one."""
    return (*shape[:-1], -(-shape[-1] * bits // WORD_BITS))


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns integers [rows, columns] of so many bits as int32, the first value in the lowest bits."""
    rows, columns = values.shape
    per_word = WORD_BITS // bits
    words = math.ceil(columns / per_word)
    # What the last word has beyond the last value is zero bits.
    octets = np.zeros((rows, words * per_word), np.uint8)
    octets[:, :columns] = values.astype(np.int16) + (1 << bits - 1)
    if bits == 4:
        octets = octets[:, 0::2] | octets[:, 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4")


def _extent(scheme: Scheme) -> str:
    if scheme.rows is None:
        return "all"
    return f"{scheme.rows} x {scheme.columns or 'all'} values"
