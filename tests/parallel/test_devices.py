import jax
import numpy as np
import pytest

from maxlite.errors import ConfigError
from maxlite.parallel.devices import host_value, run_devices


def test_the_first_devices_are_taken(tiny_config):
    assert run_devices(tiny_config("cpu_devices=2").run) == jax.devices()[:2]
    assert run_devices(tiny_config("cpu_devices=0").run) == jax.devices()


def test_too_few_devices(tiny_config):
    with pytest.raises(ConfigError, match="cpu_devices=9, but this process already runs with 8"):
        run_devices(tiny_config("cpu_devices=9").run)


def test_the_whole_of_a_sharded_array():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    array = jax.device_put(np.arange(16.0), sharding)
    np.testing.assert_array_equal(host_value(array), np.arange(16.0))
