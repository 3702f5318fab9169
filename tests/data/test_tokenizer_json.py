"""Marks, special tokens and end ids of a tokenizer.json and the files beside it; transformers agrees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
WriteTokenizer = Callable[..., Path]
BEGIN, END, IM_START, THINK = 259, 260, 261, 262
LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
WORDS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_prompts_and_text_of_a_trained_model() -> None:
    """The goldens of stories260K, which were made with its published tokenizer."""
    tokenizer = JsonTokenizer(STORIES)
    for golden in json.loads((STORIES / "golden_generation.json").read_text()):
        assert tokenizer.encode_prompt(golden["prompt"]) == golden["ids"]
        assert tokenizer.encode(golden["prompt"]) == golden["ids"][1:]
        assert tokenizer.decode(golden["greedy_ids"]) == golden["greedy_text"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids, tokenizer.vocab_size) == (1, 2, (1, 2), 512)


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize(("name", "marks"), [("byte_level", []), ("byte_level_with_begin_mark", [BEGIN])])
def test_the_template_decides(
    write_tokenizer: WriteTokenizer, name: str, marks: list[int], add_bos_token: bool | None
) -> None:
    """A bos_token is only a name, and add_bos_token what an older template was made from; no mark comes twice."""
    settings = LLAMA if add_bos_token is None else LLAMA | {"add_bos_token": add_bos_token}
    tokenizer = JsonTokenizer(write_tokenizer(name, tokenizer_config=settings))
    hi = tokenizer.encode("hi")
    assert len(hi) == 1
    assert tokenizer.encode_prompt("hi") == marks + hi
    assert tokenizer.encode_prompt("") == marks
    assert tokenizer.bos_id == (marks[0] if marks else None)
    assert tokenizer.eos_id == END


def test_special_tokens_in_a_text_are_one_id_and_have_no_text(write_tokenizer: WriteTokenizer) -> None:
    """An added token that is not special, such as <think>, is one id too, and has text."""
    tokenizer = JsonTokenizer(write_tokenizer("byte_level", tokenizer_config=LLAMA))
    ids = tokenizer.encode("<|im_start|>hi<think><|end|>")
    assert ids == [IM_START, *tokenizer.encode("hi"), THINK, END]
    assert tokenizer.decode([BEGIN, *ids, 999]) == "hi<think>"


@pytest.mark.parametrize("form", ["text", "object", "older file"])
def test_tokens_named_beside_the_tokenizer_become_special(write_tokenizer: WriteTokenizer, form: str) -> None:
    """In this file the marks are words; the settings say what they are, in any of three forms."""
    names = {key: value for key, value in WORDS.items() if key.endswith("_token")}
    written: dict[str, Any] = names if form == "text" else {key: {"content": name} for key, name in names.items()}
    file = "special_tokens_map" if form == "older file" else "tokenizer_config"
    tokenizer = JsonTokenizer(write_tokenizer("words", **{file: written | {"pad_token": "not a word"}}))
    assert tokenizer.eos_id == 2 and tokenizer.end_ids == (2,)
    assert tokenizer.encode("w0</s>w1 what") == [4, 2, 5, 3]
    assert tokenizer.decode([1, 4, 3, 5, 2]) == "w0 w1"
    assert tokenizer.vocab_size == 64


def test_lists_of_special_tokens(write_tokenizer: WriteTokenizer) -> None:
    """The older and the newer key, texts and objects."""
    for key, value in (
        ("additional_special_tokens", ["w7", {"content": "w8"}]),
        ("extra_special_tokens", ["w7", "w8"]),
        ("extra_special_tokens", {"image": "w7", "sound": "w8"}),
    ):
        tokenizer = JsonTokenizer(write_tokenizer("words", tokenizer_config={key: value}))
        assert tokenizer.decode([4, 11, 12, 5]) == "w0 w1"


def test_end_ids_are_those_of_all_files(write_tokenizer: WriteTokenizer) -> None:
    """The tokenizer's end mark, config.json's and generation_config.json's (P43)."""
    files = {"config": {"eos_token_id": [9, 63]}, "generation_config": {"eos_token_id": 30}}
    assert JsonTokenizer(write_tokenizer("words", tokenizer_config=WORDS, **files)).end_ids == (2, 9, 30, 63)


