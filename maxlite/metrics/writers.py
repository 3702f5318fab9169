"""Writes a run's numbers: `metrics/metrics.jsonl` for programs, `tensorboard/` for eyes."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import text as text_summary

from maxlite.config.schema import MetricsConfig
from maxlite.errors import CheckpointError
from maxlite.metrics.json_lines import JsonLines, writing

_FLUSH_SECONDS = 10.0


class MetricsWriter:
    """Both files of one run, from `start_step` on.

    Rows of steps that will be run again (`start_step` and later) are taken out of the JSONL file, and TensorBoard is
    told to forget them, so that a resumed run shows each step once.
    """

    def __init__(self, run_directory: Path, metrics: MetricsConfig, start_step: int) -> None:
        """Opens the files, repairing what a run that was cut off left behind.

        Raises:
            CheckpointError: a file can't be written, or the JSONL file there isn't one.
        """
        rows = run_directory / "metrics" / "metrics.jsonl"
        with writing(rows):
            _keep_rows_before(rows, start_step)
        self._rows = JsonLines(rows)
        self._events = None
        if metrics.enable_tensorboard:
            try:
                self._events = _EventFile(run_directory / "tensorboard", start_step)
            except CheckpointError:
                self._rows.close()
                raise

    def write(self, step: int, tags: Mapping[str, float]) -> None:
        """Appends one row: the scalars of a step, or of the evaluation after it."""
        self._rows.write({"step": step, **tags})
        if self._events is not None:
            self._events.write_scalars(step, tags)

    def describe_run(self, step: int, config_text: str, num_parameters: int) -> None:
        """Puts the resolved config and the model's size into TensorBoard's text page."""
        if self._events is not None:
            self._events.write_text(step, "config", _as_markdown_code(config_text))
            self._events.write_text(step, "num_model_parameters", str(num_parameters))

    def close(self) -> None:
        """Brings everything to disk and closes the files; a second call does nothing."""
        self._rows.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, also when the run fails: the last rows are those that say why."""
        self.close()


def _keep_rows_before(path: Path, start_step: int) -> None:
    """Rewrites the file, in one move, without rows from `start_step` on and without a last line that was cut off."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = [line for number, line in enumerate(whole, 1) if _row_step(path, number, line) < start_step]
    if len(kept) == len(lines):
        return
    replacement = path.with_name(path.name + ".new")
    with open(replacement, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    replacement.replace(path)


def _row_step(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: line {number} is not a row of metrics (a JSON object with a step). Move the file away; the run "
            "then begins a new one."
        ) from error


class _EventFile:
    """A TensorBoard event file, written in the caller's thread, so that a full disk is an error where it happens."""

    def __init__(self, directory: Path, start_step: int) -> None:
        # TensorBoard reads the files of a folder in the order of their names, and never goes back to an older one.
        self._path = directory / f"events.out.tfevents.{time.time_ns():020d}"
        with writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(str(self._path.absolute()))
        self._is_open = True
        self._flush_at = 0.0
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=start_step, session_log=SessionLog(status=SessionLog.START)))

    def write_scalars(self, step: int, tags: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def write_text(self, step: int, tag: str, text: str) -> None:
        self._write(Event(step=step, summary=text_summary(tag, text)))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with writing(self._path):
                self._flush_then_close()

    def _flush_then_close(self) -> None:
        try:
            self._records.flush()
        finally:
            self._records.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with writing(self._path):
            self._records.write(event.SerializeToString())
            if time.monotonic() >= self._flush_at:
                self._records.flush()
                self._flush_at = time.monotonic() + _FLUSH_SECONDS


def _as_markdown_code(text: str) -> str:
    """Indents by four spaces: TensorBoard shows text as markdown, which would run the lines together."""
    return "\n".join("    " + line for line in text.splitlines())
