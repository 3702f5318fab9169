"""What ends a continuation: the tokenizer's mark and every id that the model's own files name (P43)."""

import json

import pytest

IDS = ("prompt_ids=9,8,7;5,4,3,2,1,11,12,13;17", "max_new_tokens=10")


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the run, to which files may be added."""
    (tmp_path / "config.yml").write_text((tiny_run / "config.yml").read_text())
    (tmp_path / "checkpoints").symlink_to(tiny_run / "checkpoints")
    (tmp_path / "hugging_face").mkdir()
    return tmp_path


def test_any_end_id_of_the_models_files_ends_its_row(tiny_run, folder, decode, decoded):
    """Of each file one id that ends one row, beside one that no row draws."""
    free = [row["ids"] for row in decoded(tiny_run, *IDS)]
    first, second, third = free
    unused = next(token for token in range(64) if token not in [*first, *second, *third])
    expected = [first]
    for name, ids, other in (("config.json", second, third), ("generation_config.json", third, second)):
        end = next(token for token in ids[3:] if token not in [*first, *other])
        (folder / "hugging_face" / name).write_text(json.dumps({"eos_token_id": [unused, end]}))
        expected.append(ids[: ids.index(end)])
    rows = decode(folder, *IDS)
    assert [row["ids"] for row in rows] == expected
    assert [row["finish_reason"] for row in rows] == ["length", "eos", "eos"]
    assert rows[1]["text"] is None
    assert [row["ids"] for row in decode(folder, *IDS, "ignore_eos=true")] == free
