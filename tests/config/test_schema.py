import dataclasses
import re
from pathlib import Path

import pytest

from maxlite.config.load import load_config
from maxlite.config.schema import KEYS, SECTIONS, Config, ModelConfig

BASE = Path(__file__).parents[2] / "base.yml"
SECTION_LINE = re.compile(r"# --- (\w+)\b.* ---\Z")
KEY_LINE = re.compile(r"(\w+): *([^#]*)(# .+)?\Z")


def base_sections() -> dict[str, list[str]]:
    """Keys under each `# --- section ---` line of base.yml, in order."""
    sections: dict[str, list[str]] = {}
    for line in BASE.read_text().splitlines():
        if match := SECTION_LINE.match(line):
            sections[match[1]] = []
        elif match := KEY_LINE.match(line):
            sections[list(sections)[-1]].append(match[1])
    return sections


def test_base_yml_has_the_sections_and_keys_of_the_schema_in_its_order():
    declared = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in SECTIONS.items()}
    assert base_sections() == declared
    assert list(base_sections()) == list(declared)


def test_every_key_of_base_yml_has_a_comment():
    lines = [line for line in BASE.read_text().splitlines() if KEY_LINE.match(line)]
    uncommented = {KEY_LINE.match(line)[1] for line in lines if not KEY_LINE.match(line)[3]}
    # A family of keys in a row may share the comment of its first.
    assert uncommented <= {
        "dcn_fsdp_parallelism",
        "dcn_tensor_parallelism",
    }
    assert len(BASE.read_text().splitlines()) <= 300


def test_sections_are_frozen_and_have_no_defaults():
    for section in SECTIONS.values():
        assert section.__dataclass_params__.frozen and section.__doc__
        for field in dataclasses.fields(section):
            assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING, field.name
            assert field.metadata["meaning"].endswith("."), field.name
    config = load_config("base.yml", [], {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.emb_dim = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig()  # type: ignore[call-arg]


def test_flat_has_every_key_and_a_source_for_it():
    config = load_config("base.yml", [], {})
    assert isinstance(config, Config)
    assert list(config.flat()) == list(KEYS)
    assert set(config.sources) == set(KEYS)