def test_without_settings_the_model_names_the_end_mark(write_tokenizer: WriteTokenizer) -> None:
    """And without a model either there is none."""
    assert JsonTokenizer(write_tokenizer("words")).eos_id is None
    assert JsonTokenizer(write_tokenizer("words")).end_ids == ()
    assert JsonTokenizer(write_tokenizer("words", config={"eos_token_id": 2})).eos_id == 2


def test_special_tokens_may_lie_above_the_vocabulary(write_tokenizer: WriteTokenizer) -> None:
    """A mark for images that no text has needs no row, but the end mark and a word do."""
    folder = write_tokenizer("words")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<image>", "<end>"])
    backend.save(str(folder / "tokenizer.json"))
    assert JsonTokenizer(folder).vocab_size == 64
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert JsonTokenizer(folder).vocab_size == 66
    backend.add_tokens(["word"])
    backend.save(str(folder / "tokenizer.json"))
    assert JsonTokenizer(folder).vocab_size == 67


def test_texts_are_neither_cut_nor_filled(write_tokenizer: WriteTokenizer) -> None:
    """A file may hold how its last user cut and filled texts, which is no business of ours."""
    folder = write_tokenizer("words")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = JsonTokenizer(folder)
    assert tokenizer.encode("w0") == tokenizer.encode_prompt("w0") == [4]
    assert len(tokenizer.encode("w0 w0 w0 w0")) == 4


def test_lone_surrogate_is_an_error(write_tokenizer: WriteTokenizer) -> None:
    """It has no UTF-8; the message says where it is."""
    tokenizer = JsonTokenizer(write_tokenizer("byte_level"))
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(DataError, match="character 2"):
            encode("ab\ud800")


