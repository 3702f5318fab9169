"""Headers written byte by byte, as the format describes them: what is read, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import pytest

from maxlite.data.gguf_header import is_gguf, read_header
from maxlite.errors import ConversionError

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: Any, inner: int | None = None) -> bytes:
    """One key of the metadata; inner: the type of the entries of a list (9)."""
    found = text(key) + struct.pack("<I", kind)
    if inner is not None:
        parts = [text(one) if inner == 8 else struct.pack(f"<{FORMATS[inner]}", one) for one in value]
        return found + struct.pack("<IQ", inner, len(parts)) + b"".join(parts)
    return found + (text(value) if kind == 8 else struct.pack(f"<{FORMATS[kind]}", value))


def tensor(name: str, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    count = len(dimensions)
    return text(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, kind, offset)


def write(file: Path, entries: list[bytes], tensors: list[bytes] = (), version: int = 3) -> Path:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    file.write_bytes(start + b"".join([*entries, *tensors]))
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(tmp_path, version):
    numbers = {0: 200, 1: -3, 2: 60000, 3: -9, 4: 4000000000, 5: -7, 7: True, 10: 1 << 40, 11: -(1 << 40), 12: 0.1}
    entries = [entry(f"number {kind}", kind, value) for kind, value in numbers.items()]
    lists = [entry("words", 9, ["a", "\u2581é", ""], 8), entry("list", 9, [1, 2, 3], 5), entry("none", 9, [], 8)]
    header = read_header(write(tmp_path / "a.gguf", [*entries, *lists, entry("word", 8, "Ġ\n")], version=version))
    assert header.metadata == {
        **{f"number {kind}": value for kind, value in numbers.items()},
        "words": ["a", "\u2581é", ""],
        "list": [1, 2, 3],
        "none": [],
        "word": "Ġ\n",
    }
    assert header.size == (tmp_path / "a.gguf").stat().st_size


def test_a_short_number_is_the_decimal_that_was_meant(tmp_path):
    """As in config.json, and not the 9.999999747378752e-06 that 32 bits hold."""
    header = read_header(write(tmp_path / "a.gguf", [entry("epsilon", 6, 1e-5), entry("base", 6, 1e6)]))
    assert header.metadata == {"epsilon": 1e-5, "base": 1e6}


@pytest.mark.parametrize(("entries", "alignment"), [([], 32), ([entry("general.alignment", 4, 64)], 64)])
def test_tensors(tmp_path, entries, alignment):
    """Dimensions are in the file last first, and offsets count from where the tensors begin."""
    tensors = [tensor("table", (8, 5)), tensor("norm", (8,), 1, 160), tensor("experts", (2, 3, 4), 8, 192)]
    header = read_header(write(tmp_path / "a.gguf", entries, tensors))
    start = -(-header.size // alignment) * alignment
    found = {name: (one.shape, one.kind, one.offset - start) for name, one in header.tensors.items()}
    assert found == {"table": ((5, 8), 0, 0), "norm": ((8,), 1, 160), "experts": ((4, 3, 2), 8, 192)}


def test_a_file_that_changes_is_read_again(tmp_path):
    file = write(tmp_path / "a.gguf", [entry("key", 4, 1)])
    assert read_header(file) is read_header(str(file))
    assert read_header(write(file, [entry("key", 4, 2), entry("more", 4, 2)])).metadata["key"] == 2


@pytest.mark.parametrize(
    ("entries", "tensors", "message"),
    [
        ([entry("a", 4, 1), entry("a", 4, 1)], [], "garbled .a twice"),
        ([], [tensor("t", (1,)), tensor("t", (1,))], "garbled .t twice"),
        ([text("a") + struct.pack("<I", 13)], [], "garbled .a value of type 13"),
        ([text("a") + struct.pack("<IIQ", 9, 9, 1)], [], "garbled .a value of type 9"),
        ([], [tensor("t", (1,) * 5)], "garbled .a tensor of 5 dimensions"),
        ([entry("general.alignment", 4, 0)], [], "garbled .general.alignment=0"),
        ([text("a") + struct.pack("<IQ", 8, 1 << 60)], [], "truncated: its header does not end"),
        ([text("a") + struct.pack("<IIQ", 9, 4, 1 << 60)], [], "truncated: its header does not end"),
    ],
)
def test_garbled_headers(tmp_path, entries, tensors, message):
    file = write(tmp_path / "a.gguf", entries, tensors)
    with pytest.raises(ConversionError, match=message):
        read_header(file)


def test_headers_that_are_no_text(tmp_path):
    file = write(tmp_path / "a.gguf", [struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)])
    with pytest.raises(ConversionError, match="garbled"):
        read_header(file)


@pytest.mark.parametrize("version", [1, 3 << 24])
def test_versions_that_are_not_known(tmp_path, version):
    """Version 1, and 3 of the other byte order."""
    file = write(tmp_path / "a.gguf", [], version=version)
    with pytest.raises(ConversionError, match=f"of GGUF version {version}; known are 2 and 3, little-endian"):
        read_header(file)


def test_names(tmp_path):
    """A run may be called after the file that it was made of."""
    (tmp_path / "run.gguf").mkdir()
    assert is_gguf(tmp_path / "model.gguf") and is_gguf("model.Q4_0.gguf")
    assert not is_gguf(tmp_path / "run.gguf") and not is_gguf("model.safetensors")
