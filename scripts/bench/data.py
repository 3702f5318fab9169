"""Packed batches a CPU second, beside Hugging Face datasets' `map` and a packing of ours in numpy; prints the ratio.

usage: data.py TOKENIZER PATH   (needs transformers and datasets; PATH is a folder of text files)
Both read the same files, tokenize them with the same tokenizer, cut documents into windows of T tokens, pack these into
rows by first fit and stack batches, all in memory and once. CPU seconds are of all threads.
"""

import json
import pathlib
import sys
import time

import numpy as np

from maxlite.config.load import load_config
from maxlite.data.pipeline import build_dataset

ROW_LENGTH, BATCH_ROWS, OPEN_ROWS = 1024, 8, 64


def ours(tokenizer: str, path: str) -> dict[str, float]:
    keys = [f"dataset_path={path}", f"tokenizer_path={tokenizer}", f"max_target_length={ROW_LENGTH}", "num_epoch=1"]
    began = time.process_time()
    data = load_config("base.yml", [*keys, "vocab_size=200000", "eval_fraction=0"], {}).data
    dataset = build_dataset(data, vocab_size=200_000, batch_size=BATCH_ROWS)
    encoded = time.process_time() - began
    tokens = sum(int(batch.loss_mask.sum()) for batch in dataset.train)
    return _result(tokens, encoded, time.process_time() - began)


def peer(tokenizer: str, path: str) -> dict[str, float]:
    import datasets
    import transformers

    datasets.disable_caching()
    datasets.disable_progress_bars()
    began = time.process_time()
    texts = []
    for file in sorted(pathlib.Path(path).rglob("*")):
        if file.is_file():
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    backend = transformers.AutoTokenizer.from_pretrained(tokenizer)
    backend.model_max_length = 10**9
    end = [backend.eos_token_id]
    rows = datasets.Dataset.from_dict({"text": texts}).map(
        lambda batch: {"ids": [ids + end for ids in backend(batch["text"]).input_ids]},
        batched=True,
        remove_columns=["text"],
    )
    encoded = time.process_time() - began
    tokens = sum(int(mask.sum()) for *_, mask in _batches(rows.with_format("numpy")))
    return _result(tokens, encoded, time.process_time() - began)


def _batches(rows):
    """First fit over windows of T pairs, as plain numpy has it."""
    full = []
    for row in _packed(rows):
        full.append(row)
        if len(full) == BATCH_ROWS:
            yield _stacked(full)
            full = []
    if full:
        yield _stacked(full)


def _packed(rows):
    bins: list[list[np.ndarray]] = []
    free: list[int] = []
    for row in rows:
        ids = np.asarray(row["ids"], np.int32)
        for start in range(0, len(ids) - 1, ROW_LENGTH):
            window = ids[start : start + ROW_LENGTH + 1]
            length = len(window) - 1
            place = next((place for place, room in enumerate(free) if room >= length), -1)
            if place < 0:
                if len(free) == OPEN_ROWS:
                    fullest = free.index(min(free))
                    del free[fullest]
                    yield bins.pop(fullest)
                place = len(free)
                bins.append([])
                free.append(ROW_LENGTH)
            bins[place].append(window)
            free[place] -= length
            if free[place] == 0:
                del free[place]
                yield bins.pop(place)
    yield from bins


def _stacked(rows):
    inputs, targets, positions, segments = (np.zeros((BATCH_ROWS, ROW_LENGTH), np.int32) for _ in range(4))
    for number, windows in enumerate(rows):
        column = 0
        for segment, window in enumerate(windows, 1):
            place = (number, slice(column, column + len(window) - 1))
            inputs[place], targets[place] = window[:-1], window[1:]
            positions[place], segments[place] = np.arange(len(window) - 1), segment
            column += len(window) - 1
    return inputs, targets, positions, segments, (segments > 0).astype(np.float32)


def _result(tokens: int, encoded: float, total: float) -> dict[str, float]:
    return {
        "tokens": tokens,
        "cpu_s": round(total, 2),
        "cpu_s_until_packing": round(encoded, 2),
        "tokens_per_cpu_s": round(tokens / total),
    }


if __name__ == "__main__":
    results = {"maxlite": ours(*sys.argv[1:3]), "datasets": peer(*sys.argv[1:3])}
    for name, result in results.items():
        print(name, json.dumps(result))
    ratio = results["maxlite"]["tokens_per_cpu_s"] / results["datasets"]["tokens_per_cpu_s"]
    print(f"maxlite / datasets: {ratio:.2f}")
