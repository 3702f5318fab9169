import os
import re

import pytest

from maxlite.config.yaml_file import MAX_BYTES, Entry, read_yaml
from maxlite.errors import ConfigError


def read(tmp_path, text):
    file = tmp_path / "a.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file, "a.yml")


def test_values_lines_and_spellings(tmp_path):
    entries, problems = read(tmp_path, "# a comment\nsteps: 5\nrun_name: 007\n\ndataset_path:\n  - a\n  - b\nprompt:\n")
    assert problems == []
    assert entries["steps"] == Entry(5, "a.yml:2", "5")
    assert entries["run_name"].text == "007"
    assert entries["dataset_path"] == Entry(["a", "b"], "a.yml:5", None)
    assert entries["prompt"].value is None


def test_empty_file_sets_nothing(tmp_path):
    assert read(tmp_path, "") == ({}, [])
    assert read(tmp_path, "# nothing\n") == ({}, [])


def test_duplicate_key_names_both_lines(tmp_path):
    _, problems = read(tmp_path, "steps: 1\nlog_period: 2\nsteps: 3\n")
    assert problems == ["a.yml: steps is set twice, in lines 1 and 3; keep one."]


@pytest.mark.parametrize("text", ["true: 3\n", "0x10: 1\n", "null: 1\n", "? [a, b]\n: c\n", "<<: {a: 1}\n"])
def test_key_that_is_no_word(tmp_path, text):
    _, problems = read(tmp_path, text)
    assert problems == ["a.yml:1: expected `key: value`, where the key is a word."]


LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "a.yml:2: YAML aliases"),
        ("a: !!python/object/apply:os.system ['echo']\n", "a.yml:1: YAML tags .*os.system"),
        ("a: !!python/name:os.system\n", "a.yml:1: YAML tags"),
        ("- a\n", "expected lines of `key: value`"),
        ("word\n", "expected lines of `key: value`"),
        ("a: [1\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: ${b\n", "not valid YAML"),
        (b"\x00\xff\xfe\x01", "cannot be read as YAML text"),
        ("a: " + "[" * 500 + "]" * 500, "nested too deeply"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply|maximum nesting depth"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: 1\n" * (MAX_BYTES // 4), "larger than 1048576 bytes"),
    ],
)
def test_yaml_from_a_stranger(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_a_tag_runs_nothing(tmp_path):
    with pytest.raises(ConfigError):
        read(tmp_path, f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")
    assert not (tmp_path / "made").exists()


def test_the_environment_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    entries, _ = read(tmp_path, "run_name: ${oc.env:SECRET}\n")
    assert entries["run_name"].value == "${oc.env:SECRET}"


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("a.yml: cannot be read")):
        read_yaml(tmp_path / "a.yml", "a.yml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    (tmp_path / "a.yml").write_text("steps: 1\n")
    (tmp_path / "a.yml").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "a.yml", "a.yml")
