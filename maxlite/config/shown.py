"""A config's values as JSON has them, for people and programs to read."""

from typing import Any

from maxlite.config.degrees import fake_degrees
from maxlite.config.schema import Config
from maxlite.config.values import plain_value


def shown_values(config: Config) -> dict[str, Any]:
    """Returns key -> value in JSON types; with fake devices the mesh is known, so a degree of -1 is filled in."""
    values = {name: plain_value(value) for name, value in config.flat().items()}
    if config.fake_devices:
        values.update(fake_degrees(config.parallel, config.fake_devices))
    return values
