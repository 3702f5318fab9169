"""`maxlite data`: counts against counts by hand, batches as JSON, the mask as text, and folders of tokens."""

import json
import re
from pathlib import Path

import pytest

from maxlite.config.load import load_config
from maxlite.data.tokenizer_files import write_byte_tokenizer
from maxlite.errors import ConfigError
from maxlite.launcher import data as commands

BOS, EOS = 256, 257
PLAIN = ("dataset_type=jsonl", "eval_fraction=0", "enable_data_shuffling=false", "max_target_length=16")


@pytest.fixture
def write_config(tmp_path):
    """write_config(rows, *keys): the config of a jsonl file, in file order and with nothing held out."""

    def write(rows, *keys):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        given = {key.partition("=")[0] for key in keys}
        plain = [key for key in (*PLAIN, "per_device_batch_size=2") if key.partition("=")[0] not in given]
        return load_config("base.yml", [*plain, f"dataset_path={file}", *keys], {})

    return write


def shown_by(capsys, config, num_batches=0, *, json_output=False, show_mask=False):
    commands.inspect(config, num_batches, json_output=json_output, show_mask=show_mask)
    return capsys.readouterr().out


def test_counts_are_those_of_a_count_by_hand(capsys, write_config):
    # With both marks 5, 22 and 2 tokens: 4, 21 and 1 targets, of which 16 fit into a row.
    rows = [{"text": "abc"}, {"text": "x" * 20}, "broken", {"text": ""}]
    keys = ("bad_rows=skip", "long_documents=truncate", "packing=false")
    lines = dict(
        re.split(r":\s+", line, maxsplit=1) for line in shown_by(capsys, write_config(rows, *keys)).splitlines()
    )
    assert lines["documents"] == "3" and lines["targets"].startswith("20 in 2 windows")
    assert lines["tokens"] == "27" and lines["cut tokens"] == "5" and lines["without a target"] == "1 documents"
    assert lines["rows"] == "2" and lines["packing efficiency"] == "62.5%" and lines["padding"].startswith("37.5%")
    assert lines["skipped rows"].startswith("1, the first ") and "rows.jsonl:3" in lines["skipped rows"]


def test_counts_as_json(capsys, write_config):
    config = write_config([{"text": "abc"}, {"text": "ab"}])
    (line,) = shown_by(capsys, config, json_output=True).splitlines()
    found = json.loads(line)
    assert (found["documents"], found["tokens"], found["targets"], found["rows"]) == (2, 9, 7, 1)
    assert found["padding_share"] == pytest.approx(9 / 16) and found["packing_efficiency"] == pytest.approx(7 / 16)
    assert found["sources"] == ["jsonl"] and found["skipped"] == {"count": 0, "first": None}


def test_batches_as_json(capsys, write_config):
    config = write_config([{"text": "abc"}, {"text": "ab"}, {"text": "c" * 30}], "num_epoch=1", "add_eos=false")
    first, second = (json.loads(line) for line in shown_by(capsys, config, 5, json_output=True).splitlines())
    assert list(first) == ["step", "inputs", "targets", "loss_mask", "positions", "segment_ids"]
    assert (first["step"], second["step"]) == (0, 1)
    a, b, c = b"abc"
    assert first["inputs"][0] == [BOS, a, b, BOS, a] + [0] * 11
    assert first["targets"][0] == [a, b, c, a, b] + [0] * 11
    assert first["loss_mask"][0] == [1] * 5 + [0] * 11
    assert first["positions"][0] == [0, 1, 2, 0, 1] + [0] * 11
    assert first["segment_ids"][0] == [1, 1, 1, 2, 2] + [0] * 11
    assert first["inputs"][1] == [BOS] + [c] * 15 and sum(second["loss_mask"][0]) == 14
    assert second["segment_ids"][1] == [0] * 16


@pytest.fixture
def byte_tokenizer(tmp_path):
    """The override that gives rows of ids the byte tokenizer; without one they have no text."""
    (tmp_path / "bytes").mkdir()
    write_byte_tokenizer(tmp_path / "bytes", add_bos=False)
    return f"tokenizer_path={tmp_path / 'bytes'}"


def test_the_mask_in_brackets(capsys, write_config, byte_tokenizer):
    rows = [{"input_ids": [*b"read", *"größe".encode(), EOS], "loss_mask": [0] * 4 + [1] * 8}]
    rows += [{"input_ids": list(b"a\x1b[2Jb"), "loss_mask": [0, 1, 1, 1, 1, 0]}]
    keys = ("objective=sft", "tokenize_train_data=false", "max_target_length=32", byte_tokenizer)
    shown = shown_by(capsys, write_config(rows, *keys), show_mask=True)
    assert "read{+größe</s>+}\n" in shown and "a{+\\x1b[2J+}b\n" in shown
    assert "--- row 0, segment 1: 11 targets, 8 trained" in shown and "segment 2: 5 targets, 4 trained" in shown
    assert "--- row 0: 16 places of padding" in shown and "--- row 1: 32 places of padding" in shown
    assert "batch 0: 2 rows of 32, 16 targets, 12 of them trained, 75.0% padding" in shown


