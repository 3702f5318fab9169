"""A package that only some data needs, there or not."""

import json

import pytest

from maxlite.data.packages import load_package
from maxlite.errors import ConfigError


def test_there_or_not() -> None:
    assert load_package("json", "hf", "anything") is json
    with pytest.raises(ConfigError, match="dataset_type=hf takes the package no_such_one, .*: pip install that"):
        load_package("no_such_one.part", "hf", "that")
