"""What ends a continuation: the tokenizer's mark and every id that the model's own files name (P43)."""

import json

import pytest

IDS = ("prompt_ids=5,4,3;5,4,3,2,1", "max_new_tokens=12")


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the run, to which files may be added."""
    (tmp_path / "config.yml").write_text((tiny_run / "config.yml").read_text())
    (tmp_path / "checkpoints").symlink_to(tiny_run / "checkpoints")
    (tmp_path / "hugging_face").mkdir()
    return tmp_path


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_any_end_id_of_the_models_files_ends_its_row(folder, decode, file):
    first, second = (row["ids"] for row in decode(folder, *IDS))
    end = second[3]
    assert end not in first
    (folder / "hugging_face" / file).write_text(json.dumps({"eos_token_id": [63, end]}))
    rows = decode(folder, *IDS)
    assert rows[0]["ids"] == first and rows[0]["finish_reason"] == "length"
    assert rows[1]["ids"] == second[: second.index(end)] and rows[1]["finish_reason"] == "eos"
    assert rows[1]["text"] is None
    assert [row["ids"] for row in decode(folder, *IDS, "ignore_eos=true")] == [first, second]
