"""Windows over documents: every token a target once, cut tokens counted, only ids below the vocabulary."""

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.documents import find_documents
from maxlite.data.sources import SOURCES, TextSource
from maxlite.errors import ConfigError, DataError

WriteFiles = Callable[..., str]
BuildDataConfig = Callable[..., DataConfig]
BOS, EOS = 256, 257


def marked_text(document: int, length: int) -> str:
    """Returns ASCII text in which each character tells its document, for documents 0 to 25."""
    return chr(ord("A") + document) * length


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("lengths", [(10, 100, 33), (1, 32, 31, 64, 65, 2)])
def test_split_makes_each_token_a_target_once(
    write_files: WriteFiles,
    build_data_config: BuildDataConfig,
    lengths: tuple[int, ...],
    add_bos: bool,
    add_eos: bool,
) -> None:
    """Windows follow one another: their targets, joined, are the stream without its first token (P32)."""
    texts = [bytes(range(97, 97 + 26)) * 4 for _ in lengths]
    texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    folder = write_files({f"{index}.txt": text for index, text in enumerate(texts)})
    data = build_data_config(add_bos=add_bos, add_eos=add_eos)
    source = TextSource(find_documents((folder,), "dataset_path").found, data)
    pairs = [source[index].tolist() for index in range(len(source))]
    expected_pairs = []
    for text in texts:
        stream = [BOS] * add_bos + list(text) + [EOS] * add_eos
        document_pairs = list(zip(stream, stream[1:], strict=False))
        for start in range(0, len(document_pairs), 32):
            expected_pairs.append([list(pair) for pair in document_pairs[start : start + 32]])
    assert pairs == expected_pairs
    assert source.num_cut == 0
    assert source.num_targets == sum(map(len, expected_pairs))
    assert source.num_without_targets == (1 if 1 in lengths and not add_bos and not add_eos else 0)


def test_truncate_keeps_the_first_window_and_counts_the_rest(
    write_files: WriteFiles, build_data_config: BuildDataConfig
) -> None:
    """Documents of 10, 100 and 33 bytes have 11, 101 and 34 targets; 32 of each are kept (P32)."""
    folder = write_files({f"{index}.txt": marked_text(index, length) for index, length in enumerate((10, 100, 33))})
    corpus = SOURCES["text"](build_data_config(dataset_path=(folder,), long_documents="truncate"), 258)
    assert [len(corpus.train[index]) for index in range(len(corpus.train))] == [11, 32, 32]
    assert corpus.train[1].tolist() == [[BOS, 66]] + [[66, 66]] * 31
    assert "cut 71 tokens" in corpus.summary


def test_source_reads_any_window_and_can_be_pickled(
    write_files: WriteFiles, build_data_config: BuildDataConfig
) -> None:
    """A copy in another process gives the same windows."""
    folder = write_files({f"{index}.txt": marked_text(index, 7 * index + 1) for index in range(12)})
    source = TextSource(find_documents((folder,), "dataset_path").found, build_data_config(max_target_length=8))
    twin = pickle.loads(pickle.dumps(source))
    for index in np.random.default_rng(0).permutation(len(source)):
        window = source[int(index)]
        assert window.dtype == np.int32 and window.shape[1] == 2 and 1 <= len(window) <= 8
        np.testing.assert_array_equal(twin[int(index)], window)


