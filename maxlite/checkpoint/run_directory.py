"""The folder of one run: its name, its lock, its saved config."""

import dataclasses
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from maxlite.checkpoint.names import CHECKPOINTS
from maxlite.config.schema import ModelConfig
from maxlite.errors import CheckpointError, ConfigError
from maxlite.processes.group import on_primary

# Beside the model's own keys: these decide which arrays a checkpoint holds, and in which dtype.
_STORED_KEYS = frozenset(f.name for f in dataclasses.fields(ModelConfig)) | {
    "weight_dtype",
    "opt_type",
    "weight_quantization",
    "weight_quant_tile_size",
    "weight_quant_module_path",
    "lora_rank",
    "lora_module_path",
}


class RunDirectory:
    """base_output_directory/run_name, made when it is not there.

    All processes of a run make one and call it alike; process 0 does what is done on disk, and its errors reach all.
    """

    def __init__(self, base_output_directory: str | Path, run_name: str):
        """Makes the folder. Raises ConfigError for a bad name, CheckpointError if it can't be made."""
        check_run_name(run_name)
        self.path = Path(base_output_directory).expanduser().absolute() / run_name
        on_primary("run directory", self._make)
        self.config_path = self.path / "config.yml"
        self.checkpoints = self.path / CHECKPOINTS
        self.metrics = self.path / "metrics"
        self.tensorboard = self.path / "tensorboard"
        self.hlo = self.path / "hlo"
        self.jaxpr = self.path / "jaxpr"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps every other run out of this one; the kernel lets go when process 0 ends, however it ends.

        Raises CheckpointError if another process is in, naming it.
        """
        with ExitStack() as held:
            on_primary("run lock", lambda: held.enter_context(self._locked()))
            yield

    def write_config(self, text: str) -> None:
        """Writes config.yml whole or not at all. Raises CheckpointError if the folder can't be written."""
        on_primary("config.yml", lambda: self._write(text))

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock_path = self.path / ".lock"
        try:
            file = open(lock_path, "a+", encoding="ascii")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise CheckpointError(
                    f"process {holder} is training in {self.path}. Wait for it or stop it, "
                    "or choose another run_name or base_output_directory."
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"{lock_path} can't be locked ({error.strerror}): its file system has no locks. "
                    "Choose a base_output_directory on another one."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _write(self, text: str) -> None:
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.path, encoding="utf-8", delete=False) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, self.config_path)
        except OSError as error:
            raise _unwritable(self.path, error) from error


def check_run_name(run_name: str) -> None:
    """Raises ConfigError unless `run_name` is the name of one folder."""
    if run_name in ("", ".", "..") or any(character in run_name for character in "/\\\0"):
        raise ConfigError(
            f"run_name={run_name!r} must be the name of one folder, without separators; "
            "the place of the runs is base_output_directory"
        )


def check_same_model(
    saved: Mapping[str, Any], present: Mapping[str, Any], run_directory: Path
) -> dict[str, tuple[Any, Any]]:
    """Returns key -> (saved, present) for the keys that differ without harm, like learning_rate.

    Args:
        saved: flat keys of the run's config.yml.
        present: flat keys of the config given now.
        run_directory: named in the message.

    Raises:
        CheckpointError: a key differs that makes it another model or other arrays in the checkpoint.
    """
    shared = [key for key in present if key in saved]
    differing = {key: (saved[key], present[key]) for key in shared if _plain(saved[key]) != _plain(present[key])}
    stored = {key: values for key, values in differing.items() if key in _STORED_KEYS}
    if stored:
        rows = [f"  {key}: {_plain(was)} in the run, {_plain(now)} now" for key, (was, now) in stored.items()]
        raise CheckpointError(
            f"{run_directory} holds the run of another model:\n" + "\n".join(rows) + "\nChoose another run_name, "
            "or set these keys back to go on with that run."
        )
    return differing


def _plain(value: Any) -> Any:
    """YAML has lists where a Config has tuples."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the run directory {folder} can't be written: {error.strerror}. "
        "Choose another base_output_directory, or make it writable."
    )
