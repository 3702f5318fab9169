"""A data section with base.yml's values, and small folders of documents."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from maxlite.config.schema import DataConfig


@pytest.fixture
def build_data_config() -> Callable[..., DataConfig]:
    """Returns a function from changes to a data section; rows of 32 tokens, nothing held out."""
    plain = DataConfig(
        dataset_type="text",
        dataset_path=None,
        eval_dataset_path=None,
        eval_fraction=0.0,
        max_target_length=32,
        per_device_batch_size=1.0,
        packing=True,
        long_documents="split",
        add_bos=True,
        add_eos=True,
        enable_data_shuffling=True,
        data_shuffle_seed=0,
        num_epoch=None,
    )
    return lambda **changes: dataclasses.replace(plain, **changes)


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[[Mapping[str, str | bytes]], str]:
    """Returns a function that writes name -> content below a folder and returns the folder."""

    def write(contents: Mapping[str, str | bytes], folder: str = "documents") -> str:
        for name, content in contents.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / folder)

    return write
