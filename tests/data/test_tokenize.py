"""Tokenizing to a folder: the same bytes for any number of processes, and after any end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxlite.config.load import load_config
from maxlite.data import tokenize as module
from maxlite.data.token_folder import TokenFolder, name_hash
from maxlite.data.tokenize import tokenize
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.errors import ConfigError, DataError

VOCAB_SIZE = 258
TEXTS = [f"document {number} " + "äb"[number % 2] * (number * 7 % 40) for number in range(60)]
# Six rows a chunk, so that there are ten shards.
KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from maxlite.config.load import load_config
from maxlite.data import tokenize as module

def report(progress):
    if progress.shards == 3:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    module.CHUNK_ROWS = 6
    data = load_config("base.yml", sys.argv[2:], {}).data
    module.tokenize(data, 258, Path(sys.argv[1]), 2, report)
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 6)


@pytest.fixture
def write_rows(tmp_path):
    """write_rows(lines): the data section of a jsonl file; a line that is no text is written as JSON."""

    def write(lines, *keys, name="rows.jsonl"):
        file = tmp_path / name
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return load_config("base.yml", ["dataset_type=jsonl", f"dataset_path={file}", *keys], {}).data

    return write


def rows_of(texts):
    return [{"text": text} for text in texts]


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def texts_in(folder):
    store = TokenFolder(str(folder))
    tokenizer = ByteTokenizer()
    documents = [store.read(place, 0, int(count)).tokens for place, count in enumerate(store.num_tokens)]
    assert all((tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id) for tokens in documents)
    return [tokenizer.decode(tokens) for tokens in documents]


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, write_rows):
    data = write_rows(rows_of(TEXTS))
    folders = [tmp_path / f"with_{num_workers}" for num_workers in (0, 1, 3)]
    done = [tokenize(data, VOCAB_SIZE, folder, workers) for folder, workers in zip(folders, (0, 1, 3), strict=True)]
    assert contents(folders[0]) == contents(folders[1]) == contents(folders[2])
    assert not any(name.endswith(".part") for name in contents(folders[0]))
    assert done[0] == done[2] and (done[0].shards, done[0].kept_shards, done[0].documents) == (10, 0, 60)
    assert texts_in(folders[0]) == TEXTS
    num_tokens = sum(len(text.encode()) + 2 for text in TEXTS)
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"], manifest["trained"]) == (60, num_tokens, num_tokens)
    assert TokenFolder(str(folders[0])).name_hashes[7] == name_hash("rows.jsonl:8")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_and_its_workers_leave(tmp_path, write_rows, process_environment, workers):
    data = write_rows(rows_of(TEXTS))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tokenize(data, VOCAB_SIZE, whole)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    keys = ["dataset_type=jsonl", f"dataset_path={data.dataset_path[0]}"]
    process = subprocess.run(
        [sys.executable, str(script), str(killed), *keys], env=process_environment, capture_output=True, timeout=120
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (killed / "manifest.json").exists()
    with pytest.raises(DataError, match="not finished"):
        TokenFolder(str(killed))
    deadline = time.monotonic() + 20
    while any(is_alive(int(pid)) for pid in process.stdout.split()):
        assert time.monotonic() < deadline, "a worker waits for a parent that is gone"
        time.sleep(0.05)

    finished = [file for file in killed.glob("*.json") if file.name != "begun.json"]
    before = {file: file.stat().st_mtime_ns for file in finished}
    assert len(before) >= 3
    # Half a shard, as a kill leaves it.
    (killed / "000009.arrayrecord.part").write_bytes(b"half")
    done = tokenize(data, VOCAB_SIZE, killed, workers)
    assert done.kept_shards == len(before) and done.documents == 60
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert contents(killed) == contents(whole)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_finished_folder_is_read_through_and_not_written(tmp_path, write_rows, monkeypatch):
    data = write_rows(rows_of(TEXTS))
    tokenize(data, VOCAB_SIZE, tmp_path / "out")
    monkeypatch.setattr(module, "write_chunk", lambda task: pytest.fail("encoded again"))
    assert tokenize(data, VOCAB_SIZE, tmp_path / "out").kept_shards == 10


def test_a_shard_that_lost_a_file_is_written_anew(tmp_path, write_rows):
    data = write_rows(rows_of(TEXTS))
    tokenize(data, VOCAB_SIZE, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "000004.arrayrecord").unlink()
    assert tokenize(data, VOCAB_SIZE, tmp_path / "out").kept_shards == 9
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([*TEXTS[:20], "another", *TEXTS[21:]], "begun with other data: the rows of shard 000003"),
        (TEXTS[:50], "begun with other data"),
        (TEXTS[:48], "more data than there is now"),
    ],
)
def test_other_data_is_refused(tmp_path, write_rows, texts, words):
    tokenize(write_rows(rows_of(TEXTS)), VOCAB_SIZE, tmp_path / "out")
    with pytest.raises(ConfigError, match=words):
        tokenize(write_rows(rows_of(texts)), VOCAB_SIZE, tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["add_bos=false"], "was begun with add_bos=true, not add_bos=false"),
        (["train_data_columns=text"], "was begun with train_data_columns=None, not train_data_columns=text"),
        (["tokenizer_path=tests/assets/stories260K"], "another tokenizer"),
    ],
)
def test_other_keys_are_refused(tmp_path, write_rows, keys, words):
    tokenize(write_rows(rows_of(TEXTS[:3])), 600, tmp_path / "out")
    with pytest.raises(ConfigError, match=words):
        tokenize(write_rows(rows_of(TEXTS[:3]), *keys), 600, tmp_path / "out")


def test_keys_that_change_no_token_may_differ(tmp_path, write_rows):
    data = write_rows(rows_of(TEXTS))
    tokenize(data, VOCAB_SIZE, tmp_path / "out")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    Path(data.dataset_path[0]).rename(moved / "rows.jsonl")
    changes = {"max_target_length": 9, "packing": False, "bad_rows": "skip", "eval_fraction": 0.3}
    other = dataclasses.replace(data, dataset_path=(str(moved / "rows.jsonl"),), **changes)
    assert tokenize(other, VOCAB_SIZE, tmp_path / "out").kept_shards == 10


def test_other_files_and_another_vocabulary_are_refused(tmp_path, write_rows):
    tokenize(write_rows(rows_of(TEXTS[:3])), VOCAB_SIZE, tmp_path / "out")
    with pytest.raises(ConfigError, match="begun with other files"):
        tokenize(write_rows(rows_of(TEXTS[:3]), name="others.jsonl"), VOCAB_SIZE, tmp_path / "out")
    with pytest.raises(ConfigError, match="another size of vocabulary"):
        tokenize(write_rows(rows_of(TEXTS[:3])), 100_000, tmp_path / "out")


def test_a_folder_with_other_files_is_left_alone(tmp_path, write_rows):
    data = write_rows(rows_of(TEXTS[:3]))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="holds other files"):
        tokenize(data, VOCAB_SIZE, tmp_path)
    assert contents(tmp_path) == before


BAD = [*rows_of(TEXTS[:8]), "{broken", *rows_of(TEXTS[8:10]), {"text": 5}, {"other": "x"}, *rows_of(TEXTS[10:20])]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_stops_at_file_and_line_and_the_run_goes_on_when_it_is_mended(tmp_path, write_rows, workers):
    data = write_rows(BAD)
    with pytest.raises(DataError, match=r"rows\.jsonl:9: .*bad_rows=skip"):
        tokenize(data, VOCAB_SIZE, tmp_path / "out", workers)
    assert not (tmp_path / "out" / "manifest.json").exists()
    skipping = dataclasses.replace(data, bad_rows="skip")
    done = tokenize(skipping, VOCAB_SIZE, tmp_path / "out", workers)
    assert done.kept_shards >= 1 and (done.documents, done.skipped) == (20, 3)
    assert done.first_skipped is not None and "rows.jsonl:9: " in done.first_skipped
    assert texts_in(tmp_path / "out") == TEXTS[:20]
    folder = TokenFolder(str(tmp_path / "out"))
    assert (folder.num_skipped, folder.first_skipped) == (3, done.first_skipped)
    # Rows that were left out are an error again where they have to be.
    with pytest.raises(DataError, match=r"rows\.jsonl:9: "):
        tokenize(data, VOCAB_SIZE, tmp_path / "out", workers)


@pytest.mark.parametrize("lines", [[], ["{broken", "[1]"]])
def test_no_document_is_no_folder(tmp_path, write_rows, lines):
    with pytest.raises(DataError, match="holds no document"):
        tokenize(write_rows(lines, "bad_rows=skip"), VOCAB_SIZE, tmp_path / "out")
    with pytest.raises(DataError, match="not finished"):
        TokenFolder(str(tmp_path / "out"))


def test_masks_and_ids_of_rows(tmp_path, write_rows):
    lines = [{"input_ids": [3, 9, 4], "loss_mask": [0, 1, 1]}, {"input_ids": [5, 6], "loss_mask": [1, 1]}]
    data = write_rows(lines, "objective=sft", "tokenize_train_data=false")
    tokenize(data, 10, tmp_path / "out")
    folder = TokenFolder(str(tmp_path / "out"))
    assert folder.tokenizer_digest is None and folder.largest_id == 9
    assert folder.num_trained is not None and folder.num_trained.tolist() == [2, 2]
    tokens, trained = folder.read(0, 0, 3)
    assert (tokens.tolist(), trained.tolist()) == ([3, 9, 4], [False, True, True])


@pytest.mark.parametrize("keys", [["dataset_type=tokenized", "dataset_path=x"], ["dataset_type=synthetic"]])
def test_what_is_tokens_already_is_refused(tmp_path, keys):
    data = load_config("base.yml", keys, {}).data
    with pytest.raises(ConfigError, match="holds tokens already"):
        tokenize(data, VOCAB_SIZE, tmp_path / "out")


def test_a_mixture_is_refused(tmp_path):
    data = load_config("base.yml", ["dataset_mixture=[{path: a.txt, weight: 1}, {path: b.txt, weight: 1}]"], {}).data
    with pytest.raises(ConfigError, match="give each of dataset_mixture"):
        tokenize(data, VOCAB_SIZE, tmp_path / "out")


def test_one_process_writes_at_a_time(tmp_path, write_rows):
    data = write_rows(rows_of(TEXTS[:3]))
    seen = []

    def again(progress):
        with pytest.raises(DataError, match="Another process writes"):
            tokenize(data, VOCAB_SIZE, tmp_path / "out")
        seen.append(progress)

    tokenize(data, VOCAB_SIZE, tmp_path / "out", report=again)
    assert len(seen) == 1


def test_a_worker_that_is_killed_is_one_error(tmp_path, write_rows):
    def kill(progress):
        for pid in workers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(DataError, match="ended from outside"):
        tokenize(write_rows(rows_of(TEXTS * 5)), VOCAB_SIZE, tmp_path / "out", 1, kill)


def workers_of(pid):
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"spawn_main" in command:
            yield int(stat.parent.name)
