import json
import math
import resource
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maxlite.config.schema import MetricsConfig
from maxlite.errors import CheckpointError
from maxlite.metrics.writers import MetricsWriter


@pytest.fixture
def metrics(section):
    return section(MetricsConfig)


def rows(run_directory):
    return [json.loads(line) for line in (run_directory / "metrics" / "metrics.jsonl").read_text().splitlines()]


def events(run_directory):
    reader = EventAccumulator(str(run_directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return reader.Reload()


def write_steps(run_directory, metrics, steps, scale=1.0):
    with MetricsWriter(run_directory, metrics, start_step=steps[0]) as writer:
        for step in steps:
            writer.write(step, {"learning/loss": scale * step, "perf/mfu": 0.5})


def test_tensorboard_reads_the_scalars(tmp_path, metrics):
    threads = threading.active_count()
    with MetricsWriter(tmp_path, metrics, start_step=0) as writer:
        writer.write(0, {"learning/loss": 5.25, "learning/perplexity": math.inf})
        writer.write(1, {"learning/loss": 4.5, "learning/perplexity": 90.0})
        writer.write(1, {"eval/avg_loss": 4.75})
        assert threading.active_count() == threads

    reader = events(tmp_path)
    assert [(event.step, event.value) for event in reader.Scalars("learning/loss")] == [(0, 5.25), (1, 4.5)]
    assert [(event.step, event.value) for event in reader.Scalars("eval/avg_loss")] == [(1, 4.75)]
    assert [event.value for event in reader.Scalars("learning/perplexity")] == [math.inf, 90.0]


def test_tensorboard_reads_the_texts(tmp_path, metrics):
    with MetricsWriter(tmp_path, metrics, start_step=0) as writer:
        writer.describe_run(0, "steps: 3\nmodel: default\n", 1234)

    texts = events(tmp_path)
    assert texts.Tensors("config/text_summary")[0].tensor_proto.string_val == [b"    steps: 3\n    model: default"]
    assert texts.Tensors("num_model_parameters/text_summary")[0].tensor_proto.string_val == [b"1234"]


def test_rows_are_in_the_file_at_once(tmp_path, metrics):
    writer = MetricsWriter(tmp_path, metrics, start_step=0)
    writer.write(0, {"learning/loss": 1.5})

    assert rows(tmp_path) == [{"step": 0, "learning/loss": 1.5}]
    writer.close()
    writer.close()


def test_rows_survive_a_crash_of_the_loop(tmp_path, metrics):
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, metrics, start_step=0) as writer:
        writer.write(0, {"learning/loss": math.nan})
        raise ZeroDivisionError

    assert math.isnan(rows(tmp_path)[0]["learning/loss"])
    assert math.isnan(events(tmp_path).Scalars("learning/loss")[0].value)


def test_a_resumed_run_shows_each_step_once(tmp_path, metrics):
    write_steps(tmp_path, metrics, range(0, 5))
    write_steps(tmp_path, metrics, range(3, 7), scale=10.0)

    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [(row["step"], row["learning/loss"]) for row in rows(tmp_path)] == expected
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("learning/loss")] == expected


def test_a_run_that_begins_again_shows_no_old_step(tmp_path, metrics):
    write_steps(tmp_path, metrics, range(0, 4))
    write_steps(tmp_path, metrics, range(0, 2), scale=10.0)

    assert [row["learning/loss"] for row in rows(tmp_path)] == [0.0, 10.0]
    assert [event.value for event in events(tmp_path).Scalars("learning/loss")] == [0.0, 10.0]


def test_a_row_that_was_cut_off_is_dropped(tmp_path, metrics):
    write_steps(tmp_path, metrics, range(0, 2))
    path = tmp_path / "metrics" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2, "learn')
    write_steps(tmp_path, metrics, range(2, 3))

    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_file_of_something_else_is_left_alone(tmp_path, metrics):
    path = tmp_path / "metrics" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 0}\nshopping list\n')

    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 2 is not a row"):
        MetricsWriter(tmp_path, metrics, start_step=1)
    assert path.read_text().endswith("shopping list\n")


def test_tensorboard_can_be_turned_off(tmp_path, section):
    with MetricsWriter(tmp_path, section(MetricsConfig, enable_tensorboard=False), start_step=0) as writer:
        writer.describe_run(0, "steps: 3", 1)
        writer.write(0, {"learning/loss": 1.0})

    assert len(rows(tmp_path)) == 1
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("folder", ["metrics", "tensorboard"])
def test_a_folder_that_cannot_be_made(tmp_path, metrics, folder):
    (tmp_path / folder).write_text("in the way")

    with pytest.raises(CheckpointError, match=f"{tmp_path / folder}.*can't be written: (File exists|Not a dir)"):
        MetricsWriter(tmp_path, metrics, start_step=0)


def test_a_full_disk_names_path_and_reason(tmp_path, metrics):
    """The largest size of a file stands in for the disk's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = MetricsWriter(tmp_path, metrics, start_step=0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl can't be written: File too large"):
            for step in range(100):
                writer.write(step, {"learning/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.close()


def test_a_disk_full_for_events_alone_closes_all_files(tmp_path, metrics):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = MetricsWriter(tmp_path, metrics, start_step=0)
    writer.describe_run(0, "long: " + 2000 * "x", 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(CheckpointError, match=r"tfevents\.\d+ can't be written: File too large"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