def test_the_mask_in_colours_on_a_terminal(capsys, write_config, monkeypatch, byte_tokenizer):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    rows = [{"input_ids": list(b"readtrained"), "loss_mask": [0] * 4 + [1] * 7}]
    config = write_config(rows, "objective=sft", "tokenize_train_data=false", byte_tokenizer)
    shown = shown_by(capsys, config, show_mask=True)
    read, trained = re.search(r"\x1b\[([0-9;]+)mread\x1b\[0m\x1b\[([0-9;]+)mtrained\x1b\[0m", shown).groups()
    assert read != trained and "{+" not in shown


def test_marks_are_shown_as_the_tokenizer_writes_them(capsys, write_config):
    stories = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
    config = write_config([{"text": "Once upon a time"}], f"tokenizer_path={stories}", "vocab_size=512")
    assert "<s>{+Once upon a time</s>+}\n" in shown_by(capsys, config, show_mask=True)


def test_random_tokens_are_shown_as_ids(capsys):
    config = load_config("base.yml", ["dataset_type=synthetic", "max_target_length=4", "per_device_batch_size=1"], {})
    shown = shown_by(capsys, config, 1, show_mask=True)
    assert re.search(r"^\d+ \{\+\d+ \d+ \d+ \d+ \+\}$", shown, re.MULTILINE)


def test_a_batch_is_that_of_all_devices(write_config):
    assert commands.global_batch_size(write_config([], "cpu_devices=8")) == 16
    assert commands.global_batch_size(write_config([], "cpu_devices=8", "per_device_batch_size=0.5")) == 4
    with pytest.raises(ConfigError, match="0.5 rows; set cpu_devices"):
        commands.global_batch_size(write_config([], "per_device_batch_size=0.5"))


def test_batches_is_no_key_of_the_config():
    assert commands.take_batches(["steps=3", "batches=2", "dataset_path=batches=7"]) == (
        2,
        ["steps=3", "dataset_path=batches=7"],
    )
    assert commands.take_batches(["steps=3"]) == (0, ["steps=3"])
    for wrong in ("batches=", "batches=-1", "batches=2.5", "batches=many"):
        with pytest.raises(ConfigError, match="not a whole number"):
            commands.take_batches([wrong])


def test_json_and_mask_are_two_things(write_config):
    with pytest.raises(ConfigError, match="--show-mask is for people"):
        commands.inspect(write_config([]), 1, json_output=True, show_mask=True)


def test_a_folder_of_tokens_gives_the_batches_of_its_files(capsys, tmp_path, write_config):
    rows = [{"text": f"document {number}"} for number in range(9)]
    config = write_config(rows, "eval_fraction=0.3", "enable_data_shuffling=true")
    commands.run_tokenize(config, str(tmp_path / "tokens"), 0)
    told = capsys.readouterr().out
    assert f"Train on it: dataset_type=tokenized dataset_path={tmp_path / 'tokens'}" in told
    assert "9 documents, 108 tokens in 1 shards" in told
    keys = ["max_target_length=16", "per_device_batch_size=2", "eval_fraction=0.3"]
    folder = load_config("base.yml", [*keys, "dataset_type=tokenized", f"dataset_path={tmp_path / 'tokens'}"], {})
    shown = [shown_by(capsys, each, 7, json_output=True).splitlines() for each in (config, folder)]
    assert shown[0] == shown[1] and len(shown[0]) == 7


def test_the_commands_need_no_jax(run_maxlite, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n{"text": "more"}\n')
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    keys = [*PLAIN, f"dataset_path={tmp_path / 'rows.jsonl'}", "per_device_batch_size=1"]
    env = {"PYTHONPATH": str(tmp_path)}
    finished = run_maxlite(["data", "inspect", "base.yml", *keys, "batches=1", "--json"], env=env)
    assert finished.code == 0, finished.stderr
    assert len(json.loads(finished.stdout)["inputs"][0]) == 16
    out = str(tmp_path / "out")
    finished = run_maxlite(["data", "tokenize", "base.yml", out, *keys, "--workers", "1"], env=env)
    assert finished.code == 0, finished.stderr
    assert "2 documents, 18 tokens in 1 shards" in finished.stdout
    refused = run_maxlite(["data", "tokenize", "base.yml", out, *keys, "add_eos=false", "--workers=0"], env=env)
    assert refused.code == 2 and "add_eos=true, not add_eos=false" in refused.stderr
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n{"text":\n')
    broken = run_maxlite(["data", "inspect", "base.yml", *keys, "--json"], env=env)
    assert broken.code == 3 and "rows.jsonl:2" in broken.stderr and broken.stdout == ""
