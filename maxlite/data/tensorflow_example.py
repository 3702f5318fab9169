"""The message tf.train.Example: named lists of bytes, floats or whole numbers."""

import struct
from typing import Any

import numpy as np

from maxlite.data.wire_format import read_fields

# Example.features, Features.feature, and key and value of an entry of that map.
FEATURES, FEATURE, KEY, VALUE = 1, 1, 1, 2
# Feature.bytes_list, float_list, int64_list, and the one field of each list.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
LARGEST_NUMBER_BYTES = 10


def parse_example(message: bytes) -> dict[str, Any]:
    """Returns the features: bytes if there is one value of them, else a list of bytes, of floats or of ints.

    Raises ValueError where the bytes are no such message.
    """
    found: dict[str, Any] = {}
    for features in _messages(message, FEATURES):
        for entry in _messages(features, FEATURE):
            parts = dict(read_fields(entry))
            key, value = parts.get(KEY, b""), parts.get(VALUE, b"")
            if not isinstance(key, bytes) or not isinstance(value, bytes):
                raise ValueError("a feature without name and value")
            found[key.decode()] = _feature(value)
    if not found:
        raise ValueError("no features")
    return found


def decode_text(name: str, value: Any) -> Any:
    """Returns `value`, bytes in it as text. Raises ValueError, which tells the `name`, where they are not UTF-8."""
    if isinstance(value, list):
        return [decode_text(name, item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is 0x{value[error.start]:02x}") from error


def _messages(message: bytes, wanted: int) -> list[bytes]:
    found: list[bytes] = []
    for number, content in read_fields(message):
        if number != wanted or not isinstance(content, bytes):
            raise ValueError(f"field {number} is not one of its")
        found.append(content)
    return found


def _feature(message: bytes) -> Any:
    values: list[Any] = []
    kind = BYTES_LIST
    for kind, content in read_fields(message):
        if kind not in (BYTES_LIST, FLOAT_LIST, INT64_LIST) or not isinstance(content, bytes):
            raise ValueError(f"field {kind} is no list of a feature")
        for _, item in read_fields(content):
            if kind == BYTES_LIST or not isinstance(item, bytes):
                # Whole numbers that stand by themselves are read without a sign.
                values.append(item - 2**64 if isinstance(item, int) and item >= 2**63 else item)
            elif kind == FLOAT_LIST:
                values += _floats(item)
            else:
                values += _whole_numbers(item)
    return values[0] if kind == BYTES_LIST and len(values) == 1 else values


def _floats(packed: bytes) -> list[float]:
    if len(packed) % 4:
        raise ValueError("a list of floats is cut short")
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def _whole_numbers(packed: bytes) -> list[int]:
    """Returns what is written 7 bits a byte, the lowest first, with the eighth set on all but a number's last."""
    parts = np.frombuffer(packed, np.uint8)
    if not len(parts):
        return []
    lasts = np.flatnonzero(parts < 0x80)
    starts = np.append(0, lasts + 1)
    if starts[-1] != len(parts) or np.diff(starts).max() > LARGEST_NUMBER_BYTES:
        raise ValueError("a list of whole numbers is cut short or holds one of more than 64 bits")
    places = np.arange(len(parts)) - np.repeat(starts[:-1], np.diff(starts))
    bits = (parts & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts[:-1]).view(np.int64).tolist()
