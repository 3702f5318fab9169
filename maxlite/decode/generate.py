"""Prefill and a compiled decode loop over the same forward pass as training.

The prompts of a batch are padded on the right to one length. Cache slots are shared by all rows, so a row's
token t lies in slot padded length + t but has position own length + t; the padding between has segment id 0 and
is never seen. Several tokens are drawn in one call of the step program, by a loop inside it.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.decode.model import compiler_options
from maxlite.decode.sampling import Sampler
from maxlite.model.build import Model, Params
from maxlite.nn.cache import Cache
from maxlite.parallel.devices import host_value

# The most tokens that one call of the step program draws: a call costs, and text comes in such pieces.
MAX_TOKENS_A_CALL = 8
# Prompts are padded to a multiple of the first, so that prompts of nearby lengths share a compiled program, and
# run through the model so many tokens at a time, so that attention scores of a long prompt never exist at once.
PROMPT_MULTIPLE = 16
PREFILL_CHUNK = 512
# Stands in a row's drawn tokens where it drew an end token or was quiet.
NOTHING = -1


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """What the programs are compiled for: rows, padded prompt length and most new tokens."""

    rows: int
    prompt_length: int
    max_new_tokens: int


class State(NamedTuple):
    """Between two tokens. tokens, positions, ended, rows: [B], of the token last drawn; step: tokens drawn so far."""

    cache: Cache
    tokens: jax.Array
    positions: jax.Array
    ended: jax.Array
    rows: jax.Array
    step: jax.Array


@dataclasses.dataclass
class Speed:
    """Seconds and tokens so far; compiling is apart, and the first new token belongs to the prefill."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


