"""Folders of tokens, read back against plain lists of what was written."""

import json
import threading

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxlite.data import token_folder, token_shards
from maxlite.data.rows import Example
from maxlite.data.token_folder import TokenFolder, name_hash
from maxlite.data.token_shards import write_shard
from maxlite.data.token_store import MemoryTokens, Span
from maxlite.errors import DataError

LENGTHS = [5, 1, 0, 40, 16, 17, 33, 2]


@pytest.fixture(autouse=True)
def short_records(monkeypatch):
    for module in (token_shards, token_folder):
        monkeypatch.setattr(module, "RECORD_TOKENS", 16)


def make_examples(masked, vocab_size=60_000):
    generator = np.random.default_rng(0)
    examples = [Example(generator.integers(vocab_size, size=n, dtype=np.int32), None) for n in LENGTHS]
    if masked:
        examples = [Example(tokens, generator.random(len(tokens)) < 0.5) for tokens, _ in examples]
        examples[3].trained[:16] = True
        examples[6] = Example(examples[6].tokens, None)
    return examples


def write_folder(folder, examples, *, per_shard=3, token_bytes=2):
    shards = []
    for number, first in enumerate(range(0, len(examples), per_shard)):
        part = examples[first : first + per_shard]
        documents = [(name_hash(f"row {first + place}"), example) for place, example in enumerate(part)]
        shards.append((f"{number:06d}", write_shard(folder / f"{number:06d}", documents, token_bytes)))
    manifest = {
        "format": 1,
        "token_bytes": token_bytes,
        "tokenizer": "a digest",
        "digest": ",".join(content.digest for _, content in shards),
        "largest_id": max(content.largest_id for _, content in shards),
        "skipped": 1,
        "first_skipped": "a.jsonl:3: broken JSON",
        "shards": [{"name": name, "documents": content.documents} for name, content in shards],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return TokenFolder(str(folder))


def every_span():
    return [
        Span(document, start, stop)
        for document, length in enumerate(LENGTHS)
        for start in range(length + 1)
        for stop in range(start, length + 1)
    ]


@pytest.mark.parametrize(("masked", "token_bytes"), [(False, 2), (True, 2), (True, 4)])
def test_every_span_of_every_document(tmp_path, masked, token_bytes):
    examples = make_examples(masked, 60_000 if token_bytes == 2 else 200_000)
    folder = write_folder(tmp_path, examples, token_bytes=token_bytes)
    spans = every_span()
    for (document, start, stop), (tokens, trained) in zip(spans, folder.read_many(spans), strict=True):
        given, mask = examples[document]
        assert tokens.dtype == np.int32 and tokens.tolist() == given[start:stop].tolist()
        expected = np.ones(stop - start, bool) if mask is None else mask[start:stop]
        assert (np.ones(stop - start, bool) if trained is None else trained).tolist() == expected.tolist()
    assert folder.read(3, 10, 35).tokens.tolist() == examples[3].tokens[10:35].tolist()
    assert folder.largest_id == max(int(tokens.max(initial=0)) for tokens, _ in examples)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_are_those_of_documents_in_memory(tmp_path, masked):
    examples = make_examples(masked)
    folder, memory = write_folder(tmp_path, examples), MemoryTokens(examples, 60_000)
    assert folder.num_tokens.dtype == np.int64 and folder.num_tokens.tolist() == LENGTHS
    if masked:
        assert folder.num_trained.tolist() == memory.num_trained.tolist()
    else:
        assert folder.num_trained is None and memory.num_trained is None
    assert folder.name_hashes.tolist() == [name_hash(f"row {place}") for place in range(len(LENGTHS))]
    assert (folder.num_skipped, folder.first_skipped) == (1, "a.jsonl:3: broken JSON")


def test_a_record_is_plain_little_endian_integers_and_run_lengths(tmp_path):
    mask = np.array([0, 0, 1, 1, 1, 0], bool)
    write_shard(tmp_path / "a", [(1, Example(np.arange(6, dtype=np.int32), mask))], 2)
    (record,) = ArrayRecordReader(str(tmp_path / "a.arrayrecord")).read([0])
    assert record == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]) + bytes([2, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0])


