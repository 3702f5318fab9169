"""Order, epochs, exact positions and held-out passes over whole datasets."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset, build_dataset
from maxlite.errors import DataError

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
    assert len(json.dumps(state)) < 200
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
        rows = np.concatenate([np.stack(batch) for batch in batches], axis=1)
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
    """Training never sees the held-out bytes."""
    folder = write_files({"one.txt": "a" * 90 + "b" * 10})
    data = build_data_config(dataset_path=(f"{folder}/one.txt",), eval_fraction=0.1, num_epoch=1)
    dataset = open_dataset(data)
    assert dataset.eval_batches is not None
    seen = [
        Counter(token for batch in batches for token in batch.targets[batch.loss_mask == 1].tolist())
        for batches in (dataset.train, dataset.eval_batches())
    ]
    assert seen == [Counter({ord("a"): 90, 257: 1}), Counter({ord("b"): 10, 257: 1})]


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


def test_a_file_that_changes_under_the_run(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """The thread's error reaches the loop as it is."""
    folder = write_files({"a.txt": "a" * 1000})
    train = open_dataset(build_data_config(dataset_path=(folder,)), batch_size=2).train
    next(train)
    Path(folder, "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"a\.txt had 1000 bytes"):
        list(islice(train, 100))


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


@pytest.mark.parametrize("ending", ["raise SystemExit(7)", "pathlib.Path(path).write_text('')\nlist(train)"])
def test_an_open_iterator_leaves_no_noise_at_exit(write_files: WriteFiles, ending: str) -> None:
    """A run that ends early, by an error too, prints nothing but that error."""
    folder = write_files({"a.txt": "a" * 1000})
    program = f"""
import pathlib
from maxlite.config.schema import DataConfig
from maxlite.data.pipeline import build_dataset
path = {folder!r} + "/a.txt"
data = DataConfig("text", (path,), None, 0.0, 32, 1.0, True, "split", True, True, True, 0, None, None)
train = build_dataset(data, vocab_size=258, batch_size=4).train
next(train)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 7) and done.stdout == ""
    assert "ignored" not in done.stderr and ("a.txt had 1000 bytes" in done.stderr) == (done.returncode == 1)