def test_vocabulary_smaller_than_the_tokenizer(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """The marks need 258 ids."""
    data = build_data_config(dataset_path=(write_files({"a": "a"}),))
    with pytest.raises(ConfigError, match="vocab_size=257"):
        SOURCES["text"](data, 257)
    assert SOURCES["text"](data, 258).tokenizer is not None


def test_no_token_follows_another(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """A document of one byte without marks has no target; with nothing else there is nothing to train on."""
    data = build_data_config(dataset_path=(write_files({"a": "a"}),), add_bos=False, add_eos=False)
    with pytest.raises(DataError, match="add_bos or add_eos"):
        SOURCES["text"](data, 258)


def test_summary_names_what_was_found(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """One line with the counts."""
    folder = write_files({"a": "a" * 9, "b": "b" * 9, "empty": "", "binary": b"\0"})
    other = write_files({"c": "c" * 19}, folder="other")
    data = build_data_config(dataset_path=(folder,), eval_dataset_path=(other, f"{folder}/a"))
    corpus = SOURCES["text"](data, 258)
    assert corpus.summary == (
        f"text: 2 documents from {folder}; 18 bytes; 20 targets in 2 windows; held out 30 targets (60.0%); "
        f"from {other}, {folder}/a, 1 of its documents also trained on; "
        "skipped 1 empty, 1 not text, 0 without a target; cut 0 tokens"
    )


def test_synthetic_ids_fill_the_vocabulary(build_data_config: BuildDataConfig) -> None:
    """Each window depends on seed and index alone; all ids occur, none is out of range."""
    data = build_data_config(dataset_type="synthetic", max_target_length=500)
    source, twin = (SOURCES["synthetic"](data, 7).train for _ in range(2))
    other_seed = SOURCES["synthetic"](build_data_config(dataset_type="synthetic", data_shuffle_seed=1), 7).train
    window = source[10**15]
    assert window.shape == (500, 2) and window.dtype == np.int32
    np.testing.assert_array_equal(window[1:, 0], window[:-1, 1])
    np.testing.assert_array_equal(twin[10**15], window)
    assert not np.array_equal(source[1], window) and not np.array_equal(other_seed[1], source[1][:32])
    counts = Counter(window.ravel().tolist())
    assert set(counts) == set(range(7)) and min(counts.values()) > 80


def test_synthetic_has_no_passes(build_data_config: BuildDataConfig) -> None:
    """A key that cannot act is refused."""
    with pytest.raises(ConfigError, match="num_epoch=2"):
        SOURCES["synthetic"](build_data_config(dataset_type="synthetic", num_epoch=2), 7)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_windows_under_a_tokenizer_json(
    write_files: WriteFiles,
    build_data_config: BuildDataConfig,
    write_tokenizer: Callable[..., Path],
    long_documents: str,
) -> None:
    """Tokens of words follow one another as bytes do; what is no text to its end is counted."""
    texts = {"a": "w0 w1 w2 w3 w4", "b": "w5", "c": "a" * 5000 + "\udcff"}
    folder = write_files({name: text.encode(errors="surrogateescape") for name, text in texts.items()})
    settings = {"eos_token": "</s>"}
    data = build_data_config(
        dataset_path=(folder,),
        tokenizer_path=str(write_tokenizer("words", tokenizer_config=settings)),
        max_target_length=4,
        long_documents=long_documents,
    )
    corpus = SOURCES["text"](data, 64)
    windows = [corpus.train[index].tolist() for index in range(len(corpus.train))]
    rest = [[[8, 2]]] if long_documents == "split" else []
    assert windows == [[[4, 5], [5, 6], [6, 7], [7, 8]], *rest, [[9, 2]]]
    assert ", 1 not text, " in corpus.summary
    assert corpus.tokenizer is not None and corpus.tokenizer.vocab_size == 64
    with pytest.raises(ConfigError, match=r"vocab_size=63 is smaller than the 64"):
        SOURCES["text"](data, 63)


def test_another_tokenizer_is_other_data(
    write_files: WriteFiles, build_data_config: BuildDataConfig, write_tokenizer: Callable[..., Path]
) -> None:
    """A run does not go on with the same files under other ids."""
    folder = write_files({"a": "w0 w1"})
    identities = set()
    for name in ("words", "byte_level"):
        path = str(write_tokenizer(name))
        data = build_data_config(dataset_path=(folder,), tokenizer_path=path, add_eos=False)
        identities.update(SOURCES["text"](data, 300).identity for _ in range(2))
    assert len(identities) == 2
