"""The keys of the data: what is trained on, and how it becomes rows."""

import dataclasses
from typing import NamedTuple

from maxlite.config.key import key

DATASET_TYPES = ("text", "jsonl", "parquet", "arrayrecord", "hf", "tfds", "tokenized", "synthetic")


class MixtureSource(NamedTuple):
    """One row of dataset_mixture. weight: share of the rows. epochs: passes, after which it is left out."""

    path: str
    weight: float
    epochs: int | None
    name: str


DatasetMixture = tuple[MixtureSource, ...]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how documents become batches."""

    objective: str = key("What is learnt.", choices=("pretrain", "sft"))
    dataset_type: str = key("Kind of data.", choices=DATASET_TYPES)
    dataset_path: tuple[str, ...] | None = key("Files, folders, globs or URLs.")
    eval_dataset_path: tuple[str, ...] | None = key("Held-out files, folders, globs or URLs.")
    eval_fraction: float = key("Share of the documents held out.", minimum=0, maximum=0.9)
    dataset_mixture: DatasetMixture | None = key("Several sources and their weights, instead of dataset_path.")
    dataset_name: str | None = key("tfds: name of the dataset.")
    train_split: str = key("hf, tfds: split trained on.")
    eval_split: str | None = key("hf, tfds: split held out.")
    train_data_columns: tuple[str, ...] | None = key("Columns of a row that are read.")
    tokenize_train_data: bool = key("Columns hold text; false = token ids.")
    bad_rows: str = key("What happens to a row that cannot be read.", choices=("stop", "skip"))
    sft_train_on_completion_only: bool = key("sft: loss on the assistant's turns only.")
    chat_template_path: str | None = key("sft: a Jinja file, instead of the tokenizer's own chat template.")
    max_target_length: int = key("Tokens in a row.", minimum=1)
    per_device_batch_size: float = key("Rows a device and step.", above=0, maximum=1_000_000)
    packing: bool = key("Several short documents in one row.")
    packing_type: str = key("How rows are packed.", choices=("first_fit", "best_fit", "concat_then_split"))
    max_segments_per_seq: int | None = key("Documents in one row.", minimum=1)
    padding_buckets: tuple[int, ...] | None = key("Lengths that unpacked rows are padded to.", minimum=1)
    long_documents: str = key("What happens to a document longer than a row.", choices=("split", "truncate"))
    add_bos: bool = key("Begin each document with the begin mark.")
    add_eos: bool = key("End each document with the end mark.")
    enable_data_shuffling: bool = key("A new order of rows each epoch.")
    data_shuffle_seed: int = key("Seed of that order.", minimum=0, maximum=2**32 - 1)
    num_epoch: int | None = key("Passes over the data.", minimum=1)
    tokenizer_path: str | None = key("A tokenizer's file or folder.")
    data_worker_count: int = key("Threads that make batches ahead of the step.", minimum=0, maximum=1024)
    data_worker_buffer_size: int = key("Batches that each of them makes ahead.", minimum=1)
