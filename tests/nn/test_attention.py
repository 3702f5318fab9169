import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.layers import LayerSpec
from maxlite.nn.attention import Attention, AttentionContext
from maxlite.ops.rope import inverse_frequencies, rotation

LENGTH = 7


def rotated(x, theta=1e4):
    """Rotary positions by complex numbers: feature i and i + H/2 are one number's two parts. x: [T, N, H]."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def expected_output(attention, x, window):
    """Head by head and token by token, in float64."""
    query, key, value, out = (
        np.asarray(part.kernel[...], np.float64)
        for part in (attention.query, attention.key, attention.value, attention.out)
    )
    q = rotated(np.einsum("td,dnh->tnh", x, query))
    k = rotated(np.einsum("td,dnh->tnh", x, key))
    v = np.einsum("td,dnh->tnh", x, value)
    result = np.zeros((LENGTH, x.shape[1]))
    group = q.shape[1] // k.shape[1]
    for t in range(LENGTH):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(q.shape[1]):
            scores = k[first : t + 1, n // group] @ q[t, n] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            result[t] += (weights / weights.sum()) @ v[first : t + 1, n // group] @ out[n]
    return result


@pytest.mark.parametrize(("kind", "kv_heads", "head_dim"), [("full", 4, 16), ("full", 2, 24), ("local", 1, 16)])
def test_against_numpy(kind, kv_heads, head_dim, tiny_config, rngs):
    config = tiny_config(
        f"num_kv_heads={kv_heads}", f"head_dim={head_dim}", "attention_pattern=local,full", "sliding_window_size=3"
    )
    attention = Attention(LayerSpec(kind, "dense"), config.model, config.compute, rngs=rngs)
    positions, segments = jnp.arange(LENGTH)[None], jnp.ones((1, LENGTH), jnp.int32)
    cos, sin = rotation(positions, inverse_frequencies(head_dim, 1e4))
    x = np.random.default_rng(0).normal(size=(LENGTH, 64))
    context = AttentionContext(positions, segments, positions, segments, cos, sin, None)
    found, cache = attention(jnp.asarray(x[None], jnp.float32), context, None)
    expected = expected_output(attention, x, 3 if kind == "local" else None)
    np.testing.assert_allclose(found[0], expected, atol=2e-5)
    assert cache is None
