"""Turns what was written for a key into the value that its declaration asks for, or says why it can't be."""

import math
import re
from pathlib import PurePath
from typing import Any

import yaml

from maxlite.config.data_schema import DatasetMixture, MixtureSource
from maxlite.config.quant_schema import CALIBRATIONS, QTYPES, QuantRule, QuantRules
from maxlite.config.schema import Key, LogicalAxisRules
from maxlite.config.yaml_file import refuse_unsafe

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")
# Counts and sizes end up in 32-bit integers; only a key with a `maximum` of its own may be larger.
_LARGEST_INTEGER = 2**31 - 1
MAY_BE_EMPTY = frozenset({"prompt"})
_NULLS = ("null", "none", "~")


def parse_value(key: Key, raw: Any) -> Any:
    """Returns the typed value of `raw` (a YAML value, or the text after `key=`).

    Raises:
        ValueError: with a message that says what is allowed; the caller adds the key's name and source.
    """
    if raw is None or (key.optional and isinstance(raw, str) and raw.strip().lower() in _NULLS):
        if not key.optional:
            raise ValueError("null is not allowed")
        return None
    if raw == "" and key.name not in MAY_BE_EMPTY:
        # Nine times in ten a shell variable that is not set.
        raise ValueError("empty; write null to unset a key that may be null" if key.optional else "empty")
    value = _PARSERS[key.type](raw)
    _require_allowed(key, value)
    return value


def describe_allowed(key: Key) -> str:
    """One phrase that says what `key` may be, for messages and reference pages."""
    parts = [_TYPE_NAMES[key.type]]
    if key.choices:
        parts = ["one of " + ", ".join(key.choices)] if key.type is str else ["a list of " + ", ".join(key.choices)]
    if key.above is not None:
        parts.append(f"above {key.above}")
    if key.minimum is not None:
        parts.append(f"at least {key.minimum}")
    if key.maximum is not None:
        parts.append(f"at most {key.maximum}")
    return ", ".join(parts) + (", or null" if key.optional else "")


def _require_allowed(key: Key, value: Any) -> None:
    items = value if isinstance(value, tuple) else (value,)
    if key.choices and any(item not in key.choices for item in items):
        raise ValueError("not a choice")
    if isinstance(value, tuple) and not value:
        raise ValueError("an empty list is not allowed")
    for number in (item for item in items if isinstance(item, int | float) and not isinstance(item, bool)):
        too_low = (key.minimum is not None and number < key.minimum) or (key.above is not None and number <= key.above)
        if too_low or (key.maximum is not None and number > key.maximum):
            raise ValueError("out of range")
        if isinstance(number, int) and key.maximum is None and number > _LARGEST_INTEGER:
            raise ValueError(f"above {_LARGEST_INTEGER}")


def plain_value(value: Any) -> Any:
    """Returns a key's value in the types of YAML and JSON."""
    if isinstance(value, MixtureSource | QuantRule):
        return value._asdict()
    return [plain_value(item) for item in value] if isinstance(value, tuple) else value


def _parse_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false"):
        return raw.strip().lower() == "true"
    raise ValueError("not true or false")


def _parse_int(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.match(raw.strip()):
        return int(raw)
    raise ValueError("not a whole number")


def _parse_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("not a number")
    if isinstance(raw, str) and ("_" in raw or not raw.isascii()):
        raise ValueError("not a number")
    try:
        value = float(raw)
    except (ValueError, OverflowError) as error:
        raise ValueError("not a number") from error
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


def _parse_str(raw: Any) -> str:
    if isinstance(raw, str):
        if "\0" in raw:
            raise ValueError("holds a NUL character")
        return raw
    # A number or boolean that YAML made of an unquoted word has lost its spelling (007 -> 7, no -> false).
    raise ValueError("not text; put it in quotes")


def _parse_list(raw: Any) -> tuple[str, ...]:
    if isinstance(raw, str) and raw.strip().startswith("["):
        raw = _parse_flow(raw, "[a, b]")
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.split(",")]
    if not isinstance(raw, list) or not all(isinstance(item, str) and item for item in raw):
        raise ValueError("not a list of words")
    return tuple(raw)


def _parse_flow(text: str, example: str) -> Any:
    try:
        refuse_unsafe(text, "value")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"not a list like {example}") from error


