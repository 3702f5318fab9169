import importlib.util
import re
from math import prod

import pytest

from maxlite.errors import ConfigError
from maxlite.parallel.topology import build_topology, device_spec, topology_names, torus


def test_names_are_those_of_the_clouds():
    names = topology_names()
    for name in ("v4-8", "v5e-1", "v5e-16", "v5e-256", "v5p-8", "v5p-128", "v6e-8", "v6e-256", "tpu7x-8"):
        assert name in names
    assert not {"v5e-2", "v5e-512", "v5p-4", "v6e-3"} & set(names)


@pytest.mark.parametrize(
    ("chips", "flat", "shape"),
    [
        (1, True, (1, 1)),
        (8, True, (2, 4)),
        (128, True, (8, 16)),
        (4, False, (2, 2, 1)),
        (16, False, (2, 2, 4)),
        (64, False, (4, 4, 4)),
        (512, False, (8, 8, 8)),
    ],
)
def test_a_slice_is_as_near_to_a_cube_as_it_can_be(chips, flat, shape):
    assert torus(chips, flat) == shape


@pytest.mark.parametrize("name", ["v5e-15", "v9-8", "v5e", "H100-8"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(ConfigError, match=rf"compile_topology={re.escape(name)} is not known.*v5e-1, 4, 8, .*v6e"):
        build_topology(name, 1)


def test_without_the_compiler_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "maxlite\[tpu\]"'):
        build_topology("v5e-16", 1)


def test_what_a_device_can_do():
    spec = device_spec("TPU v5 lite")
    assert spec is not None and 15 * 2**30 < spec.memory_bytes < 16 * 2**30
    assert device_spec("cpu") is None


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "slices", "devices", "kind"),
    [
        ("v4-8", 1, 4, "TPU v4"),
        ("v5e-16", 2, 32, "TPU v5 lite"),
        ("v5p-128", 1, 64, "TPU v5"),
        ("v6e-256", 1, 256, "TPU v6 lite"),
        # The two cores of a chip are devices of their own.
        ("tpu7x-8", 1, 8, "TPU7x"),
    ],
)
def test_devices_of_slices(name, slices, devices, kind):
    topology = build_topology(name, slices)
    assert len(topology.devices) == devices and topology.devices[0].device_kind == kind
    assert device_spec(kind) == topology.spec
    places = {tuple(device.coords) for device in topology.devices}
    assert len(places) == prod(topology.shape) and max(places) == tuple(size - 1 for size in (*topology.shape, 1))[:3]
    assert {getattr(device, "slice_index", 0) for device in topology.devices} == set(range(slices))
