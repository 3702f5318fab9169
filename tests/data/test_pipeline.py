"""Order, epochs, exact positions and held-out passes over whole datasets."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxlite.config.data_schema import DataConfig, MixtureSource
from maxlite.data.batch import Batch
from maxlite.data.iterators import TrainIterator
from maxlite.data.pipeline import Dataset, build_dataset
from maxlite.data.tokenize import tokenize

WriteFiles = Callable[..., str]
BuildDataConfig = Callable[..., DataConfig]


@pytest.fixture
def marker_folder(write_files: WriteFiles) -> str:
    """64 documents of 3 to 66 bytes; each is filled with its own byte, 64 + index."""
    return write_files({f"{index:02}.txt": bytes([64 + index]) * (3 + index) for index in range(63)} | {"63": "~" * 66})


def markers(batches: Iterable[Batch]) -> list[list[int]]:
    """Returns for each batch the documents in it, one entry a segment."""
    found = []
    for batch in batches:
        starts = (batch.positions == 0) & (batch.segment_ids > 0)
        found.append([int(token) for token in batch.targets[starts]])
    return found


def assert_equal_batches(actual: Iterable[Batch], expected: Iterable[Batch]) -> None:
    """Compares every field of every batch."""
    for one, other in zip(actual, expected, strict=True):
        for field, other_field in zip(one, other, strict=True):
            assert (field is None) == (other_field is None)
            if field is not None:
                np.testing.assert_array_equal(field, other_field)


def open_dataset(data: DataConfig, batch_size: int = 4) -> Dataset:
    """Returns the dataset under the smallest vocabulary."""
    return build_dataset(data, vocab_size=258, batch_size=batch_size)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("num_before", [0, 1, 5, 17, 40])
def test_resume_is_exact(
    marker_folder: str, build_data_config: BuildDataConfig, num_before: int, shuffled: bool, packing: bool
) -> None:
    """The batches after a restore are those of the uninterrupted iterator, over the ends of epochs too (P22)."""
    data = build_data_config(dataset_path=(marker_folder,), packing=packing, enable_data_shuffling=shuffled)
    whole = list(islice(open_dataset(data).train, num_before + 10))
    first = open_dataset(data).train
    list(islice(first, num_before))
    state = json.loads(json.dumps(first.state()))
    assert len(json.dumps(state)) < 60
    second = open_dataset(data).train
    next(second)
    second.restore(state)
    assert second.state() == state
    assert_equal_batches(islice(second, 10), whole[num_before:])
    assert second.state()["epoch"] > 0 or num_before <= 5


def test_resume_with_another_batch_size_goes_on_at_the_next_row(
    marker_folder: str, build_data_config: BuildDataConfig
) -> None:
    """The position is a number of rows, so another mesh may split them in another way."""
    data = build_data_config(dataset_path=(marker_folder,), num_epoch=1)
    whole = list(open_dataset(data, batch_size=2).train)
    first = open_dataset(data, batch_size=8).train
    next(first)
    second = open_dataset(data, batch_size=2).train
    second.restore(first.state())
    assert_equal_batches(second, whole[4:])


def test_finished_position_stays_finished(marker_folder: str, build_data_config: BuildDataConfig) -> None:
    """Restoring the end gives nothing more; more epochs go on with the next one."""
    data = build_data_config(dataset_path=(marker_folder,), num_epoch=1)
    finished = open_dataset(data).train
    num_batches = len(list(finished))
    again = open_dataset(data).train
    again.restore(finished.state())
    assert list(again) == [] and list(again) == []
    longer = build_data_config(dataset_path=(marker_folder,), num_epoch=2)
    whole = list(open_dataset(longer).train)
    more = open_dataset(longer).train
    more.restore(finished.state())
    assert_equal_batches(more, whole[num_batches:])


@pytest.mark.parametrize("packing", [True, False])
def test_epochs(write_files: WriteFiles, build_data_config: BuildDataConfig, packing: bool) -> None:
    """The first of two epochs is an only one; the second has another order; each has every document once (P33)."""
    letters = [ord("A") + index for index in range(12)]
    folder = write_files({f"{letter}.txt": bytes([letter]) * 29 for letter in letters})
    data = build_data_config(dataset_path=(folder,), packing=packing, num_epoch=1)
    once = list(open_dataset(data).train)
    twice = list(open_dataset(build_data_config(dataset_path=(folder,), packing=packing, num_epoch=2)).train)
    assert len(once) == 3 and len(twice) == 6
    assert_equal_batches(twice[:3], once)
    first, second = sum(markers(twice[:3]), []), sum(markers(twice[3:]), [])
    assert sorted(first) == sorted(second) == letters
    assert first != second and first != letters


def test_passes_of_different_seeds_differ(marker_folder: str, build_data_config: BuildDataConfig) -> None:
    """Nor is the second pass of one seed the first of the next seed."""
    orders = []
    for seed in range(3):
        data = build_data_config(
            dataset_path=(marker_folder,), packing=False, num_epoch=3, data_shuffle_seed=seed, max_target_length=80
        )
        batches = markers(open_dataset(data, batch_size=64).train)
        assert len(batches) == 3
        orders.extend(map(tuple, batches))
    assert len(set(orders)) == 9
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_no_shuffling_is_file_order(marker_folder: str, build_data_config: BuildDataConfig) -> None:
    """Packed or not, every epoch."""
    for packing in (True, False):
        data = build_data_config(
            dataset_path=(marker_folder,),
            packing=packing,
            enable_data_shuffling=False,
            num_epoch=2,
            max_target_length=80,
        )
        in_order = [64 + index for index in range(63)] + [ord("~")]
        assert sum(markers(open_dataset(data).train), []) == in_order * 2


@pytest.mark.parametrize("packing", [True, False])
def test_each_byte_is_a_target_once_an_epoch(
    marker_folder: str, build_data_config: BuildDataConfig, packing: bool
) -> None:
    """Splitting, shuffling, packing and batching lose nothing (P32)."""
    data = build_data_config(dataset_path=(marker_folder,), packing=packing, num_epoch=1)
    targets: Counter[int] = Counter()
    for batch in open_dataset(data).train:
        targets.update(batch.targets[batch.loss_mask == 1].tolist())
        assert ((batch.loss_mask == 1) == (batch.segment_ids > 0)).all()
    expected = Counter({64 + index: 3 + index for index in range(63)})
    expected.update({ord("~"): 66, 257: 64})
    assert targets == expected


@pytest.mark.parametrize("packing", [True, False])
def test_held_out_rows_do_not_depend_on_the_batch_size(
    write_files: WriteFiles, build_data_config: BuildDataConfig, packing: bool
) -> None:
    """Ten documents in batches of 1, 4 and 8: the same rows in the same order, the rest empty (P34)."""
    train = write_files({"t.txt": "train"}, folder="train")
    held_out = write_files({f"{index}": bytes([65 + index]) * (20 + index) for index in range(10)}, folder="eval")
    data = build_data_config(dataset_path=(train,), eval_dataset_path=(held_out,), packing=packing)
    passes = {}
    for batch_size in (1, 4, 8):
        eval_batches = open_dataset(data, batch_size).eval_batches
        assert eval_batches is not None
        batches = list(eval_batches())
        assert all(batch.inputs.shape == (batch_size, 32) for batch in batches)
        assert_equal_batches(eval_batches(), batches)
        rows = np.concatenate([np.stack(batch[:5]) for batch in batches], axis=1)
        is_empty = rows[2].sum(axis=1) == 0
        assert (np.diff(is_empty.astype(int)) >= 0).all(), "an empty row before a full one"
        assert (rows[:, is_empty] == 0).all() and len(batches) == -(-int((~is_empty).sum()) // batch_size)
        passes[batch_size] = rows[:, ~is_empty]
    assert passes[1].shape[1] == 10
    np.testing.assert_array_equal(passes[1], passes[4])
    np.testing.assert_array_equal(passes[1], passes[8])
    assert passes[1][2].sum() == sum(21 + index for index in range(10))


def test_held_out_order(marker_folder: str, build_data_config: BuildDataConfig) -> None:
    """Shuffled once by the seed, so that the first batches are a fair sample; file order without shuffling."""
    orders = []
    for shuffled in (True, False):
        data = build_data_config(
            dataset_path=(marker_folder,),
            eval_dataset_path=(marker_folder,),
            enable_data_shuffling=shuffled,
            packing=False,
            max_target_length=80,
        )
        eval_batches = open_dataset(data).eval_batches
        assert eval_batches is not None
        orders.append(sum(markers(eval_batches()), []))
    assert sorted(orders[0]) == orders[1] and orders[0] != orders[1]


def test_a_lone_file_holds_its_end_out(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """Training never sees the held-out tokens: the last tenth of 102, with the end mark among them."""
    folder = write_files({"one.txt": "a" * 91 + "b" * 9})
    data = build_data_config(dataset_path=(f"{folder}/one.txt",), eval_fraction=0.1, num_epoch=1)
    dataset = open_dataset(data)
    assert dataset.eval_batches is not None
    seen = [
        Counter(token for batch in batches for token in batch.targets[batch.loss_mask == 1].tolist())
        for batches in (dataset.train, dataset.eval_batches())
    ]
    assert seen == [Counter({ord("a"): 91}), Counter({ord("b"): 8, 257: 1})]


@pytest.mark.parametrize("row_length", [1, 2])
def test_the_shortest_rows(write_files: WriteFiles, build_data_config: BuildDataConfig, row_length: int) -> None:
    """Rows of one token, and data of one window, work like any other."""
    for text in ("ab", "a"):
        data = build_data_config(
            dataset_path=(write_files({"a": text}),), max_target_length=row_length, num_epoch=2, add_bos=False
        )
        batches = list(open_dataset(data).train)
        targets = [batch.targets[batch.loss_mask == 1].tolist() for batch in batches]
        assert list(map(sorted, targets)) == [sorted([*text.encode()[1:], 257])] * 2


def test_nothing_held_out(marker_folder: str, build_data_config: BuildDataConfig) -> None:
    """Without a share or a path there is no evaluation data."""
    dataset = open_dataset(build_data_config(dataset_path=(marker_folder,)))
    assert dataset.eval_batches is None and "nothing held out" in dataset.summary


def test_synthetic_batches(build_data_config: BuildDataConfig) -> None:
    """Every position is a real target, packing and tokenizer play no part, and the position is exact."""
    data = build_data_config(dataset_type="synthetic")
    dataset = build_dataset(data, vocab_size=11, batch_size=3)
    assert dataset.tokenizer is None and dataset.eval_batches is None
    batches = list(islice(dataset.train, 4))
    for batch in batches:
        assert (batch.loss_mask == 1).all() and (batch.segment_ids == 1).all()
        assert (batch.positions == np.arange(32)).all() and batch.inputs.max() < 11
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert len({batch.inputs.tobytes() for batch in batches}) == 4
    state = dataset.train.state()
    following = next(dataset.train)
    second = build_dataset(data, vocab_size=11, batch_size=3).train
    second.restore(state)
    assert_equal_batches([next(second)], [following])


def test_fingerprint_tells_that_data_or_order_changed(
    write_files: WriteFiles, build_data_config: BuildDataConfig
) -> None:
    """What changes the rows changes it; how they are batched, and where the folder lies, do not."""
    files = {"a": "a" * 9, "b": "b" * 9}
    folder = write_files(files)

    def fingerprint(path: str = folder, batch_size: int = 4, **changes: object) -> str:
        return open_dataset(build_data_config(dataset_path=(path,), **changes), batch_size).fingerprint

    plain = fingerprint()
    assert len(plain) == 16
    assert plain == fingerprint() == fingerprint(batch_size=2) == fingerprint(num_epoch=3)
    assert plain == fingerprint(write_files(files, folder="elsewhere"))
    changed = [
        fingerprint(write_files(files | {"a": "a" * 8}, folder="size")),
        fingerprint(write_files(files | {"c": "c"}, folder="more")),
        fingerprint(eval_fraction=0.5),
        fingerprint(data_shuffle_seed=1),
        fingerprint(enable_data_shuffling=False),
        fingerprint(packing=False),
        fingerprint(max_target_length=31),
        fingerprint(long_documents="truncate"),
        fingerprint(add_bos=False),
    ]
    assert len({plain, *changed}) == 1 + len(changed)


@pytest.mark.parametrize("kind", ["pretrain", "mixture", "buckets"])
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (2, 4), (1, 2), (4, 2)])
def test_a_position_means_the_same_on_any_number_of_processes(
    marker_folder: str, write_files: WriteFiles, build_data_config: BuildDataConfig, kind: str, saved_by: int,
    resumed_by: int,
) -> None:  # fmt: skip
    """Processes read disjoint rows whose union is the batch; one process's position serves every other (P22, P36)."""
    other = write_files({"other.txt": "xyz" * 200}, folder="other")
    mixture = (MixtureSource(marker_folder, 2.0, None, "a"), MixtureSource(other, 1.0, None, "b"))
    data = {
        "pretrain": build_data_config(dataset_path=(marker_folder,)),
        "mixture": build_data_config(dataset_mixture=mixture),
        "buckets": build_data_config(dataset_path=(marker_folder,), packing=False, padding_buckets=(8, 16)),
    }[kind]

    def iterators(count: int) -> list[TrainIterator]:
        share = 8 // count
        parts = [range(index * share, (index + 1) * share) for index in range(count)]
        return [build_dataset(data, vocab_size=258, batch_size=8, own_rows=part).train for part in parts]

    def joined(parts: Sequence[TrainIterator], count: int) -> list[Batch]:
        steps = [[next(part) for part in parts] for _ in range(count)]
        assert all(len({part.inputs.shape for part in step}) == 1 for step in steps)
        return [
            Batch(*(None if fields[0] is None else np.concatenate(fields) for fields in zip(*step, strict=True)))
            for step in steps
        ]

    whole = joined(iterators(1), 16)
    before = iterators(saved_by)
    assert_equal_batches(joined(before, 7), whole[:7])
    states = [part.state() for part in before]
    assert all(state == states[0] for state in states)
    after = iterators(resumed_by)
    for part in after:
        part.restore(json.loads(json.dumps(states[-1])))
    assert_equal_batches(joined(after, 9), whole[7:])