def _parse_rules(raw: Any) -> LogicalAxisRules:
    if isinstance(raw, str):
        raw = _parse_flow(raw, "[[embed, [fsdp]]]")
    rows = []
    for row in raw if isinstance(raw, list) else [None]:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)):
            raise ValueError("not rows of [logical axis, [mesh axes]]")
        axes = [row[1]] if isinstance(row[1], str) else (row[1] or [])
        if not (isinstance(axes, list) and all(isinstance(axis, str) for axis in axes)):
            raise ValueError("not rows of [logical axis, [mesh axes]]")
        rows.append((row[0], tuple(axes)))
    return tuple(rows)


def _parse_numbers(raw: Any) -> tuple[int, ...]:
    if isinstance(raw, str) and raw.strip().startswith("["):
        raw = _parse_flow(raw, "[64, 128]")
    if isinstance(raw, str):
        raw = raw.split(",")
    return tuple(_parse_int(item) for item in (raw if isinstance(raw, list) else [raw]))


def _parse_mixture(raw: Any) -> DatasetMixture:
    if isinstance(raw, str):
        raw = _parse_flow(raw, "[{path: a.txt, weight: 2}, {path: b.txt, weight: 1}]")
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        raise ValueError("not a list like [{path: a.txt, weight: 2}, {path: b.txt, weight: 1}]")
    sources = tuple(_parse_source(row) for row in raw)
    for part, names in (("path", [source.path for source in sources]), ("name", [source.name for source in sources])):
        twice = [name for place, name in enumerate(names) if name in names[:place]]
        if twice:
            raise ValueError(f"two sources have the {part} {twice[0]}")
    return sources


def _parse_source(row: dict[Any, Any]) -> MixtureSource:
    unknown = sorted(str(name) for name in row if name not in MixtureSource._fields)
    if unknown or "path" not in row or "weight" not in row:
        wrong = f"unknown {unknown[0]}" if unknown else "path or weight is missing"
        raise ValueError(f"{wrong} in {row}; a source has path, weight and, if wanted, epochs and name")
    path, weight = _parse_str(row["path"]), _parse_float(row["weight"])
    epochs = None if row.get("epochs") is None else _parse_int(row["epochs"])
    if weight <= 0 or (epochs is not None and epochs < 1):
        raise ValueError(f"weight must be above 0 and epochs at least 1 in {row}")
    name = _parse_str(row["name"]) if row.get("name") is not None else PurePath(path.rstrip("/*")).stem
    if not _SOURCE_NAME.match(name):
        raise ValueError(f"the name {name!r} of {path} is not of letters, digits, _ . or -; give it another")
    return MixtureSource(path, weight, epochs, name)


def _parse_quant_rules(raw: Any) -> QuantRules:
    example = "[{module_path: '.*/mlp/.*', weight_qtype: int8, act_qtype: int8}]"
    if isinstance(raw, str):
        raw = _parse_flow(raw, example)
    if not isinstance(raw, list) or not raw or not all(isinstance(row, dict) for row in raw):
        raise ValueError(f"not a list like {example}")
    return tuple(_parse_quant_rule(row) for row in raw)


def _parse_quant_rule(row: dict[Any, Any]) -> QuantRule:
    unknown = sorted(str(name) for name in row if name not in QuantRule._fields)
    if unknown or "module_path" not in row:
        wrong = f"unknown {unknown[0]}" if unknown else "module_path is missing"
        raise ValueError(f"{wrong} in {row}; a rule has {', '.join(QuantRule._fields)}")
    pattern = _parse_str(row["module_path"])
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"module_path {pattern!r} is no regular expression: {error}") from error
    allowed = {**dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), QTYPES), "calibration": CALIBRATIONS}
    for name, choices in allowed.items():
        if row.get(name) is not None and row[name] not in choices:
            raise ValueError(f"{name} {row[name]!r} in {row} is none of {', '.join(choices)}")
    size = None if row.get("tile_size") is None else _parse_int(row["tile_size"])
    if size is not None and size < 2:
        raise ValueError(f"tile_size must be at least 2 in {row}")
    given: dict[str, Any] = {name: value for name, value in row.items() if value is not None}
    return QuantRule(**{**given, "tile_size": size})


_PARSERS = {
    DatasetMixture: _parse_mixture,
    tuple[int, ...]: _parse_numbers,
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    tuple[str, ...]: _parse_list,
    LogicalAxisRules: _parse_rules,
    QuantRules: _parse_quant_rules,
}
_TYPE_NAMES = {
    DatasetMixture: "a list of {path, weight, epochs, name}",
    tuple[int, ...]: "a list of whole numbers",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[str, ...]: "a list of words",
    LogicalAxisRules: "rows of [logical axis, [mesh axes]]",
    QuantRules: "a list of {" + ", ".join(QuantRule._fields) + "}",
}
