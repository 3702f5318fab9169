"""The byte tokenizer as files that Hugging Face's AutoTokenizer opens."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from maxlite.data.json_files import write_json
from maxlite.data.tokenizer_bytes import NUM_BYTES, ByteTokenizer

BOS, EOS = "<s>", "</s>"


def write_byte_tokenizer(folder: Path, *, add_bos: bool) -> None:
    """Writes tokenizer.json and tokenizer_config.json, by which text has the ids that ByteTokenizer gives it.

    add_bos: whether a text begins with the begin mark, as in the model's training.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = [tokenizers.AddedToken(mark, special=True, normalized=False) for mark in (BOS, EOS)]
    backend.add_special_tokens(marks)
    assert backend.token_to_id(BOS) == ByteTokenizer.bos_id and backend.token_to_id(EOS) == ByteTokenizer.eos_id
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, ByteTokenizer.bos_id)]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)


def byte_characters() -> list[str]:
    """Returns the printable character that stands for each byte in a byte-level tokenizer.json.

    Printable bytes of Latin-1 stand for themselves, and the others for the characters from U+0100 on, in order
    (GPT-2, Radford et al. 2019).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x100 + NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]
