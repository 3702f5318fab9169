"""From logits to the next token: which tokens may be drawn, and the draw.

Candidates are kept in order of their logits, the lower id first where two are equal, so ties fall the same way
every time. A row's draw depends on the seed, on the row's number and on the step, never on its neighbours.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlite.config.schema import DecodeConfig

# (logits [B, V] float32, rows [B] int32, step int32) -> ids [B] int32
Sampler = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Cuts:
    """What narrows the choice, applied in this order.

    temperature: divides the logits; above 0.
    top_k: the likeliest so many tokens stay; 0 = no cut.
    nucleus_p: the smallest set whose probability reaches it stays, at least one token; 1 = no cut.
    min_p: tokens below this share of the best one's probability go; 0 = no cut.
    """

    temperature: float = 1.0
    top_k: int = 0
    nucleus_p: float = 1.0
    min_p: float = 0.0


def build_sampler(decode: DecodeConfig) -> Sampler:
    """Returns the sampler that the config's strategy names; temperature 0 is greedy under every strategy."""
    if decode.decode_sampling_strategy == "greedy" or decode.decode_sampling_temperature == 0:
        return _likeliest
    cuts, seed = strategy_cuts(decode), decode.decode_seed

    def draw(logits: jax.Array, rows: jax.Array, step: jax.Array) -> jax.Array:
        kept, ids = candidates(logits, cuts)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step))(rows)
        drawn = jax.vmap(jax.random.categorical)(keys, kept)
        return jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)

    return draw


def strategy_cuts(decode: DecodeConfig) -> Cuts:
    """Returns the cuts that the config's strategy makes."""
    strategy, temperature = decode.decode_sampling_strategy, decode.decode_sampling_temperature
    if strategy == "weighted":
        return Cuts(temperature)
    if strategy == "topk":
        return Cuts(temperature, top_k=decode.decode_sampling_top_k)
    if strategy == "nucleus":
        return Cuts(temperature, nucleus_p=decode.decode_sampling_nucleus_p)
    assert strategy == "composite", strategy
    return Cuts(
        temperature, decode.decode_sampling_top_k, decode.decode_sampling_nucleus_p, decode.decode_sampling_min_p
    )


def candidates(logits: jax.Array, cuts: Cuts) -> tuple[jax.Array, jax.Array]:
    """Applies the cuts to logits: [B, V] float32.

    Returns: logits [B, C], -inf for what was cut, and their token ids [B, C]; C is top_k, or V without that cut.
    """
    # From the best one down, so that a temperature near 0 gives 0 and -inf, never inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / cuts.temperature
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if 0 < cuts.top_k < logits.shape[1]:
        logits, ids = jax.lax.top_k(logits, cuts.top_k)
    elif cuts.nucleus_p < 1:
        negated, ids = jax.lax.sort((-logits, ids), num_keys=1, is_stable=True)
        logits = -negated
    if cuts.nucleus_p < 1:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        first = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == 0
        logits = jnp.where(first | (before < cuts.nucleus_p), logits, -jnp.inf)
    if cuts.min_p > 0:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(cuts.min_p), logits, -jnp.inf)
    return logits, ids


def _likeliest(logits: jax.Array, rows: jax.Array, step: jax.Array) -> jax.Array:
    del rows, step
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
