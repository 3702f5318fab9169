import pytest

from maxlite.config.degrees import fake_degrees, fake_slices, resolve_degrees
from maxlite.config.load import load_config
from maxlite.errors import ConfigError


def test_fake_devices_are_held_against_the_degrees_with_all_other_problems():
    with pytest.raises(ConfigError) as caught:
        load_config("base.yml", ["cpu_devices=8", "ici_fsdp_parallelism=3", "learning_rat=1"], {})
    text = str(caught.value)
    assert "ici_fsdp_parallelism=3" in text and "8 devices" in text and "did you mean learning_rate?" in text


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ("data", (4, 1, 1, 1, 1, 2)),
        ("pipeline", (1, 4, 1, 1, 1, 2)),
        ("fsdp", (1, 1, 4, 1, 1, 2)),
        ("context", (1, 1, 1, 4, 1, 2)),
        ("expert", (1, 1, 1, 1, 4, 2)),
    ],
)
def test_one_free_degree_takes_what_is_left(free, expected):
    degrees = {"data": "1", "fsdp": "1", "tensor": "2", free: "-1"}
    config = load_config("base.yml", [f"ici_{axis}_parallelism={degree}" for axis, degree in degrees.items()], {})
    assert resolve_degrees(config.parallel, "ici", 8) == expected


def test_fake_devices_are_as_many_slices_as_the_dcn_degrees_say():
    def slices(*overrides):
        return fake_slices(load_config("base.yml", overrides, {}).parallel, 8)

    assert slices() == 1
    assert slices("dcn_data_parallelism=2") == 2
    assert slices("dcn_data_parallelism=2", "dcn_fsdp_parallelism=2") == 4
    # What does not fit is left for the message that names it.
    assert slices("dcn_data_parallelism=3") == 1
    found = fake_degrees(load_config("base.yml", ["dcn_data_parallelism=2"], {}).parallel, 8)
    assert {name: degree for name, degree in found.items() if degree != 1} == {
        "dcn_data_parallelism": 2, "ici_fsdp_parallelism": 4
    }  # fmt: skip
