"""The wire format of protocol buffers: the fields of one message, without a description of what they are."""

import struct
from collections.abc import Iterator

_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5


def read_fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields number and value of each field: whole numbers, floats of 4 or 8 bytes, and the bytes of all the rest.

    Raises ValueError where the bytes are no message.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _COUNTED:
            size, place = _varint(message, place)
        elif kind in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if kind == _FOUR_BYTES else 8
        else:
            raise ValueError(f"unknown kind {kind} of field {number} at byte {place}")
        content = message[place : place + size]
        place += size
        if number == 0 or len(content) < size:
            raise ValueError(f"field {number} is cut short at byte {len(message)}")
        yield number, content if kind == _COUNTED else struct.unpack("<f" if size == 4 else "<d", content)[0]


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Returns a whole number, 7 bits a byte and the lowest first, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place == len(message):
            raise ValueError(f"a number is cut short at byte {place}")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(f"a number has more than 64 bits at byte {place}")
