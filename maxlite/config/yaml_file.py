"""Reads a flat YAML file: each key once, plain values only, and the line of each.

A YAML file may come from a stranger. It is parsed without tags that build objects, aliases are refused (they
can blow up a small file), and `${...}` stays text (interpolation can read environment variables).
"""

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maxlite.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 8
# libyaml's, where PyYAML was built with it, takes a twentieth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value, where it was given, and how a plain scalar was spelled (007 stays 007 for a key that takes text)."""

    value: Any
    source: str
    text: str | None = None


def read_yaml(path: Path, label: str) -> tuple[dict[str, Entry], list[str]]:
    """Reads `path` and returns its entries and the problems found; `label` names the file in both.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    text = _read_text(path, label)
    try:
        refuse_unsafe(text, label)
        root = yaml.compose(text, Loader=_LOADER)
        if root is None:
            return {}, []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{label}: expected lines of `key: value`.")
        nodes, problems = _key_nodes(root, label)
        if problems:
            return {}, problems
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{label}: not valid YAML: {' '.join(str(error).split())}") from error
    assert isinstance(values, dict)
    entries = {}
    for name, value in values.items():
        key_node, value_node = nodes[str(name)]
        source = f"{label}:{key_node.start_mark.line + 1}"
        spelled = value_node.value if isinstance(value_node, yaml.ScalarNode) else None
        entries[str(name)] = Entry(value, source, spelled)
    return entries, problems


def _read_text(path: Path, label: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{label}: larger than {MAX_BYTES} bytes; that is no config file.")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read as YAML text: {error}") from error


def refuse_unsafe(text: str, label: str) -> None:
    """Raises ConfigError at the first alias, tag or level too many; one event at a time, so a bomb stays small."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        where = f"{label}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}: YAML aliases (*name) are not supported.")
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"{where}: YAML tags ({event.tag}) are not supported.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}: nested too deeply; a value is a word, a number or a short list.")


def _key_nodes(root: yaml.MappingNode, label: str) -> tuple[dict[str, tuple[yaml.Node, yaml.Node]], list[str]]:
    nodes: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    problems = []
    for key_node, value_node in root.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if key_node.tag != "tag:yaml.org,2002:str":
            problems.append(f"{label}:{line}: expected `key: value`, where the key is a word.")
        elif name in nodes:
            first = nodes[name][0].start_mark.line + 1
            problems.append(f"{label}: {name} is set twice, in lines {first} and {line}; keep one.")
        else:
            nodes[name] = (key_node, value_node)
    return nodes, problems
