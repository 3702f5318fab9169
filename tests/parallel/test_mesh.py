import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from maxlite.config.degrees import resolve_degrees
from maxlite.config.load import load_config, mesh_names
from maxlite.errors import ConfigError
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.topology import build_topology


def parallel_of(tiny_config, **degrees):
    return tiny_config(*(f"{name}_parallelism={degree}" for name, degree in degrees.items())).parallel


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({}, (1, 1, 8, 1, 1, 1)),
        ({"ici_fsdp": -1}, (1, 1, 8, 1, 1, 1)),
        ({"ici_fsdp": 2, "ici_tensor": 4}, (1, 1, 2, 1, 1, 4)),
        ({"ici_fsdp": 2, "ici_tensor": -1}, (1, 1, 2, 1, 1, 4)),
        ({"ici_data": -1, "ici_fsdp": 2, "ici_tensor": 2}, (2, 1, 2, 1, 1, 2)),
        ({"ici_pipeline": 2, "ici_context": 2, "ici_expert": -1, "ici_fsdp": 1}, (1, 2, 1, 2, 2, 1)),
        ({"dcn_data": -1, "ici_fsdp": 8}, (1, 1, 8, 1, 1, 1)),
        ({"dcn_data": 1, "dcn_fsdp": -1, "ici_fsdp": 8}, (1, 1, 8, 1, 1, 1)),
        ({"dcn_data": 1, "ici_fsdp": 8}, (1, 1, 8, 1, 1, 1)),
        ({"dcn_data": 2, "ici_fsdp": 4}, (2, 1, 4, 1, 1, 1)),
        ({"dcn_data": 2, "ici_fsdp": -1}, (2, 1, 4, 1, 1, 1)),
    ],
)
def test_degrees_fill_eight_devices(tiny_config, degrees, shape):
    mesh = build_mesh(parallel_of(tiny_config, **degrees), jax.devices()[:8])
    assert mesh.axis_names == ("data", "stage", "fsdp", "context", "expert", "tensor")
    assert tuple(mesh.shape.values()) == shape
    assert set(mesh.devices.flat) == set(jax.devices()[:8])
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_one_device_needs_no_thought(tiny_config):
    assert build_mesh(parallel_of(tiny_config), jax.devices()[:1]).size == 1


def test_degrees_that_do_not_divide_name_devices_product_and_axes(tiny_config):
    with pytest.raises(ConfigError) as caught:
        build_mesh(parallel_of(tiny_config, ici_fsdp=3), jax.devices()[:8])
    message = str(caught.value)
    for part in ("(ici_fsdp_parallelism=3)", "multiply to 3",
                 "is not the 8 devices", "cpu_devices=3", "smoke=true"):  # fmt: skip
        assert part in message, message
    assert "\n" not in message


def test_a_free_degree_that_cannot_be_filled(tiny_config):
    with pytest.raises(
        ConfigError, match=r"ici_fsdp_parallelism=-1.* multiply to 3, which does not divide the 8 devices"
    ):
        build_mesh(parallel_of(tiny_config, ici_tensor=3), jax.devices()[:8])


def test_slices_that_are_not_there(tiny_config):
    with pytest.raises(ConfigError, match=r"dcn_data_parallelism=3.* multiply to 3, which is not the 1 slices"):
        build_mesh(parallel_of(tiny_config, dcn_data=3, ici_fsdp=4), jax.devices()[:8])
    with pytest.raises(ConfigError, match=r"dcn_data_parallelism=4.* multiply to 4, which is not the 2 slices"):
        build_mesh(parallel_of(tiny_config, dcn_data=4, ici_fsdp=4), fake_devices(2, 4))


def fake_devices(num_slices: int, per_slice: int) -> list[SimpleNamespace]:
    """As a TPU pod lists them, slice by slice."""
    return [
        SimpleNamespace(
            id=slice_index * per_slice + n, slice_index=slice_index, process_index=slice_index, platform="cpu",
            device_kind="fake", coords=None,
        )
        for slice_index, n in itertools.product(range(num_slices), range(per_slice))
    ]  # fmt: skip


def test_slices_lie_along_the_axis_with_the_dcn_degree(tiny_config, monkeypatch):
    made = {}

    def record(array, names, *, axis_types):
        made["array"] = array
        return SimpleNamespace(shape=dict(zip(names, array.shape, strict=True)))

    monkeypatch.setattr("maxlite.parallel.mesh.Mesh", record)
    mesh = build_mesh(parallel_of(tiny_config, dcn_data=-1, ici_fsdp=2, ici_tensor=2), fake_devices(2, 4))
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {"data": 2, "fsdp": 2, "tensor": 2}
    slices = np.vectorize(lambda device: device.slice_index)(made["array"]).squeeze()
    assert (slices == np.arange(2).reshape(2, 1, 1)).all()

    build_mesh(parallel_of(tiny_config, dcn_data=1, dcn_fsdp=2, ici_data=2, ici_fsdp=2), fake_devices(2, 4))
    slices = np.vectorize(lambda device: device.slice_index)(made["array"]).squeeze()
    assert slices.shape == (2, 4)
    # Between slices only every second step along fsdp: the inner part of the axis stays within one.
    assert (slices == [0, 0, 1, 1]).all()


@pytest.mark.parametrize(
    "degrees",
    [
        {"dcn_data": 2, "ici_fsdp": 2, "ici_tensor": 2},
        {"dcn_data": 1, "dcn_fsdp": 2, "ici_data": 2, "ici_fsdp": 2},
        {"dcn_data": 1, "dcn_pipeline": 2, "ici_pipeline": 1, "ici_fsdp": 4},
    ],
)
def test_fake_devices_lie_as_those_of_real_slices(tiny_config, monkeypatch, degrees):
    made = []

    def record(array, names, *, axis_types):
        made.append(np.vectorize(lambda device: device.id)(array))

    monkeypatch.setattr("maxlite.parallel.mesh.Mesh", record)
    parallel = parallel_of(tiny_config, **degrees)
    build_mesh(parallel, fake_devices(2, 4))
    build_mesh(parallel, [SimpleNamespace(id=n, platform="cpu") for n in range(8)])
    real, fake = made
    # Within a slice the order is the network's affair; which slice a place of the mesh is in must agree.
    np.testing.assert_array_equal(real // 4, fake // 4)


@pytest.mark.tpu
@pytest.mark.parametrize("name", mesh_names())
@pytest.mark.parametrize(("topology", "slices"), [("v6e-256", 1), ("v5p-128", 1), ("v5e-16", 2)])
def test_presets_fit_the_links_of_real_slices(name, topology, slices):
    config = load_config("base.yml", [f"mesh={name}"], {})
    if name == "pipeline-slices" and slices == 1:
        pytest.skip("a pipeline of one stage is no pipeline")
    devices = build_topology(topology, slices).devices
    assert build_mesh(config.parallel, devices).size == len(devices)


@pytest.mark.tpu
def test_an_axis_may_take_a_part_of_a_dimension_of_the_torus(tiny_config):
    devices = build_topology("v5e-16", 1).devices
    assert build_mesh(parallel_of(tiny_config, ici_fsdp=8, ici_tensor=2), devices).shape["fsdp"] == 8


def test_degrees_of_a_level(tiny_config):
    assert resolve_degrees(parallel_of(tiny_config, dcn_data=-1), "dcn", 4) == (4, 1, 1, 1, 1, 1)
    assert resolve_degrees(parallel_of(tiny_config, ici_tensor=2), "ici", 8) == (1, 1, 4, 1, 1, 2)
