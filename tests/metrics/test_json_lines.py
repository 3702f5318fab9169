import json
import os
import resource
from contextlib import closing

import pytest

from maxlite.errors import CheckpointError
from maxlite.metrics.json_lines import JsonLines, writing


def test_lines_are_in_the_file_at_once_and_after_those_that_were_there(tmp_path):
    path = tmp_path / "folder" / "rows.jsonl"
    first = JsonLines(path)
    first.write({"step": 0, "loss": float("nan")})
    assert path.read_bytes() == b'{"step": 0, "loss": NaN}\n'
    first.close()
    first.close()
    with closing(JsonLines(path)) as second:
        second.write({"step": 1})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_each_line_is_one_call_to_the_system(tmp_path, monkeypatch):
    written = []

    class File:
        def write(self, line):
            written.append(bytes(line))
            return len(line)

        def close(self):
            pass

    with closing(JsonLines(tmp_path / "rows.jsonl")) as lines:
        lines._file.close()
        monkeypatch.setattr(lines, "_file", File())
        lines.write({"text": "x" * 100_000})
    assert written == [b'{"text": "' + b"x" * 100_000 + b'"}\n']


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path), before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rows\.jsonl can't be written: File too large"):
            lines.write({"step": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        lines.close()


def test_what_is_no_matter_of_the_system_passes_through(tmp_path):
    with pytest.raises(ValueError, match="mine"), writing(tmp_path):
        raise ValueError("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        JsonLines(_file(tmp_path / "file") / "rows.jsonl")


def _file(path):
    path.write_text("")
    return path
