"""JSON files of models and tokenizers: one object each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.errors import MaxliteError


def read_json(file: Path, error: type[MaxliteError]) -> dict[str, Any]:
    """Returns the JSON object in `file`. Raises `error` if it can't be read, or holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise error(f"{file} can't be read as JSON: {reason}. Fetch or write it anew.") from reason
    if not isinstance(found, dict):
        raise error(f"{file} must hold a JSON object, not {type(found).__name__}. Fetch or write it anew.")
    return found


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` as people read it."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
