"""Which tokenizer a config means, and whether it is the model's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer import build_tokenizer, check_vocabulary
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError

BuildDataConfig = Callable[..., DataConfig]


def test_only_random_tokens_have_no_tokenizer(build_data_config: BuildDataConfig) -> None:
    """Text without a tokenizer_path is bytes."""
    assert build_tokenizer(build_data_config(dataset_type="synthetic")) is None
    assert isinstance(build_tokenizer(build_data_config()), ByteTokenizer)


@pytest.mark.parametrize("dataset_type", ["text", "synthetic"])
def test_a_path_is_a_tokenizer_of_any_data(
    build_data_config: BuildDataConfig, write_tokenizer: Callable[..., Path], dataset_type: str
) -> None:
    """The file and its folder are the same tokenizer, which is read again when the file is another."""
    folder = write_tokenizer("words")
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = build_tokenizer(build_data_config(dataset_type=dataset_type, tokenizer_path=str(path)))
        assert isinstance(tokenizer, JsonTokenizer)
        assert tokenizer.encode("w0 w59") == [4, 63]
    write_tokenizer("byte_level")
    tokenizer = build_tokenizer(build_data_config(tokenizer_path=str(folder)))
    assert tokenizer is not None and tokenizer.vocab_size == 263


def test_a_vocabulary_that_is_too_small_is_refused_with_both_numbers(write_tokenizer: Callable[..., Path]) -> None:
    """Rows of the model beyond the tokenizer are fine."""
    tokenizer = JsonTokenizer(write_tokenizer("words"))
    check_vocabulary(tokenizer, 64)
    check_vocabulary(tokenizer, 128)
    with pytest.raises(ConfigError, match=r"vocab_size=63 is smaller than the 64 of the tokenizer of tokenizer_path"):
        check_vocabulary(tokenizer, 63)
    with pytest.raises(ConfigError, match=r"vocab_size=257 is smaller than the 258 of the byte tokenizer"):
        check_vocabulary(ByteTokenizer(), 257)
