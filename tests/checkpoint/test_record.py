import dataclasses
import json
import math

import pytest

from maxlite.checkpoint.record import Leaf, StepRecord, read_record, record_from_json, write_record

RECORD = StepRecord(
    time=1.5,
    metrics={"eval/avg_loss": 2.25},
    atomicity="rename",
    num_processes=2,
    mesh={"data": 2, "fsdp": 4},
    versions={"jax": "1.2"},
    files={"items/d/0a": (12, None), "iter/metadata": (3, 77)},
    leaves={"params/w": Leaf((2, 3), "bfloat16", 123), "step": Leaf((), "int32", 5)},
)


def test_written_and_read(tmp_path):
    write_record(tmp_path, RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["files.json"]
    assert read_record(tmp_path) == RECORD
    assert record_from_json(json.loads(json.dumps(RECORD.as_json()))) == RECORD


def test_a_metric_may_be_no_number(tmp_path):
    write_record(tmp_path, dataclasses.replace(RECORD, metrics={"loss": math.nan}))
    assert math.isnan(read_record(tmp_path).metrics["loss"])


def test_bytes_and_shapes():
    assert [leaf.num_bytes() for leaf in RECORD.leaves.values()] == [12, 4]
    assert RECORD.shapes() == {"params/w": ((2, 3), "bfloat16"), "step": ((), "int32")}


def test_every_change_is_seen(tmp_path):
    write_record(tmp_path, RECORD)
    path = tmp_path / "files.json"
    text = path.read_text()
    for old, new in [
        ("2.25", "2.26"),
        ("rename", "renamf"),
        ("123", "124"),
        ("null", "1"),
        ('"format": 2', '"format": 3'),
    ]:
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match="checksums differ|format 3 where this maxlite reads 2"):
            read_record(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"checksum": 1, "step": {}}'])
def test_what_is_no_record(tmp_path, content):
    (tmp_path / "files.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError):
        read_record(tmp_path)
