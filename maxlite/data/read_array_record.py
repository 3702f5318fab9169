"""ArrayRecord files of which each record is a JSON object or a tf.train.Example."""

from collections.abc import Iterator, Sequence
from typing import Any

from maxlite.data.files import File
from maxlite.data.open_files import is_regular, local_copy
from maxlite.data.packages import load_package
from maxlite.data.read_jsonl import parse_object
from maxlite.data.remote_files import faults_named
from maxlite.data.rows import BadRow, Row
from maxlite.data.tensorflow_example import decode_text, parse_example
from maxlite.errors import DataError

BATCH_RECORDS = 256


def read_array_record(file: File, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    """Yields the records, of which the features among `columns` (None = all) must be text where they are bytes.

    Raises DataError if the file is broken.
    """
    module = load_package("array_record.python.array_record_module", "arrayrecord", "array_record")
    with faults_named(file.path), local_copy(file.path) as path:
        if not is_regular(path):
            raise DataError(f"{file.path} is a pipe, a device or a folder, not a file. Give a file.")
        with open(path, "rb"):  # Says why it cannot, which the package does not.
            reader = module.ArrayRecordReader(path)
        # One that failed is not closed, as that would raise the failure again, in place of the first.
        if not reader.ok():
            raise DataError(f"{file.path} is no ArrayRecord file, or cut short. Write or fetch it anew.")
        for start in range(0, reader.num_records(), BATCH_RECORDS):
            records = reader.read(start, min(start + BATCH_RECORDS, reader.num_records()))
            for number, record in enumerate(records, start + 1):
                yield _row(record, f"{file.name}:{number}", f"{file.path} row {number}", columns)
        reader.close()


def _row(record: bytes, name: str, where: str, columns: Sequence[str] | None) -> Row | BadRow:
    try:
        # No Example begins with a brace, as that would be a field that it does not have.
        return Row(name, where, parse_object(record) if record.startswith(b"{") else _fields(record, columns))
    except ValueError as error:
        return BadRow(where, str(error))


def _fields(record: bytes, columns: Sequence[str] | None) -> dict[str, Any]:
    try:
        features = parse_example(record)
    except ValueError as error:
        raise ValueError(f"neither a JSON object nor a tf.train.Example: {error}") from error
    wanted = features if columns is None else columns
    return {name: decode_text(name, value) if name in wanted else value for name, value in features.items()}
