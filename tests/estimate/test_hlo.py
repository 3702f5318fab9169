"""Programs of this machine's compiler, and pieces of what the TPU compiler writes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.estimate.groups import Layout, layout_of
from maxlite.estimate.hlo import Program, shapes_of

LAYERS, WIDTH, HIDDEN, ROWS = 3, 32, 64, 16
ONE_SLICE = Layout({"fsdp": 4, "tensor": 2}, tuple(range(8)), (0,) * 8)


def compiled_text(mesh, weights, batch):
    """A training step of a residual network in a loop over its layers."""

    def loss(params, x):
        def layer(x, weights):
            up, down = weights
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), NamedSharding(mesh, batch))
            return x + hidden @ down, None

        x, _ = jax.lax.scan(layer, x, params)
        return jnp.sum(x**2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    params = tuple(
        jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((WIDTH, HIDDEN), (HIDDEN, WIDTH)), weights, strict=True)
    )
    rows = NamedSharding(mesh, PartitionSpec(batch[0]))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    return jax.jit(step).lower(params, x).compile().as_text()


def summed(collectives):
    return Counter((c.kind, c.axes, c.loops) for c in collectives)


def test_fully_sharded_weights_are_gathered_in_each_turn_of_the_layers_loop():
    mesh = Mesh(np.array(jax.devices()).reshape(1, 8, 1), ("data", "fsdp", "tensor"))
    weights = (PartitionSpec(None, "fsdp"), PartitionSpec(None, None, "fsdp"))
    text = compiled_text(mesh, weights, PartitionSpec("fsdp", None))
    collectives = Program(text).collectives(layout_of(mesh))
    gathers = [c for c in collectives if c.kind == "all-gather"]
    # Forward up and down, backward up and down; none outside the loop.
    assert {c.loops for c in gathers} == {(LAYERS,)}
    assert sum(c.times for c in gathers) in (3 * LAYERS, 4 * LAYERS)
    assert all(c.axes == ("fsdp",) and c.group_size == 8 for c in gathers)
    for gather in gathers:
        assert gather.payload == 4 * WIDTH * HIDDEN
        assert gather.sent == 4 * WIDTH * HIDDEN * 7 // 8
    # The gradients of both weights are summed over the batch, once a layer.
    summed_bytes = sum(c.times * c.payload for c in collectives if c.kind in ("all-reduce", "reduce-scatter"))
    assert summed_bytes == LAYERS * 2 * 4 * WIDTH * HIDDEN


def test_data_and_tensor_parallel_sums_go_along_their_own_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1, 2), ("data", "fsdp", "tensor"))
    weights = (PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor"))
    text = compiled_text(mesh, weights, PartitionSpec("data", "tensor"))
    collectives = Program(text).collectives(layout_of(mesh))
    assert {c.kind for c in collectives} == {"all-reduce"}
    bytes_along = Counter()
    for collective in collectives:
        (axis,) = collective.axes
        bytes_along[axis] += collective.times * collective.payload
    # Each layer sums its output over tensor, and the gradient of its input; a device has 4 rows.
    assert bytes_along["tensor"] == LAYERS * 2 * 4 * (ROWS // 4) * WIDTH
    assert bytes_along["data"] == LAYERS * 2 * 4 * WIDTH * HIDDEN // 2


HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def entry(*lines):
    return "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *[f"  {line}" for line in lines], "}"])


def collectives_of(text, layout=ONE_SLICE):
    return Program(text).collectives(layout)


def test_a_pair_of_start_and_done_counts_once():
    text = HEAD + entry(
        "%p = f32[8]{0:T(128)} parameter(0)",
        "%s = (f32[8]{0:T(128)}, f32[32]{0:T(128)S(1)}) all-gather-start(%p), channel_id=1,"
        " replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true",
        "ROOT %d = f32[32]{0:T(128)S(1)} all-gather-done(%s)",
    )
    (gather,) = collectives_of(text)
    assert (gather.kind, gather.axes, gather.payload, gather.sent) == ("all-gather", ("fsdp",), 128, 96)


def test_a_wrapped_start_is_found_where_it_is_called():
    inner = """%wrapped (q: bf16[32]) -> bf16[8] {
  %q = bf16[32]{0} parameter(0)
  ROOT %rs = bf16[8]{0} reduce-scatter(%q), channel_id=4, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

"""
    text = (HEAD + ADD + inner) + entry(
        "%p = bf16[32]{0} parameter(0)",
        "%s = ((bf16[32]{0}), bf16[8]{0}, s32[]) async-start(%p), calls=%wrapped",
        "ROOT %d = bf16[8]{0} async-done(%s)",
    )
    (scatter,) = collectives_of(text)
    # The group's whole buffer is 32 numbers of two bytes, and a device sends three quarters of it.
    assert (scatter.kind, scatter.axes, scatter.payload, scatter.sent) == ("reduce-scatter", ("fsdp",), 64, 48)


def test_one_channel_over_several_fusions_is_one_collective():
    fusions = "".join(
        f"""%fused.{index} (q: f32[8]) -> f32[32] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %g = f32[32]{{0}} all-gather(%q), channel_id={channel}, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}
}}

