"""Packages that only some kinds of data need, so they are looked for only when such data is read."""

import importlib
from typing import Any

from maxlite.errors import ConfigError


def load_package(module: str, kind: str, install: str) -> Any:
    """Returns `module`. Raises ConfigError that says what to `install` for dataset_type=`kind` if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"dataset_type={kind} takes the package {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install {install}."
        ) from error
