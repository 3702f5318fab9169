import pytest

from maxlite.config.degrees import resolve_degrees
from maxlite.config.load import load_config
from maxlite.errors import ConfigError


def test_fake_devices_are_held_against_the_degrees_with_all_other_problems():
    with pytest.raises(ConfigError) as caught:
        load_config("base.yml", ["cpu_devices=8", "ici_fsdp_parallelism=3", "learning_rat=1"], {})
    text = str(caught.value)
    assert "ici_fsdp_parallelism=3" in text and "8 devices" in text and "did you mean learning_rate?" in text


@pytest.mark.parametrize(("free", "expected"), [("data", (4, 1, 2)), ("fsdp", (1, 4, 2))])
def test_one_free_degree_takes_what_is_left(free, expected):
    degrees = {"data": "1", "fsdp": "1", "tensor": "2", free: "-1"}
    config = load_config("base.yml", [f"ici_{axis}_parallelism={degree}" for axis, degree in degrees.items()], {})
    assert resolve_degrees(config.parallel, "ici", 8) == expected
