"""`maxlite config`: values with their sources, and the difference of two configs."""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape

from maxlite.config.load import load_config
from maxlite.config.schema import KEYS, Config
from maxlite.config.shown import shown_values
from maxlite.errors import ConfigError


def print_config(config: Config, json_output: bool) -> None:
    """Prints every key: `key: value  # source`, or one JSON object `{key: {value, source}}`."""
    values = shown_values(config)
    if json_output:
        rows = {name: {"value": value, "source": config.sources[name]} for name, value in values.items()}
        print(json.dumps(rows))
        return
    console = Console(soft_wrap=True, highlight=False)
    section = None
    for name, value in values.items():
        if KEYS[name].section != section:
            section = KEYS[name].section
            console.print(f"[bold]# --- {section} ---[/bold]")
        source = config.sources[name]
        style = "dim" if source.startswith("base.yml") else "green"
        console.print(f"{escape(f'{name}: {_yaml(value)}'):<48} [{style}]# {escape(source)}[/{style}]")


def print_diff(paths: list[str], json_output: bool) -> None:
    """Prints the keys in which two configs differ."""
    if len(paths) != 2:
        raise ConfigError("config diff takes two YAML files or run directories: maxlite config diff A B")
    first, second = (shown_values(load_config(path, environment={})) for path in paths)
    rows = {name: [first[name], second[name]] for name in first if first[name] != second[name]}
    if json_output:
        print(json.dumps(rows))
        return
    for name, (left, right) in rows.items():
        print(f"{name}: {_yaml(left)} -> {_yaml(right)}")
    if not rows:
        print("no difference")


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
