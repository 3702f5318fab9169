"""A config's values as JSON has them, for people and programs to read."""

import math
from typing import Any

from maxlite.config.schema import LEVELS, Config


def shown_values(config: Config) -> dict[str, Any]:
    """Returns key -> value in JSON types; with fake devices the mesh is known, so a degree of -1 is filled in."""
    values = {name: _listed(value) for name, value in config.flat().items()}
    if config.run.cpu_devices:
        for level in LEVELS:
            names = config.parallel.degrees(level)
            # Fake devices are one slice.
            total = config.run.cpu_devices if level == "ici" else 1
            fixed = math.prod(values[name] for name in names if values[name] != -1)
            for name in names:
                if values[name] == -1 and total % fixed == 0:
                    values[name] = total // fixed
    return values


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
