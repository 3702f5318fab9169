"""What is given to cuDNN, run by XLA instead, against the definition; what is refused; what is lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops import cudnn_attention as module
from maxlite.ops.attention_types import AttentionOptions, Tokens
from maxlite.ops.cudnn_attention import cudnn_arguments, cudnn_attention, cudnn_lacks

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 48, 4, 2, 24, 16
PLAIN = AttentionOptions(HEAD_DIM**-0.5, window=None, chunk=None, soft_cap=None)
CASES = {
    "causal": (PLAIN, False),
    "segments": (PLAIN, True),
    "window and segments": (PLAIN._replace(window=7), True),
    "chunk and segments": (PLAIN._replace(chunk=9), True),
    "chunk": (PLAIN._replace(chunk=9), False),
}


def inputs(dtype: str) -> list[np.ndarray]:
    """Query, key and value; scores reach from about -40 to 40."""
    generator = np.random.default_rng(0)
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    return [(3 * generator.normal(size=(BATCH, LENGTH, *shape))).astype(jnp.dtype(dtype)) for shape in shapes]


def tokens(segments: bool) -> Tokens:
    """Row 0 packs nine documents and padding, row 1 holds one document."""
    places = np.arange(LENGTH, dtype=np.int32)
    segment_ids = np.stack([places // 5 + 1, np.ones_like(places)])
    positions = np.stack([places % 5 if segments else places, places])
    segment_ids[0, 45:] = 0
    return Tokens(None, positions, segment_ids if segments else None)


def naive_attention(options: AttentionOptions, query, key, value, of: Tokens) -> jax.Array:
    key, value = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, precision="highest") * options.scale
    place = np.arange(LENGTH)
    seen = np.tile(place[:, None] >= place, (BATCH, 1, 1))
    if options.window is not None:
        seen &= place[:, None] - place < options.window
    if options.chunk is not None:
        seen &= of.positions[:, :, None] // options.chunk == of.positions[:, None] // options.chunk
    if of.segment_ids is not None:
        seen &= of.segment_ids[:, :, None] == of.segment_ids[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    return jnp.einsum("bnqk,bknh->bqnh", weights, value, precision="highest")


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [*((name, "float32", 3e-4) for name in CASES), ("segments", "bfloat16", 0.05)]
)
def test_the_arguments_mean_the_definition(name, dtype, tolerance):
    options, segments = CASES[name]
    of, arrays = tokens(segments), inputs(dtype)

    def coded(*arrays):
        arguments = cudnn_arguments(options, *arrays, (of, of))
        assert arguments.query.dtype == dtype and arguments.query.shape[3] % 8 == 0
        return jax.nn.dot_product_attention(**arguments._asdict(), implementation="xla")[..., :VALUE_DIM]

    def output_and_gradients(function, arrays):
        output, backward = jax.vjp(function, *arrays)
        weights = np.cos(np.arange(output.size, dtype=np.float32)).reshape(output.shape).astype(output.dtype)
        return output, *backward(weights)

    wide = [array.astype(np.float32) for array in arrays]
    naive = functools.partial(naive_attention, options, of=of)
    wanted = jax.jit(functools.partial(output_and_gradients, naive))(wide)
    for got, want in zip(jax.jit(functools.partial(output_and_gradients, coded))(arrays), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=tolerance * np.abs(want).max())


def test_segments_are_exactly_apart():
    """What other segments hold changes no bit of the output."""
    of, (query, key, value) = tokens(True), inputs("bfloat16")
    other = (of.segment_ids != 3)[:, :, None, None]

    @jax.jit
    def run(key, value):
        arguments = cudnn_arguments(PLAIN, query, key, value, (of, of))
        return jax.nn.dot_product_attention(**arguments._asdict(), implementation="xla")[0, 10:15]

    changed = run(np.where(other, -key, key), np.where(other, value.dtype.type(1000), value))
    np.testing.assert_array_equal(np.asarray(run(key, value)), np.asarray(changed))


def lacks(options=PLAIN, dtype="bfloat16", head_dims=(128, 128), length=4096, sinks=False, **more) -> str | None:
    return cudnn_lacks(options, dtype, head_dims, length, sinks=sinks, **more)


def test_what_it_lacks_is_named():
    assert lacks() is None and lacks(head_dims=(192, 128)) is None
    assert lacks(PLAIN._replace(window=1024, chunk=512)) is None
    assert lacks(dtype="float32") == "dtype=float32 (it knows bfloat16 and float16)"
    assert lacks(PLAIN._replace(soft_cap=30.0)) == "a soft cap of the scores"
    assert lacks(sinks=True) == "attention sinks"
    assert lacks(head_dims=(256, 256)).startswith("heads of 272 features")
    assert lacks(largest_head=module.LARGEST_HEAD_BEFORE_HOPPER).startswith("heads of 144 features")
    assert lacks(head_dims=(64, 64), largest_head=module.LARGEST_HEAD_BEFORE_HOPPER) is None


def test_lowers_to_the_flash_kernel_of_cuda(monkeypatch):
    """Only the checks of the machine are left out: no GPU is here."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    of, arrays = tokens(True), inputs("bfloat16")

    def loss(query, key, value):
        options = PLAIN._replace(window=7, chunk=9)
        return cudnn_attention(options, query, key, value, of, of, None).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in program and "__cudnn$fmhaSoftmaxBackward(" in program
    assert r"\22sliding_window_length\22: 7" in program
    assert f"{LENGTH}x{LENGTH}x" not in program