def test_what_is_no_tokenizer(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    """Nothing there, another format, and broken files, by name."""
    (tmp_path / "vocab.txt").touch()
    for path in (tmp_path, tmp_path / "missing", str(tmp_path / "tokenizer.json")):
        with pytest.raises(ConfigError, match=r"tokenizer_path=.* is no tokenizer's file and no folder with one: "):
            JsonTokenizer(path)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json can't be read as JSON"):
        JsonTokenizer(write_tokenizer("words", tokenizer_config="{"))
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer that can be read"):
        JsonTokenizer(tmp_path)


def test_where_tokens_start(write_tokenizer: WriteTokenizer) -> None:
    """With the spaces in front of a word, though what adds the begin mark trims these; bytes where their character."""
    for name in ("byte_level", "byte_level_with_begin_mark"):
        folder = write_tokenizer(name)
        written = json.loads((folder / "tokenizer.json").read_text())
        if name == "byte_level_with_begin_mark":
            written["post_processor"]["processors"][0]["trim_offsets"] = True
        (folder / "tokenizer.json").write_text(json.dumps(written))
        tokenizer = JsonTokenizer(folder)
        hi, space_hi = tokenizer.encode("hi") + tokenizer.encode(" hi")
        texts = ["hi hi<|end|>é ", "", "a"]
        assert tokenizer.encode_batch_with_starts(texts) == [
            ([hi, space_hi, END, *tokenizer.encode("é"), *tokenizer.encode(" ")], [0, 2, 5, 12, 12, 13]),
            ([], []),
            (tokenizer.encode("a"), [0]),
        ]
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_starts_rise_in_every_tokenizer(any_tokenizer: Path) -> None:
    """And no token starts behind the text."""
    tokenizer = JsonTokenizer(any_tokenizer)
    for text in ("  a\n\nb é🐍 ab a", "w0  w1 ", "\u65e5\u672c a"):
        ((ids, starts),) = tokenizer.encode_batch_with_starts([text])
        assert ids == tokenizer.encode(text) and len(ids) == len(starts)
        assert starts == sorted(starts) and all(0 <= start < len(text) for start in starts)


def test_batches_refuse_lone_surrogates(write_tokenizer: WriteTokenizer) -> None:
    """As one text does."""
    tokenizer = JsonTokenizer(write_tokenizer("byte_level"))
    for encode in (tokenizer.encode_batch, tokenizer.encode_batch_with_starts):
        with pytest.raises(DataError, match="character 2"):
            encode(["a", "ab\ud800"])


def test_the_digest_tells_tokenizers_apart(write_tokenizer: WriteTokenizer) -> None:
    """By words, template, special tokens and end mark; not by names, templates of chats or where the files lie."""
    digests = [
        JsonTokenizer(write_tokenizer(name, tokenizer_config=settings)).digest
        for name, settings in (
            ("words", {}),
            ("words", {"eos_token": "</s>"}),
            ("words", {"pad_token": "w7"}),
            ("byte_level", {}),
            ("byte_level_with_begin_mark", {}),
        )
    ]
    assert len(set(digests)) == len(digests)
    folder = write_tokenizer("words", tokenizer_config={"chat_template": "x", "model_max_length": 5})
    assert JsonTokenizer(folder).digest == JsonTokenizer(folder / "tokenizer.json").digest == digests[0]


def test_chat_template_and_names_of_marks(write_tokenizer: WriteTokenizer) -> None:
    """A template is a text, one of several, or a file, which goes first."""
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for found, expected in ((None, None), ("c", "c"), (several, "d"), (several[:1], None)):
        folder = write_tokenizer("words", tokenizer_config=WORDS | {"chat_template": found})
        tokenizer = JsonTokenizer(folder)
        assert tokenizer.chat_template == expected
        assert tokenizer.special_names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    with pytest.raises(ConfigError, match="chat_template must be a text or a list of named texts, not int"):
        _ = JsonTokenizer(write_tokenizer("words", tokenizer_config={"chat_template": 5})).chat_template
    (folder / "chat_template.jinja").write_text("{{ file }}\n")
    assert JsonTokenizer(folder).chat_template == "{{ file }}\n"


TRANSFORMERS_CASES = [
    ("byte_level", LLAMA),
    ("byte_level", LLAMA | {"add_bos_token": True, "add_eos_token": True}),
    ("byte_level", LLAMA | {"bos_token": None, "add_bos_token": False}),
    ("byte_level_with_begin_mark", LLAMA),
    ("byte_level_with_begin_mark", LLAMA | {"add_bos_token": False}),
    ("byte_level_with_begin_mark", LLAMA | {"add_bos_token": True}),
    ("words", WORDS),
    ("words", WORDS | {"add_bos_token": True}),
    ("words", WORDS | {"extra_special_tokens": ["w7"], "clean_up_tokenization_spaces": False}),
    ("word_starts", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "settings"), TRANSFORMERS_CASES)
def test_transformers_agrees(write_tokenizer: WriteTokenizer, name: str, settings: dict[str, Any]) -> None:
    """Prompts and text are AutoTokenizer's, from the folder as it is and as transformers writes it anew."""
    folder = write_tokenizer(name, tokenizer_config=settings)
    reference = check_against_transformers(folder)
    reference.save_pretrained(folder.parent / "saved")
    check_against_transformers(folder.parent / "saved")


@pytest.mark.torch
def test_transformers_agrees_about_a_trained_model() -> None:
    """Its folder has a config.json too, by which AutoTokenizer chooses a class."""
    check_against_transformers(STORIES)


def check_against_transformers(folder: Path) -> Any:
    """Compares texts with and without special tokens in them; returns the reference."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = JsonTokenizer(folder)
    assert tokenizer.eos_id == reference.eos_token_id
    for text in ("hi a w1 w2", "", "  a\n\nb é🐍", "<|im_start|>hi</s> w7<|end|> w3 ?", "<s>a<think> b<|begin|>"):
        ids = reference(text)["input_ids"]
        assert tokenizer.encode_prompt(text) == ids
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    return reference