def test_a_token_a_mask_and_a_border_change_the_digest(tmp_path):
    tokens = np.arange(40, dtype=np.int32)
    variants = [
        [Example(tokens, None)],
        [Example(np.append(tokens[:-1], 1), None)],
        [Example(tokens, np.arange(40) != 7)],
        [Example(tokens, np.arange(40) != 8)],
        [Example(tokens[:20], None), Example(tokens[20:], None)],
        [Example(tokens[:16], None), Example(tokens[16:], None)],
        [Example(tokens, None), Example(tokens[:0], None)],
    ]
    stems = [tmp_path / str(number) for number in range(len(variants))]
    digests = [
        write_shard(stem, [(0, example) for example in variant], 2).digest
        for stem, variant in zip(stems, variants, strict=True)
    ]
    assert len(set(digests)) == len(digests)
    all_trained = [(0, Example(tokens, np.ones(40, bool)))]
    assert write_shard(tmp_path / "same", all_trained, 2).digest == digests[0]


def test_opening_reads_no_record_and_a_batch_asks_each_shard_once(tmp_path, monkeypatch):
    asked = []

    class Counted:
        def __init__(self, path, options):
            self._path, self._reader = path, ArrayRecordReader(path, options)

        def num_records(self):
            return self._reader.num_records()

        def read(self, numbers):
            asked.append((self._path[-18:], numbers))
            return self._reader.read(numbers)

    monkeypatch.setattr(token_folder, "ArrayRecordReader", Counted)
    folder = write_folder(tmp_path, make_examples(False))
    assert asked == []
    folder.read_many([Span(6, 0, 33), Span(0, 1, 2), Span(6, 20, 22), Span(3, 17, 18), Span(2, 0, 0)])
    # Document 3 is the first of shard 1 and has records 0, 1, 2; document 6 the first of shard 2.
    assert asked == [
        ("000000.arrayrecord", [0]),
        ("000001.arrayrecord", [1]),
        ("000002.arrayrecord", [0, 1, 2]),
    ]


def test_threads_share_a_folder_with_few_open_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(token_folder, "MAX_OPEN_SHARDS", 2)
    examples = make_examples(True)
    folder = write_folder(tmp_path, examples, per_shard=1)
    spans = [span for span in every_span() if span.stop - span.start == 3]
    wrong = []

    def work(seed):
        order = np.random.default_rng(seed).permutation(len(spans))
        for places in np.array_split(order, 20):
            wanted = [spans[place] for place in places]
            for span, example in zip(wanted, folder.read_many(wanted), strict=True):
                if example.tokens.tolist() != examples[span.document].tokens[span.start : span.stop].tolist():
                    wrong.append(span)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(folder._readers) <= 2


def test_a_folder_that_is_not_finished_names_the_command(tmp_path):
    keys = {"dataset_type": "jsonl", "dataset_path": ["a b.jsonl", "c.jsonl"], "add_bos": False}
    (tmp_path / "begun.json").write_text(json.dumps({"keys": keys}))
    with pytest.raises(DataError, match="not finished") as raised:
        TokenFolder(str(tmp_path))
    keys_given = "dataset_type=jsonl 'dataset_path=a b.jsonl,c.jsonl' add_bos=false"
    assert f"maxlite data tokenize base.yml {tmp_path} {keys_given}" in str(raised.value)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_another_folder_says_how_to_write_one(tmp_path, name):
    with pytest.raises(DataError, match="maxlite data tokenize CONFIG FOLDER"):
        TokenFolder(str(tmp_path / name))


def test_another_format_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99"):
        TokenFolder(str(tmp_path))


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1000])


def flip(file):
    content = bytearray(file.read_bytes())
    content[80] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), truncate, flip])
def test_a_damaged_shard_is_named(tmp_path, damage):
    write_folder(tmp_path, make_examples(False))
    damage(tmp_path / "000001.arrayrecord")
    folder = TokenFolder(str(tmp_path))
    folder.read(0, 0, 5)
    with pytest.raises(DataError, match="Shard 000001 .* Delete 000001.json"):
        folder.read(3, 0, 5)


def test_a_damaged_index_is_named(tmp_path):
    write_folder(tmp_path, make_examples(False))
    (tmp_path / "000002.npy").write_bytes(b"no index")
    with pytest.raises(DataError, match="Shard 000002"):
        TokenFolder(str(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        write_shard(tmp_path / "missing" / "000000", [(0, Example(np.arange(3, dtype=np.int32), None))], 2)
