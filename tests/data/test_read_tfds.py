"""TensorFlow Datasets, by a stand-in for the package: what it is asked for, and what becomes of its values."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.read_tfds import read_tfds
from maxlite.data.rows import BadRow, Row
from maxlite.errors import ConfigError, DataError

STORED = [
    {"text": b"caf\xc3\xa9", "label": np.int64(3), "ids": np.array([1, 2]), "image": b"\xff"},
    {"text": b"\xff", "turns": {"role": np.array([b"user", b"assistant"], object)}},
    {"text": "plain", "turns": {"role": np.array([b"user", b"assistant"], object)}},
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Puts the stand-in in place; returns what it was asked for."""
    calls: list[tuple[Any, ...]] = []

    def builder(name: str, data_dir: str | None) -> types.SimpleNamespace:
        def as_data_source(split: str) -> list[dict[str, Any]]:
            calls.append((name, data_dir, split))
            if split == "missing":
                raise ValueError("Unknown split 'missing'.")
            return STORED

        return types.SimpleNamespace(as_data_source=as_data_source)

    package = types.ModuleType("tensorflow_datasets")
    package.builder = builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", package)
    return calls


def test_rows(build_data_config: Callable[..., DataConfig], asked: list[tuple[Any, ...]]) -> None:
    data = build_data_config(dataset_type="tfds", dataset_name="small", train_data_columns=("text", "turns"))
    first, bad, last = read_tfds(data, "test", ("/sets",))
    assert asked == [("small", "/sets", "test")]
    assert isinstance(first, Row) and first.name == "small/test:1"
    assert (first.fields["text"], first.fields["image"]) == ("caf\xe9", b"\xff")
    assert bad == BadRow("small test row 2", "text is not UTF-8 text: byte 0 is 0xff")
    assert isinstance(last, Row)
    assert last.fields == {"text": "plain", "turns": {"role": ["user", "assistant"]}}


def test_all_columns(build_data_config: Callable[..., DataConfig], asked: list[tuple[Any, ...]]) -> None:
    first, *_ = read_tfds(build_data_config(dataset_name="small", train_data_columns=None), "train", None)
    assert first == BadRow("small train row 1", "image is not UTF-8 text: byte 0 is 0xff")
    assert asked == [("small", None, "train")]


def test_what_cannot_be_used(build_data_config: Callable[..., DataConfig], asked: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match="tfds dataset small, split missing, cannot be read: Unknown split 'missing'"):
        list(read_tfds(build_data_config(dataset_name="small"), "missing", None))
    with pytest.raises(ConfigError, match="Set dataset_name"):
        list(read_tfds(build_data_config(dataset_name=None), "train", None))
    with pytest.raises(ConfigError, match="takes one folder as dataset_path, not a, b"):
        list(read_tfds(build_data_config(dataset_name="small"), "train", ("a", "b")))


def test_without_the_package(build_data_config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ConfigError, match=r"takes the package tensorflow_datasets, .*pip install tensorflow-datasets"):
        list(read_tfds(build_data_config(dataset_name="small"), "train", None))
