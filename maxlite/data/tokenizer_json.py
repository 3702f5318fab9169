"""The tokenizer of a Hugging Face folder, or of a file of another format, run by the tokenizers library."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from maxlite.data.gguf_header import is_gguf
from maxlite.data.model_folder import TOKENIZER_NAMES, model_end_ids, tokenizer_file
from maxlite.data.stream_decoder import JsonStreamDecoder
from maxlite.data.tokenizer_bytes import utf8_bytes
from maxlite.data.tokenizer_formats import open_tokenizer
from maxlite.data.tokenizer_parts import token_text
from maxlite.errors import ConfigError


class JsonTokenizer:
    """A tokenizer.json, or what stands for one, with what the files beside it say about its special tokens.

    Of a file of another format a tokenizer.json is made first, in memory: see tokenizer_formats.

    Which marks a prompt gets is decided by the template in tokenizer.json alone, as in transformers' AutoTokenizer:
    Llama, Gemma and Mistral files put a begin mark first, Qwen, GPT-2 and GPT-OSS files put none. add_bos_token and
    add_eos_token in tokenizer_config.json say what the template was once made from, and bos_token only names a
    mark, so none of these adds one. add_bos=true asks for the template, add_bos=false for no marks at all.

    A special token that is written out in a text becomes its one id, and has no text when it is decoded. Special
    are the tokens that tokenizer.json calls so, and those of its tokens that tokenizer_config.json or
    special_tokens_map.json name for any purpose.

    bos_id: the mark that the template puts before a text; None if it puts none.
    eos_id: the mark that those files call eos_token; the model's first end id where they name none.
    end_ids: eos_id and all end ids in the model's own files there.
    vocab_size: above every id of text and above both marks. Other special tokens may lie beyond it: Gemma 3 has a
        mark for images that its smallest model has no row for.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the tokenizer's file that `path` is or holds, and the settings beside it.

        Raises ConfigError where there is none, or for a file that can't be read.
        """
        file = tokenizer_file(path)
        if file is None:
            raise ConfigError(
                f"tokenizer_path={path} is no tokenizer's file and no folder with one: {', '.join(TOKENIZER_NAMES)}. "
                "Give such a file or folder, or a GGUF file; save_pretrained of transformers' AutoTokenizer makes a "
                "tokenizer.json from other formats."
            )
        self._backend, settings = open_tokenizer(file)
        self._settings = settings
        folder = file if is_gguf(file) else file.parent
        named = [name for name in _special_names(settings) if self._backend.token_to_id(name) is not None]
        self._backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in named])
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, about in added.items() if about.special)
        model_ends = model_end_ids(folder)
        eos = token_text(settings.get("eos_token"))
        eos_id = None if eos is None else self._backend.token_to_id(eos)
        self.eos_id: int | None = next(iter(model_ends), None) if eos_id is None else eos_id
        self.bos_id: int | None = _first_mark(self._backend)
        marks = {token for token in (self.bos_id, self.eos_id) if token is not None}
        self.end_ids: tuple[int, ...] = tuple(sorted({*model_ends, *(marks & {self.eos_id})}))
        text_ids = set(self._backend.get_vocab().values()) - self._special
        self.vocab_size: int = 1 + max(text_ids | marks, default=-1)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` without marks around it; raises DataError for a lone surrogate."""
        utf8_bytes(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of `text` with the marks of the tokenizer's own template; raises as `encode`."""
        utf8_bytes(text)
        return self._backend.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, as `encode` does; all cores work on them."""
        _check_texts(texts)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch_with_starts(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each text, as `encode` does, and for each id the character where it starts.

        Tokens that are parts of one character start where it does, and a space that the tokenizer puts first starts
        with the first character.
        """
        _check_texts(texts)
        encodings = self._without_template.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, [start for start, _ in encoding.offsets]) for encoding in encodings]

    @property
    def digest(self) -> str:
        """What tokenizers have in common that make the same ids of every text, and the same marks around it."""
        return self._digest

    @property
    def chat_template(self) -> str | None:
        """The Jinja text by which a chat is written; of several, the one called default."""
        found = self._settings.get("chat_template")
        if isinstance(found, list):
            found = next((one.get("template") for one in found if one.get("name") == "default"), None)
        if found is None or isinstance(found, str):
            return found
        raise ConfigError(f"chat_template must be a text or a list of named texts, not {type(found).__name__}.")

    @property
    def special_names(self) -> dict[str, str]:
        """The tokens that a chat template may name: bos_token, eos_token and others, as the settings call them."""
        names = {key: token_text(value) for key, value in self._settings.items() if key.endswith("_token")}
        return {key: name for key, name in names.items() if name is not None}

    def written(self, token: int) -> str | None:
        """Returns how the vocabulary writes `token`; None if it does not have it."""
        return self._backend.id_to_token(token)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens, and ids that the tokenizer does not have, have none."""
        return self._backend.decode(self._with_text(ids))

    def build_stream_decoder(self, after: Iterable[int] = ()) -> JsonStreamDecoder:
        """Returns a decoder for ids that arrive a few at a time and stand after the ids `after`.

        A space before the first word of a text may belong to the tokens and not to the text, so what stands before
        matters.
        """
        return JsonStreamDecoder(self._backend, self._with_text, self._with_text(after))

    @functools.cached_property
    def _digest(self) -> str:
        special = [self.bos_id, self.eos_id, *sorted(self._special)]
        return hashlib.blake2b(f"{special}\n{self._backend.to_str()}".encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _without_template(self) -> tokenizers.Tokenizer:
        # What adds marks may also move where a token starts past its spaces.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = None
        return backend

    def _with_text(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._special and self.written(token) is not None]


def _special_names(settings: dict[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        listed: list[Any] = []
        if key.endswith("_token"):
            listed = [value]
        elif key in ("additional_special_tokens", "extra_special_tokens"):
            listed = list(value.values()) if isinstance(value, dict) else value or []
        yield from (name for name in map(token_text, listed) if name is not None)


def _first_mark(backend: tokenizers.Tokenizer) -> int | None:
    encoding = backend.encode("a")
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def _check_texts(texts: list[str]) -> None:
    for text in texts:
        utf8_bytes(text)
