"""Files with a JSON object in each line, compressed or not."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from maxlite.data.files import File
from maxlite.data.open_files import open_file
from maxlite.data.rows import BadRow, Row

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(file: File) -> Iterator[Row | BadRow]:
    """Yields each line; those of white space are passed over, but counted. Raises DataError for a broken file.

    A row is named by its line's number.
    """
    with open_file(file.path, unpack=True) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                yield Row(f"{file.name}:{number}", where, parse_object(line.rstrip(b"\r\n")))
            except ValueError as error:
                yield BadRow(where, str(error))


def parse_object(content: bytes) -> dict[str, Any]:
    """Returns the JSON object that `content` is. Raises ValueError with a phrase that says what is wrong.

    Half of a surrogate pair, which JSON can write, stays in the text.
    """
    try:
        found = json.loads(content.decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: byte {error.start + 1} is 0x{content[error.start]:02x}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON at column {error.pos + 1}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f'JSON, but not an object like {{"text": ...}}: {_KINDS[type(found)]}')
    return found


_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is no JSON")
