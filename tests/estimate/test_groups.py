import pytest

from maxlite.estimate.groups import Layout, axes_of, parse_groups, parse_pairs, parse_slice_groups

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, use_global_device_ids=true, dims={{9}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8], dimensions={0}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        # Numbers 0..7 as 4 rows of 2, transposed to 2 rows of 4.
        ("[2,4]<=[4,2]T(1,0), x", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, x", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # The order of the axes is that of the devices in a group.
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        # Of an axis of 8: its outer half, and the 4 inside of it.
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_every_notation_of_groups(text, groups):
    assert parse_groups(text, 8) == groups


def test_an_unknown_notation_is_an_error():
    with pytest.raises(ValueError, match="not known"):
        parse_groups("<<0>>", 8)


def test_pairs():
    assert parse_pairs("{{0,1},{1,0}}, channel_id=3") == ((0, 1), (1, 0))
    assert parse_pairs("{}, channel_id=3") == ()


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3)), ("tensor",)),
        (((0, 2), (1, 3)), ("fsdp",)),
        (((0, 4),), ("data",)),
        (((0, 2, 4, 6),), ("data", "fsdp")),
        (((3,),), ()),
    ],
)
def test_axes_are_those_along_which_a_group_differs(groups, axes):
    assert axes_of(groups, MESH) == axes


def test_devices_of_slices():
    ids = tuple(100_000 * number + place for number in (1, 2) for place in range(4))
    # The inner part of data is within slices, so a slice has every second pair.
    layout = Layout({"data": 4, "tensor": 2}, (*ids[:2], *ids[4:6], *ids[2:4], *ids[6:]), (0, 0, 1, 1, 0, 0, 1, 1))
    assert layout.of_slice(((0, 2), (1, 3))) == ((0, 4), (1, 5))
    between = parse_slice_groups("{1,2}x{0:1}")
    assert between == ((100_000, 200_000), (100_001, 200_001))
    assert layout.of_ids(between) == ((0, 2), (1, 3))
    assert parse_slice_groups("{{100000,200000},{100001,200001}},_other=3") == between
    assert parse_slice_groups("{{100000->200001},{200000->100001}}") == ((100_000, 200_001), (200_000, 100_001))
