"""Sections of base.yml, with changes, for tests of the metrics room."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

_BASE = yaml.safe_load((Path(__file__).parents[2] / "base.yml").read_text())


@pytest.fixture
def section() -> Callable[..., Any]:
    def build(cls: type, **changes: Any) -> Any:
        values = {field.name: _BASE[field.name] for field in dataclasses.fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**(values | lists | changes))

    return build
