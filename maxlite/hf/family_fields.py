"""What a family's table of config.json keys is made of: lines that both read a config.json and write one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from maxlite.config.schema import KEYS, ModelConfig
from maxlite.config.values import describe_allowed, parse_value
from maxlite.hf.rules import Ignored

Json = dict[str, Any]
# Our keys as far as they have been read, and what a default is worked out from.
ModelKeys = dict[str, Any]


class Absent:
    """A key that a config.json does not have, which is not always the same as null."""


ABSENT = Absent()


class ConfigReader:
    """One config.json: hands out values, remembers which keys were asked for, collects everything that is wrong.

    where: the file's name in messages. problems: one line each. ignored: tensors that these very keys tell of and
    that are not read.
    """

    def __init__(self, json: Mapping[str, Any], where: str):
        """Nothing has been asked for yet."""
        self.json = json
        self.where = where
        self.problems: list[str] = []
        self.ignored: list[Ignored] = []
        self._asked: set[str] = set()

    def take(self, name: str, *aliases: str) -> Any:
        """Returns the value of `name`, or of another name that versions of the format have for it; ABSENT if none."""
        self._asked |= {name, *aliases}
        given = [(spelling, self.json[spelling]) for spelling in (name, *aliases) if spelling in self.json]
        if any(value != given[0][1] for _, value in given[1:]):
            listed = " and ".join(f"{spelling}={value!r}" for spelling, value in given)
            self.refuse(f"{listed} mean the same key but differ")
        return given[0][1] if given else ABSENT

    def take_given(self, name: str) -> Any:
        """Returns the value of `name`; None if it is absent, where that is the same as null."""
        value = self.take(name)
        return None if value is ABSENT else value

    def take_bool(self, name: str, default: bool) -> bool:
        """Returns a true-or-false key that has no key of ours to itself."""
        return self._take_typed(name, default, lambda value: isinstance(value, bool), "true or false")

    def take_count(self, name: str, default: int, *, least: int = 0) -> int:
        """Returns a whole number of at least `least` that has no key of ours to itself."""
        return self._take_typed(
            name, default, lambda value: is_count(value) and value >= least, f"a whole number of at least {least}"
        )

    def refuse(self, problem: str) -> None:
        """Notes something wrong, after the file's name."""
        self.problems.append(f"{self.where}: {problem}.")

    def unasked(self, ignored: frozenset[str]) -> list[str]:
        """Returns the keys that nobody asked for and that are not knowingly ignored."""
        return sorted(self.json.keys() - self._asked - ignored)

    def _take_typed(self, name: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
        value = self.take_given(name)
        if value is None:
            return default
        if not fits(value):
            self.refuse(f"{name}={value!r}: it must be {allowed}")
            return default
        return value


def is_count(value: Any) -> bool:
    """Says whether a value of a JSON file is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Line(Protocol):
    """One line of a family's table."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Puts keys of ours into `keys`; notes what is wrong in `reader`."""
        ...

    def write(self, model: ModelConfig, json: Json) -> None:
        """Puts keys of config.json into `json`. What it cannot say shows when `json` is read back."""
        ...


class Required:
    """Stands for the default of a key that every config.json must have."""


REQUIRED = Required()


@dataclasses.dataclass(frozen=True)
class Field:
    """A key of config.json that is a key of ours, or several of ours at once.

    default: its value where it is absent: one, a function of the keys read before it, or REQUIRED.
    null: the same for where it is null; without it, null is allowed only if our key may be null.
    unset: what to write where ours is null and transformers wants a value all the same.
    aliases: other names for it. words: their words -> ours; of several for one of ours the first is written.
    whole: transformers takes only whole numbers here. truth: old files have a number, which is true if it is not 0.
    """

    name: str
    keys: str | tuple[str, ...]
    default: Any = REQUIRED
    null: Callable[[ModelKeys], Any] | None = None
    unset: Callable[[ModelConfig], Any] | None = None
    aliases: tuple[str, ...] = ()
    words: Mapping[str, str] | None = None
    whole: bool = False
    truth: bool = False

    @property
    def key(self) -> str:
        """The first of our keys, whose value is written."""
        return self.keys if isinstance(self.keys, str) else self.keys[0]

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads the key, or takes its default."""
        raw = reader.take(self.name, *self.aliases)
        value = self._default(reader, keys) if raw is ABSENT else self._parse(raw, reader, keys)
        for key in (self.keys,) if isinstance(self.keys, str) else self.keys:
            if value is not REQUIRED:
                keys[key] = value

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the key."""
        value = getattr(model, self.key)
        if value is None and self.unset is not None:
            value = self.unset(model)
        if self.words is not None:
            value = next((word for word, ours in self.words.items() if ours == value), value)
        if self.whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        json[self.name] = value

    def _default(self, reader: ConfigReader, keys: ModelKeys) -> Any:
        if self.default is REQUIRED:
            reader.refuse(f"{self.name} is missing")
            return REQUIRED
        return self.default(keys) if callable(self.default) else self.default

    def _parse(self, raw: Any, reader: ConfigReader, keys: ModelKeys) -> Any:
        declared = KEYS[self.key]
        if raw is None and self.null is not None:
            return self.null(keys)
        if self.truth and is_count(raw):
            return bool(raw)
        if self.words is not None:
            if isinstance(raw, str) and raw in self.words:
                return self.words[raw]
            reader.refuse(f"{self.name}={raw!r} is not supported; it may be {', '.join(self.words)}")
            return REQUIRED
        try:
            if isinstance(raw, str):
                raise ValueError("text")
            value = parse_value(declared, raw)
            if self.whole and value is not None and value % 1:
                raise ValueError("not a whole number")
            return value
        except ValueError as error:
            reader.refuse(f"{self.name}={raw!r}: {error}; it must be {describe_allowed(declared)}")
            return REQUIRED


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Keys of ours that this family always has so, and config.json does not say."""

    values: tuple[tuple[str, Any], ...]

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Sets them."""
        keys.update(self.values)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes nothing."""


def fixed(**values: Any) -> Fixed:
    """Returns the line that sets these keys of ours."""
    return Fixed(tuple(values.items()))


@dataclasses.dataclass(frozen=True)
class Expect:
    """A key of config.json that may have only these values: others would need what the family does not have.

    written: the value to write; ABSENT to leave it out. default: what transformers takes if the key is absent, where
    that is not among the allowed.
    """

    name: str
    allowed: tuple[Any, ...]
    written: Any = ABSENT
    default: Any = ABSENT

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Refuses any other value."""
        value = reader.take(self.name)
        value = self.default if value is ABSENT else value
        if value is not ABSENT and value not in self.allowed:
            reader.refuse(f"{self.name}={value!r} is not supported; it may be {_listed(self.allowed)}")

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the key if it has a value to write."""
        if self.written is not ABSENT:
            json[self.name] = self.written


def _listed(values: tuple[Any, ...]) -> str:
    words = {None: "null", True: "true", False: "false"}
    return " or ".join(
        words.get(value, repr(value)) if isinstance(value, bool | None) else repr(value) for value in values
    )
