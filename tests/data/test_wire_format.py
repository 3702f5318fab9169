"""Fields of messages whose bytes the format's documentation spells out, and bytes that are no message."""

import pytest

from maxlite.data.wire_format import read_fields


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (b"", []),
        (b"\x08\x96\x01", [(1, 150)]),
        (b"\x12\x07testing", [(2, b"testing")]),
        (b"\x1a\x03\x08\x96\x01", [(3, b"\x08\x96\x01")]),
        (b"\x15\x00\x00\x80\xbf\x08\x01", [(2, -1.0), (1, 1)]),
        (b"\x09" + b"\x00" * 6 + b"\xf0\x3f", [(1, 1.0)]),
        (b"\xca\x02\x00", [(41, b"")]),
        (b"\x08" + b"\xff" * 9 + b"\x01", [(1, 2**64 - 1)]),
    ],
)
def test_fields(message, fields):
    assert list(read_fields(message)) == fields


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"\x08", "cut short at byte 1"),
        (b"\x08\x96", "cut short at byte 2"),
        (b"\x12\x07test", "field 2 is cut short"),
        (b"\x15\x00\x00", "field 2 is cut short"),
        (b"\x02\x01a", "field 0"),
        (b"\x0b", "unknown kind 3 of field 1"),
        (b"\x08" + b"\xff" * 10, "more than 64 bits"),
    ],
)
def test_what_is_no_message(message, problem):
    with pytest.raises(ValueError, match=problem):
        list(read_fields(message))
