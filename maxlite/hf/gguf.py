"""A GGUF file as a Hugging Face model: what its JSON files would say, and its tensors as floats under their names."""

import functools
import importlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxlite.data.gguf_header import GgufHeader, GgufTensor, read_header
from maxlite.errors import ConversionError
from maxlite.hf.gguf_config import ROPE_FACTORS, architecture_of, generation_config, model_config
from maxlite.hf.source import Respelled, Source, StoredTensor, WholeRows

# The format's numbers for values that are stored as floats.
_FLOATS = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_FLOAT = _FLOATS[0]
_TURNED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_NORM = re.compile(r"(blk\.\d+\.)?\w+_norm\.weight")


def read_json_files(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what config.json and generation_config.json of the model say.

    Raises:
        ConversionError: the file cannot be read, or a key of its metadata cannot be honoured.
    """
    header = read_header(path)
    return model_config(header, GgufSource(header)), generation_config(header)


def open_gguf(path: Path) -> Source:
    """Returns the tensors as a Hugging Face folder of the same model has them, dequantized.

    Raises:
        ConversionError: as read_json_files.
    """
    header = read_header(path)
    source, architecture = GgufSource(header), architecture_of(header)
    head_dim = model_config(header, source)["head_dim"] if architecture.pairs else None
    return Respelled(RestoredSource(source, head_dim, architecture.norm_offset), architecture.spellings)


class GgufSource(WholeRows):
    """The tensors of a GGUF file as floats, under the names and in the layout of llama.cpp."""

    def __init__(self, header: GgufHeader):
        """Checks that all of them are there and can be read.

        Raises:
            ConversionError: the file is truncated, or a tensor is stored in a way that is not known.
        """
        self.place: Path = header.path
        self.tensors: dict[str, StoredTensor] = {}
        self._header = header
        for name, tensor in header.tensors.items():
            block = _block_of(tensor, f"{name} in {header.path}")
            nbytes = math.prod(tensor.shape) // block.values * block.nbytes
            if tensor.offset + nbytes > header.size:
                raise ConversionError(
                    f"{header.path} is truncated: {name} ends at byte {tensor.offset + nbytes}, the file at "
                    f"{header.size}. Fetch it again."
                )
            self.tensors[name] = StoredTensor(tensor.shape, _FLOATS.get(tensor.kind, _FLOAT), nbytes, header.path)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension, read from the file.

        Raises:
            ConversionError: the file has become shorter.
        """
        tensor, about = self._header.tensors[name], self.tensors[name]
        row_bytes = about.nbytes // max(1, tensor.shape[0])
        wanted = (stop - start) * row_bytes
        try:
            stored = np.fromfile(self.place, np.uint8, wanted, offset=tensor.offset + start * row_bytes)
        except OSError as error:
            raise ConversionError(f"{self.place} cannot be read: {error.strerror}") from error
        if stored.size < wanted:
            raise ConversionError(f"{self.place} has become shorter while it was read")
        shape = (stop - start, *tensor.shape[1:])
        if tensor.kind in _FLOATS:
            return stored.view(about.dtype).reshape(shape)
        return _package("gguf.quants", name).dequantize(stored.reshape(*shape[:-1], -1), _kind_of(tensor.kind, name))


class RestoredSource(WholeRows):
    """Undoes what llama.cpp does to weights when it writes them."""

    def __init__(self, source: Source, head_dim: int | None, norm_offset: float):
        """Reads nothing yet.

        head_dim: of models whose queries and keys are written with the two dimensions that rotate together side by
            side; Hugging Face's files have them half a head apart. None for the other models.
        norm_offset: what was added to the scale of every norm.
        """
        self.place = source.place
        self.tensors = {name: tensor for name, tensor in source.tensors.items() if name != ROPE_FACTORS}
        self._source, self._head_dim, self._norm_offset = source, head_dim, np.float32(norm_offset)
        if norm_offset:
            for name, tensor in self.tensors.items():
                if _NORM.fullmatch(name):
                    self.tensors[name] = StoredTensor(tensor.shape, _FLOAT, tensor.nbytes, tensor.file)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension."""
        if self._norm_offset and _NORM.fullmatch(name):
            return self._source.rows(name, start, stop).astype(_FLOAT) - self._norm_offset
        if self._head_dim is None or not _TURNED.fullmatch(name):
            return self._source.rows(name, start, stop)
        width = self._head_dim
        begin, end = start // width * width, -(-stop // width) * width
        heads = self._source.rows(name, begin, end)
        halves = heads.reshape(-1, width // 2, 2, *heads.shape[1:]).swapaxes(1, 2)
        return halves.reshape(heads.shape)[start - begin : stop - begin]


class _Block(NamedTuple):
    """So many values in so many bytes."""

    values: int
    nbytes: int


def _block_of(tensor: GgufTensor, where: str) -> _Block:
    if tensor.kind in _FLOATS:
        return _Block(1, _FLOATS[tensor.kind].itemsize)
    kind = _kind_of(tensor.kind, where)
    block = _Block(*_package("gguf.constants", where).GGML_QUANT_SIZES[kind])
    # A row is read by itself, so no block may reach into the next.
    if len(tensor.shape) < 2 or tensor.shape[-1] % block.values:
        raise ConversionError(f"{where} is {list(tensor.shape)}, which does not go into {kind.name}: it is garbled.")
    return block


@functools.cache
def _kind_of(number: int, where: str) -> Any:
    """Returns the package's name for a way of storing, if the package can read it."""
    constants, quants = _package("gguf.constants", where), _package("gguf.quants", where)
    try:
        kind = constants.GGMLQuantizationType(number)
        quants.dequantize(np.zeros((1, constants.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConversionError(
            f"{where} is stored as type {number}, which the installed gguf package cannot read as floats. Install a "
            "newer one, or take another file of the model."
        ) from error
    return kind


def _package(module: str, where: str) -> Any:
    try:
        # Only quantized files need it, so it is looked for only when there is one.
        return importlib.import_module(module)
    except ImportError as error:
        raise ConversionError(
            f"{where} is quantized, which takes the gguf package: pip install maxlite[gguf]."
        ) from error
