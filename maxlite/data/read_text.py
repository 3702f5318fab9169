"""Files of text: each one row, with the column `text`."""

from collections.abc import Iterator

from maxlite.data.files import File
from maxlite.data.open_files import is_regular, open_file
from maxlite.data.remote_files import faults_named
from maxlite.data.rows import BadRow, Row


def read_text(file: File) -> Iterator[Row | BadRow]:
    """Yields the file as it is, empty or not. Raises DataError if it cannot be read."""
    with faults_named(file.path):
        is_file = is_regular(file.path)
    if not is_file:
        yield BadRow(file.path, "a pipe, a device or a folder, not a file")
        return
    with open_file(file.path) as opened:
        content = opened.read()
    yield _row(file, content)


def _row(file: File, content: bytes) -> Row | BadRow:
    if b"\0" in content:
        return BadRow(file.path, f"not UTF-8 text: byte {content.index(0)} is 0")
    try:
        return Row(file.name, file.path, {"text": content.decode()})
    except UnicodeDecodeError as error:
        return BadRow(file.path, f"not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}")
