import json

import pytest

from maxlite.errors import CheckpointError
from maxlite.metrics.events import BEGIN, END, START, STEP, Event, EventLog, read_events

EVENTS = (
    Event(START, 100.0),
    Event(BEGIN, 102.5, {"init": 2.0, "restore": 0.5}, step=7),
    Event(STEP, 103.0000004, {"step": 0.4000004, "data_wait": 0.1}, step=7),
    Event("save", 104.0, {"save": 1.0}),
    Event(END, 104.0, finished=True),
)


def written(path, events=EVENTS):
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()
    return path


def test_events_are_read_as_they_were_written(tmp_path):
    path = written(tmp_path / "metrics" / "events.jsonl")
    read = list(read_events(path))
    assert read == [*EVENTS[:2], Event(STEP, 103.0, {"step": 0.4, "data_wait": 0.1}, step=7), *EVENTS[3:]]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1] == {"event": "begin", "time": 102.5, "spent": {"init": 2.0, "restore": 0.5}, "step": 7}
    assert rows[-1] == {"event": "end", "time": 104.0, "spent": {}, "finished": True}


def test_events_are_appended_and_never_rewritten(tmp_path):
    path = written(tmp_path / "events.jsonl")
    before = path.read_bytes()
    written(path, [Event(START, 200.0)])
    assert path.read_bytes().startswith(before)
    assert list(read_events(path))[-1] == Event(START, 200.0)


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_last_line_that_was_cut_off_is_taken_out(tmp_path, cut):
    path = written(tmp_path / "events.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert len(list(read_events(path))) == 4
    assert list(written(path, [Event(START, 200.0)]).read_bytes().splitlines())[:-1] == whole.splitlines()[:-1]
    assert [event.kind for event in read_events(path)] == ["start", "begin", "step", "save", "start"]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        '"text"',
        '{"event": "start"}',
        '{"event": "nap", "time": 1.0, "spent": {}}',
        '{"event": "save", "time": 1.0, "spent": {"sleep": 1.0}}',
        '{"event": "save", "time": 1.0, "spent": {"down": 1.0}}',
        '{"event": "save", "time": 1.0, "spent": [1.0]}',
        '{"event": "step", "time": 1.0, "spent": {}}',
        '{"event": "end", "time": 1.0, "spent": {}}',
        '{"event": "save", "time": "noon", "spent": {}}',
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    path = written(tmp_path / "events.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CheckpointError, match=r"events\.jsonl: line 6 is not an event of a run\. Move the file away"):
        list(read_events(path))


def test_no_file_is_no_events(tmp_path):
    assert list(read_events(tmp_path / "events.jsonl")) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"events\.jsonl can't be read: Is a directory"):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "metrics").write_text("")
    with pytest.raises(CheckpointError, match=r"events\.jsonl can't be written: File exists"):
        EventLog(tmp_path / "metrics" / "events.jsonl")