def write_kind(kind: str, folder: Path) -> None:
    """Writes twenty rows as one file of this kind; row k is the letter k, one to twenty times."""
    folder.mkdir()
    rows = [{"text": chr(65 + index) * (1 + index)} for index in range(20)]
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    elif kind == "arrayrecord":
        writer = ArrayRecordWriter(str(folder / "a.arrayrecord"), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    elif kind == "hf":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
            stream.write_table(table)
        state = {"_data_files": [{"filename": "data.arrow"}], "_indices_files": None, "_split": "train"}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrayrecord", "hf", "tokenized"])
def test_one_file_of_any_kind_serves_two_processes(
    tmp_path: Path, build_data_config: BuildDataConfig, kind: str, packing: bool, workers: int
) -> None:
    """By row, not by file: disjoint parts, each document once an epoch, and an exact resume (P22, P33, P36)."""
    write_kind("jsonl" if kind == "tokenized" else kind, tmp_path / "data")
    data = build_data_config(
        dataset_type=kind,
        dataset_path=(str(tmp_path / "data"),),
        packing=packing,
        num_epoch=2,
        data_worker_count=workers,
    )
    if kind == "tokenized":
        raw = dataclasses.replace(data, dataset_type="jsonl")
        tokenize(raw, 258, tmp_path / "tokens", num_workers=0)
        data = dataclasses.replace(data, dataset_path=(str(tmp_path / "tokens"),))
    whole = list(open_dataset(data).train)
    # As on a mesh whose first axis lies within a process: each has every other row.
    halves = [
        list(build_dataset(data, vocab_size=258, batch_size=4, own_rows=range(index, 4, 2)).train) for index in range(2)
    ]
    for number, (first, second) in enumerate(zip(*halves, strict=True)):
        joined = [np.stack(fields, axis=1).reshape(4, -1) for fields in zip(first[:5], second[:5], strict=True)]
        assert_equal_batches([Batch(*joined)], [whole[number]])
    assert len(halves[0]) == len(whole)
    assert Counter(sum(markers(whole), [])) == {65 + index: 2 for index in range(20)}
    train = open_dataset(data).train
    list(islice(train, 3))
    again = open_dataset(data).train
    again.restore(train.state())
    assert_equal_batches(again, whole[3:])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_their_lead_change_nothing(
    marker_folder: str, build_data_config: BuildDataConfig, workers: int
) -> None:
    """Neither a batch nor a position (P22)."""
    plain = build_data_config(dataset_path=(marker_folder,), num_epoch=2)
    expected = open_dataset(plain).train
    data = dataclasses.replace(plain, data_worker_count=workers, data_worker_buffer_size=3)
    train = open_dataset(data).train
    for batch in expected:
        assert_equal_batches([next(train)], [batch])
        assert train.state() == expected.state()
    assert next(train, None) is None
    train.restore({"epoch": 1, "block": 0, "row": 2})
    expected.restore({"epoch": 1, "block": 0, "row": 2})
    assert_equal_batches(train, list(expected))


def test_a_mixture_keeps_its_weights_and_epochs(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """Rows come by weight at every moment; a source that ends is left out, and each document comes once an epoch."""
    first = write_files({f"{index}": bytes([65 + index]) * 29 for index in range(12)}, folder="first")
    second = write_files({f"{index}": bytes([97 + index]) * 29 for index in range(5)}, folder="second")
    mixture = (MixtureSource(first, 3.0, 1, "first"), MixtureSource(second, 1.0, 2, "second"))
    dataset = open_dataset(build_data_config(dataset_mixture=mixture, packing=False), batch_size=4)
    assert dataset.source_names == ("first", "second")
    batches = list(dataset.train)
    sources = np.concatenate([batch.source_ids[:, 0][batch.segment_ids[:, 0] > 0] for batch in batches])
    # Twelve rows at three to one, then what is left of the second: ten rows in all.
    assert sources[:16].tolist().count(0) == 12 and sources.tolist().count(1) == 10
    assert sources[:4].tolist().count(0) == 3 and sources[4:8].tolist().count(0) == 3
    seen = Counter(sum(markers(batches), []))
    assert seen == Counter({65 + index: 1 for index in range(12)} | {97 + index: 2 for index in range(5)})
    for batch in batches:
        is_real = batch.segment_ids > 0
        assert ((batch.inputs[is_real] >= 97) == (batch.source_ids[is_real] == 1))[batch.inputs[is_real] < 256].all()


def test_held_out_rows_of_a_mixture(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """All of each source once, evenly mixed."""
    sizes = {"first": 40, "second": 20}
    for name, size in sizes.items():
        write_files({f"{index}": name[0] * 29 for index in range(size)}, folder=name)
    folders = [write_files({"0": name[0] * 29}, folder=name) for name in sizes]
    mixture = tuple(MixtureSource(folder, 1.0, None, name) for folder, name in zip(folders, sizes, strict=True))
    dataset = open_dataset(build_data_config(dataset_mixture=mixture, eval_fraction=0.5, packing=False))
    assert dataset.eval_batches is not None and dataset.statistics is not None
    held_out = [batch.source_ids[batch.positions == 1].tolist() for batch in dataset.eval_batches()]
    counts = Counter(sum(held_out, []))
    assert sum(counts.values()) == dataset.statistics.held_out_documents and min(counts.values()) > 3
    half = Counter(sum(held_out[: len(held_out) // 2], []))
    assert abs(half[1] / half[0] - counts[1] / counts[0]) < 0.1


def test_buckets(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """Every batch is as long as the bucket of its longest row; nothing is lost, and most batches are of one bucket."""
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    folder = write_files({f"{index}": "a" * length for index, length in enumerate(lengths)})
    data = build_data_config(dataset_path=(folder,), packing=False, padding_buckets=(8, 16), num_epoch=1)
    batches = list(open_dataset(data, batch_size=8).train)
    assert sum(batch.loss_mask.sum() for batch in batches) == sum(length + 1 for length in lengths)
    for batch in batches:
        longest = batch.loss_mask.sum(axis=1).max()
        assert batch.inputs.shape[1] == next(bucket for bucket in (8, 16, 32) if bucket >= longest)
    places = sum(batch.inputs.size for batch in batches)
    assert places < 0.75 * 200 * 32
    whole = [batch for batch in batches if (batch.loss_mask.sum(axis=1) > batch.inputs.shape[1] / 2).all()]
    assert len(whole) >= len(batches) - 6


def test_an_open_iterator_leaves_no_noise_at_exit(write_files: WriteFiles) -> None:
    """A run that ends early prints nothing of its threads."""
    folder = write_files({"a.txt": "a" * 1000})
    program = f"""
from maxlite.config.load import load_config
from maxlite.data.pipeline import build_dataset
data = load_config("base.yml", ["dataset_path={folder}", "eval_fraction=0"], {{}}).data
train = build_dataset(data, vocab_size=258, batch_size=4).train
next(train)
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