def padded_length(length: int) -> int:
    """Returns the length, in tokens, that prompts of at most `length` tokens are padded to."""
    multiple = PROMPT_MULTIPLE if length <= PREFILL_CHUNK else PREFILL_CHUNK
    return -(-length // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two functions that are compiled. end_ids: a row that draws one of them has ended."""

    model: Model
    sampler: Sampler
    end_ids: tuple[int, ...]
    shape: BatchShape

    def prefill(self, params: Params, tokens: jax.Array, lengths: jax.Array, rows: jax.Array) -> State:
        """Runs the prompts and draws the first token of each. tokens: [B, P]; lengths, rows: [B]."""
        model, shape = self.model, self.shape
        size = min(shape.prompt_length, PREFILL_CHUNK)

        def run_chunk(carry: tuple[Cache, jax.Array], start: jax.Array) -> tuple[tuple[Cache, jax.Array], None]:
            cache, last = carry
            chunk = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)
            positions = jnp.broadcast_to(start + jnp.arange(size), chunk.shape)
            output = model.apply(params, chunk, positions, (positions < lengths[:, None]).astype(jnp.int32), cache)
            assert output.cache is not None
            place = lengths - 1 - start
            here = jnp.take_along_axis(output.hidden, jnp.clip(place, 0, size - 1)[:, None, None], axis=1)[:, 0]
            inside = (place >= 0) & (place < size)
            return (output.cache, jnp.where(inside[:, None], here, last)), None

        cache = model.init_cache(shape.rows, shape.prompt_length + shape.max_new_tokens, stacked=False)
        last = jnp.zeros((shape.rows, model.config.emb_dim), model.compute.dtype)
        (cache, last), _ = jax.lax.scan(run_chunk, (cache, last), jnp.arange(0, shape.prompt_length, size))
        first = self.sampler(model.logits(params, last), rows, jnp.int32(0))
        ended = (lengths == 0) | self._ends(first)
        return State(cache, first, lengths, ended, rows, jnp.int32(1))

    def step(self, params: Params, state: State, count: jax.Array) -> tuple[State, jax.Array]:
        """Draws `count` tokens a row, fewer if all rows end. Returns the state and tokens [B, MAX_TOKENS_A_CALL]."""

        def goes_on(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
            index, state, _ = carry
            return (index < count) & ~jnp.all(state.ended)

        def draw(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
            index, state, drawn = carry
            tokens, positions = state.tokens[:, None], state.positions[:, None]
            output = self.model.apply(params, tokens, positions, jnp.ones_like(positions), state.cache)
            assert output.cache is not None
            ids = self.sampler(self.model.logits(params, output.hidden[:, 0]), state.rows, state.step)
            ended = state.ended | self._ends(ids)
            column = jnp.where(ended, NOTHING, ids)[:, None]
            drawn = jax.lax.dynamic_update_slice_in_dim(drawn, column, index, axis=1)
            return index + 1, State(output.cache, ids, state.positions + 1, ended, state.rows, state.step + 1), drawn

        drawn = jnp.full((self.shape.rows, MAX_TOKENS_A_CALL), NOTHING, jnp.int32)
        _, state, drawn = jax.lax.while_loop(goes_on, draw, (jnp.int32(0), state, drawn))
        return state, drawn

    def _ends(self, ids: jax.Array) -> jax.Array:
        return jnp.isin(ids, jnp.array(self.end_ids, jnp.int32))


class Generator:
    """Compiled programs with the parameters they run on."""

    def __init__(self, programs: Programs, params: Params) -> None:
        """Compiles; `params` are unstacked. To run on a mesh, make and use it inside `use_mesh`."""
        self.params, self.shape, self.speed = params, programs.shape, Speed()
        started = time.perf_counter()
        integers = jax.ShapeDtypeStruct((self.shape.rows,), jnp.int32)
        prompts = jax.ShapeDtypeStruct((self.shape.rows, self.shape.prompt_length), jnp.int32)
        options = compiler_options(programs.model)
        self._prefill = jax.jit(programs.prefill).lower(params, prompts, integers, integers).compile(options)
        # The state comes back placed as it went in, or its next call would not fit the program.
        placed = self._prefill.output_shardings
        state = jax.tree.map(
            lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
            self._prefill.out_info,
            placed,
        )
        step = jax.jit(programs.step, donate_argnums=1, out_shardings=(placed, None))
        self._step = step.lower(params, state, jax.ShapeDtypeStruct((), jnp.int32)).compile(options)
        self.speed.compile_seconds = time.perf_counter() - started

    def stream(self, prompts: Sequence[Sequence[int]], first_row: int = 0) -> Iterator[np.ndarray]:
        """Draws tokens for prompts, which are rows first_row, first_row + 1, ... for the sampler.

        Yields: [rows, n] int32 as they are drawn, NOTHING where a row is quiet. It ends when all rows drew an end
        token or have max_new_tokens.
        """
        tokens, lengths = self._padded(prompts)
        rows = np.arange(first_row, first_row + self.shape.rows, dtype=np.int32)
        started = time.perf_counter()
        state = self._prefill(self.params, tokens, lengths, rows)
        drawn, ended = host_value(state.tokens), host_value(state.ended)
        self.speed.prefill_seconds += time.perf_counter() - started
        self.speed.prefill_tokens += int(lengths.sum())
        yield np.where(ended, NOTHING, drawn)[:, None]
        left = self.shape.max_new_tokens - 1
        while left and not ended.all():
            started = time.perf_counter()
            count = min(left, MAX_TOKENS_A_CALL)
            state, drawn = self._step(self.params, state, np.int32(count))
            drawn, ended = host_value(drawn)[:, :count], host_value(state.ended)
            self.speed.decode_seconds += time.perf_counter() - started
            self.speed.decode_tokens += int((drawn != NOTHING).sum())
            left -= count
            yield drawn

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Rows that are left over get no token, and are ended from the start."""
        tokens = np.zeros((self.shape.rows, self.shape.prompt_length), np.int32)
        lengths = np.zeros(self.shape.rows, np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
            lengths[row] = len(ids)
        return tokens, lengths
