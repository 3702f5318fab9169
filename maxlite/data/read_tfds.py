"""Datasets that TensorFlow Datasets prepared, if that package is installed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.packages import load_package
from maxlite.data.remote_files import faults_named
from maxlite.data.rows import BadRow, Row
from maxlite.data.tensorflow_example import decode_text
from maxlite.errors import ConfigError


def read_tfds(data: DataConfig, split: str, paths: tuple[str, ...] | None) -> Iterator[Row | BadRow]:
    """Yields the rows of a split of dataset_name, which lies in the one folder `paths`, or in the package's own.

    Raises ConfigError without the package or a name, DataError if the dataset is not prepared there.
    """
    name = data.dataset_name
    if name is None:
        raise ConfigError("dataset_type=tfds reads a dataset by its name. Set dataset_name, e.g. to lm1b.")
    if paths is not None and len(paths) != 1:
        raise ConfigError(f"dataset_type=tfds takes one folder as dataset_path, not {', '.join(paths)}.")
    package = load_package("tensorflow_datasets", "tfds", "tensorflow-datasets")
    with faults_named(f"tfds dataset {name}, split {split},"):
        source = package.builder(name, data_dir=paths[0] if paths else None).as_data_source(split=split)
        for number in range(len(source)):
            yield _row(
                source[number],
                f"{name}/{split}:{number + 1}",
                f"{name} {split} row {number + 1}",
                data.train_data_columns,
            )


def _row(stored: dict[str, Any], name: str, where: str, columns: tuple[str, ...] | None) -> Row | BadRow:
    wanted = stored if columns is None else columns
    try:
        fields = {key: _plain(key, value) if key in wanted else value for key, value in stored.items()}
    except ValueError as error:
        return BadRow(where, str(error))
    return Row(name, where, fields)


def _plain(key: str, value: Any) -> Any:
    """Returns `value` as Python's own. Raises ValueError where it holds bytes that are not UTF-8."""
    if isinstance(value, dict):
        return {inner: _plain(f"{key}.{inner}", item) for inner, item in value.items()}
    return decode_text(key, value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
