"""The config of the `eval` command, read before jax is loaded."""

from collections.abc import Sequence
from pathlib import Path

from maxlite.config.schema import Config
from maxlite.hf.run_files import run_of
from maxlite.launcher.resolve import resolve_config


def resolve_evaluation(source: str, overrides: Sequence[str]) -> Config:
    """Returns the config of a YAML file, a Hugging Face folder, a run, or a run and one of its checkpoints.

    Raises:
        ConfigError, ConversionError: as resolve_config.
    """
    run = run_of(Path(source))
    if run != Path(source).expanduser().absolute() and (run / "config.yml").is_file():
        return resolve_config(str(run), [f"load_parameters_path={source}", *overrides])
    return resolve_config(source, overrides)
