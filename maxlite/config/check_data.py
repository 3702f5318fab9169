"""Rules between the keys of the data."""

from collections.abc import Callable, Iterator

from maxlite.config.schema import Config

SPLIT_TYPES = ("hf", "tfds")
# The byte tokenizer's ids, a begin mark and an end mark.
BYTE_VOCABULARY = 258


def check_dataset(config: Config) -> Iterator[str]:
    """Paths and splits go with a type that reads them."""
    data = config.data
    kind = data.dataset_type
    if kind == "synthetic":
        for name in ("dataset_path", "eval_dataset_path", "dataset_mixture"):
            if getattr(data, name) is not None:
                yield f"{name} has no effect with dataset_type=synthetic; set dataset_type=text or leave it out."
        if data.num_epoch is not None:
            yield (
                f"num_epoch={data.num_epoch} with dataset_type=synthetic: random tokens have no end, so no passes; "
                "leave num_epoch out, steps ends the run."
            )
    if kind == "tfds" and data.dataset_name is None:
        yield "dataset_type=tfds needs dataset_name, such as dataset_name=wikitext; dataset_path is then its data_dir."
    if kind != "tfds" and data.dataset_name is not None:
        yield f"dataset_name={data.dataset_name} is of tfds, not of dataset_type={kind}; dataset_path names files."
    if kind not in SPLIT_TYPES and data.eval_split is not None:
        yield (
            f"eval_split={data.eval_split}: dataset_type={kind} has no splits (hf and tfds have); give "
            "eval_dataset_path or eval_fraction."
        )
    if data.tokenizer_path is None and config.model.vocab_size < BYTE_VOCABULARY and _has_text(config):
        yield (
            f"vocab_size={config.model.vocab_size} is too small for dataset_type={kind}: bytes and the begin and end "
            f"marks need {BYTE_VOCABULARY} ids; make it larger, give tokenizer_path or set dataset_type=synthetic."
        )


def check_mixture(config: Config) -> Iterator[str]:
    """A mixture says itself what is read and how often."""
    data = config.data
    if data.dataset_mixture is None:
        return
    if data.dataset_type == "tfds":
        yield "dataset_mixture mixes paths, and dataset_type=tfds reads a dataset_name; write files of them first."
    for name, instead in (
        ("dataset_path", "its rows have paths"),
        ("eval_dataset_path", "each of its sources holds out eval_fraction"),
        ("num_epoch", "its rows have epochs"),
    ):
        if getattr(data, name) is not None:
            yield f"{name} and dataset_mixture are both set, but {instead}; set {name}=null."


def check_objective(config: Config) -> Iterator[str]:
    """Fine-tuning reads rows with columns."""
    data = config.data
    if data.objective == "sft" and data.dataset_type in ("text", "synthetic"):
        yield (
            f"objective=sft needs rows with messages, or a prompt and a completion, and dataset_type="
            f"{data.dataset_type} has none; set dataset_type to jsonl, parquet, arrayrecord, hf, tfds or tokenized."
        )
    if not data.tokenize_train_data and data.dataset_type in ("text", "tokenized", "synthetic"):
        yield (
            f"tokenize_train_data=false reads a column of token ids, and dataset_type={data.dataset_type} has no "
            "columns; set dataset_type to jsonl, parquet, arrayrecord, hf or tfds."
        )


def check_rows(config: Config) -> Iterator[str]:
    """Keys of packing and padding go together."""
    data = config.data
    if data.padding_buckets is not None:
        if data.packing:
            yield "padding_buckets is for rows of one document; set packing=false, or padding_buckets=null."
        if max(data.padding_buckets) > data.max_target_length:
            yield (
                f"padding_buckets has {max(data.padding_buckets)}, above max_target_length={data.max_target_length}; "
                "the last bucket is max_target_length itself and need not be given."
            )
    if data.packing and data.packing_type == "concat_then_split" and data.max_segments_per_seq is not None:
        yield (
            f"max_segments_per_seq={data.max_segments_per_seq} with packing_type=concat_then_split, which fills rows "
            "with whatever comes; set packing_type=first_fit or best_fit, or max_segments_per_seq=null."
        )


def _has_text(config: Config) -> bool:
    return config.data.dataset_type not in ("synthetic", "tokenized") and config.data.tokenize_train_data


DATA_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_dataset,
    check_mixture,
    check_objective,
    check_rows,
)