"""
        for index, channel in enumerate((7, 7, 7, 8))
    )
    calls = [f"%f.{index} = f32[32]{{0}} fusion(%p), kind=kCustom, calls=%fused.{index}" for index in range(4)]
    assert len(collectives_of(HEAD + fusions + entry("%p = f32[8]{0} parameter(0)", *calls))) == 2


def test_an_all_reduce_that_is_cut_at_once_is_a_reduce_scatter():
    inner = """%all-reduce-scatter.3 (q: f32[32]) -> f32[8] {
  %q = f32[32]{0} parameter(0)
  %r = f32[32]{0} all-reduce(%q), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %cut = f32[8]{0} dynamic-slice(%r, %start), dynamic_slice_sizes={8}
}

"""
    text = (HEAD + ADD + inner) + entry(
        "%p = f32[32]{0} parameter(0)",
        "ROOT %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3",
    )
    (scatter,) = collectives_of(text)
    assert (scatter.kind, scatter.payload, scatter.sent) == ("reduce-scatter", 128, 96)


LOOP = """%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %v = f32[8]{0} get-tuple-element(%c), index=1
  %r = f32[8]{0} all-reduce(%v), replica_groups={}, to_apply=%add
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}

%cond (c: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %c = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

"""


@pytest.mark.parametrize(
    ("start", "note", "trips"),
    [
        ("%zero = s32[] constant(1)", "", 4),
        ("%one = s32[] constant(2)\n  %zero = s32[] copy(%one)", "", 3),
        ("%zero = s32[] add(%x, %x)", "", None),
        (
            "%zero = s32[] add(%x, %x)",
            ', backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}',
            6,
        ),
    ],
)
def test_trip_counts_are_read_from_the_note_or_the_condition(start, note, trips):
    text = (HEAD + ADD + LOOP) + entry(
        "%p = f32[8]{0} parameter(0)",
        start,
        "%carried = (s32[], f32[8]{0}) tuple(%zero, %p)",
        f"ROOT %w = (s32[], f32[8]{{0}}) while(%carried), condition=%cond, body=%body{note}",
    )
    (reduced,) = collectives_of(text)
    assert reduced.loops == (trips,)
    assert reduced.times == (trips or 1)
    assert reduced.axes == ("fsdp", "tensor") and reduced.sent == 2 * 32 * 7 // 8


def test_loops_in_loops_multiply():
    outer = LOOP.replace("%body", "%outer_body").replace("%cond", "%outer_cond")
    outer = outer.replace("%r = f32[8]{0} all-reduce(%v), replica_groups={}, to_apply=%add", INNER_LOOP)
    text = (HEAD + ADD + LOOP + outer) + entry(
        "%p = f32[8]{0} parameter(0)",
        "%zero = s32[] constant(0)",
        "%carried = (s32[], f32[8]{0}) tuple(%zero, %p)",
        "ROOT %w = (s32[], f32[8]{0}) while(%carried), condition=%outer_cond, body=%outer_body",
    )
    (reduced,) = collectives_of(text)
    assert reduced.loops == (5, 3) and reduced.times == 15


INNER_LOOP = """%two = s32[] constant(2)
  %inside = (s32[], f32[8]{0}) tuple(%two, %v)
  %w = (s32[], f32[8]{0}) while(%inside), condition=%cond, body=%body
  %r = f32[8]{0} get-tuple-element(%w), index=1"""


def test_what_goes_between_slices_is_read_from_its_recv():
    layout = Layout(
        {"data": 2, "fsdp": 2, "tensor": 2},
        (100000, 100001, 100002, 100003, *range(200000, 200004)),
        (0,) * 4 + (1,) * 4,
    )
    note = (
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = HEAD.replace("=8", "=4") + entry(
        "%p = f32[8]{0} parameter(0)",
        "%s = f32[8]{0} all-reduce(%p), replica_groups={{0,2},{1,3}}, to_apply=%add",
        "%token = token[] after-all()",
        f"%send = (f32[8]{{0}}, u32[], token[]) send(%s, %token), channel_id=2, is_host_transfer=true, {note}",
        f"%recv = (f32[8]{{0}}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, {note}",
        "ROOT %done = (f32[8]{0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true",
    )
    inside, between = collectives_of(text, layout)
    assert (inside.kind, inside.axes) == ("all-reduce", ("fsdp",))
    assert (between.kind, between.axes, between.payload) == ("all-reduce", ("data",), 32)
    assert between.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_shapes():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[7]{0}, s4[10], f8e4m3fn[<=4], u32[], token[])"
    assert [shape.bytes for shape in shapes_of(text)] == [12, 7, 5, 4, 4, 0]
