from types import SimpleNamespace

import pytest

from maxlite.estimate.hlo import Collective
from maxlite.estimate.roofline import Rates, build_roofline, crosses_slices, link_bandwidth, mfu_bound
from maxlite.parallel.topology import DeviceSpec

SPEC = DeviceSpec(memory_bytes=100, memory_bandwidth=1000.0, link_bandwidth=10.0, network_bandwidth=1.0)


def device(x, y, slice_index=0):
    return SimpleNamespace(coords=(x, y, 0), slice_index=slice_index)


# Two slices of 2 x 2.
DEVICES = [device(x, y, number) for number in (0, 1) for x in (0, 1) for y in (0, 1)]


def collective(kind, groups, payload=80, trips=()):
    return Collective(kind, payload, groups, (), trips)


def rates(wraps=(False, False)):
    return Rates(100.0, SPEC, wraps)


def test_bandwidth_of_a_ring_is_its_torus_dimensions():
    assert link_bandwidth(DEVICES[:2], rates()) == 10
    assert link_bandwidth(DEVICES[:2], rates((False, True))) == 20
    assert link_bandwidth(DEVICES[:4], rates()) == 20
    assert link_bandwidth(DEVICES[:4], rates((True, True))) == 40
    # Two cores of a chip.
    assert link_bandwidth([device(0, 0), device(0, 0)], rates()) == 1000


@pytest.mark.parametrize(("kind", "share"), [("all-gather", 0.5), ("reduce-scatter", 0.5), ("all-reduce", 1.0)])
def test_a_group_of_two_sends_half_of_the_buffer_each_way(kind, share):
    roofline = build_roofline(500, 2000, [collective(kind, ((0, 1), (2, 3)), trips=(3,))], DEVICES, rates())
    assert (roofline.compute, roofline.memory, roofline.network) == (5, 2, 0)
    assert roofline.links == pytest.approx(3 * 80 * share / 10)
    assert roofline.limit == ("compute" if roofline.compute > roofline.links else "links")
    assert roofline.bound == max(5, roofline.links) and roofline.serial == pytest.approx(7 + roofline.links)


def test_a_group_over_slices_sends_each_share_over_the_network():
    across = collective("all-reduce", ((0, 1, 4, 5), (2, 3, 6, 7)))
    roofline = build_roofline(0, 0, [across], DEVICES, rates())
    assert crosses_slices(across, DEVICES)
    assert roofline.links == pytest.approx(2 * 80 / 2 / 10)
    assert roofline.network == pytest.approx(2 * 80 / 2 / 2 / 1.0)
    alone = build_roofline(0, 0, [collective("all-gather", ((0, 4),))], DEVICES, rates())
    assert (alone.links, alone.network) == (0, 40)


def test_a_permutation_uses_the_links_of_its_ring_or_the_network():
    ring = collective("collective-permute", ((0, 1), (1, 3), (3, 2), (2, 0)))
    assert build_roofline(0, 0, [ring], DEVICES, rates()).links == 4
    inside = build_roofline(0, 0, [collective("collective-permute", ((0, 1), (1, 0)))], DEVICES, rates())
    assert (inside.links, inside.network) == (8, 0)
    between = build_roofline(0, 0, [collective("collective-permute", ((0, 4),))], DEVICES, rates())
    assert (between.links, between.network) == (0, 80)


def test_mfu_is_the_models_own_work_over_the_peak():
    assert mfu_bound(50, 1.0, rates()) == 0.5
