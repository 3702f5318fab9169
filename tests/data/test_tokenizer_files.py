import pytest

from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_files import write_byte_tokenizer
from maxlite.data.tokenizer_json import JsonTokenizer

TEXTS = ["plain", "Grüße, 世界 🙂\n\t\x00 end", "".join(map(chr, range(256))), "", " two  spaces "]


@pytest.mark.parametrize("add_bos", [True, False])
def test_ids_and_text_are_those_of_the_byte_tokenizer(add_bos, tmp_path):
    write_byte_tokenizer(tmp_path, add_bos=add_bos)
    written, bytes_ = JsonTokenizer(tmp_path), ByteTokenizer()
    for text in TEXTS:
        ids = bytes_.encode(text)
        assert written.encode(text) == ids
        assert written.encode_prompt(text) == [bytes_.bos_id] * add_bos + ids
        assert written.decode(ids) == text
    assert written.eos_id == bytes_.eos_id and written.vocab_size == bytes_.vocab_size


@pytest.mark.torch
def test_transformers_opens_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_byte_tokenizer(tmp_path, add_bos=True)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert opened(text)["input_ids"] == [256, *text.encode()]
        assert opened.decode(list(text.encode())) == text
    assert (opened.bos_token_id, opened.eos_token_id) == (256, 257)
