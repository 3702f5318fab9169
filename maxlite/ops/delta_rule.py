"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): a memory that forgets, and learns what it got wrong.

A head's memory is a matrix S [H, V] from keys to values. Each token first lets it fade and then writes, at its key, a
part of the difference between its value and what the memory holds there:

    S <- exp(log_decay) S;    S <- S + beta key (value - key S);    output = query S

`delta_rule_step` is just that. `chunked_delta_rule` gives the same for many tokens: what the tokens of a chunk write
is the solution of one triangular system, all chunks' at once, and a scan carries the memory from chunk to chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens of a chunk, a power of two: the work inside of chunks grows with it, the number of steps between them falls.
CHUNK = 64


class DeltaInputs(NamedTuple):
    """What each token brings. A key head serves G value heads, each with a memory of its own.

    query, key: [B, T, K, H]; value: [B, T, K, G, V]; log_decay (at most 0), beta: [B, T, K, G].
    A token whose log_decay and beta are 0 leaves the memory as it is.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class _Chunks(NamedTuple):
    """What the scan needs of each chunk, all [N, B, ...] over N chunks of C tokens.

    writes: [K, G, C, V], what the tokens write if the memory is empty; reads: [K, G, C, H], by which the memory
    takes from that. scores: [K, G, C, C], of queries and the keys before them. query, key: [C, K, G, H], faded since
    the chunk began, and until it ends. fading: [K, G], of the whole chunk.
    """

    writes: jax.Array
    reads: jax.Array
    scores: jax.Array
    query: jax.Array
    key: jax.Array
    fading: jax.Array


def delta_rule_step(inputs: DeltaInputs, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token a row, T = 1. memory: [B, K, G, H, V] float32. Returns: [B, 1, K, G, V] float32, and the memory."""
    query, key, value, log_decay, beta = (array[:, 0].astype(jnp.float32) for array in inputs)
    memory = memory * jnp.exp(log_decay)[..., None, None]
    missing = value - jnp.einsum("BKH,BKGHV->BKGV", key, memory)
    memory = memory + key[:, :, None, :, None] * (beta[..., None] * missing)[..., None, :]
    return jnp.einsum("BKH,BKGHV->BKGV", query, memory)[:, None], memory


def chunked_delta_rule(inputs: DeltaInputs, documents: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All tokens of a row, in memory that grows with T.

    documents: [B, T] int32, never falling along a row; a token whose document is another than that of the token before
        it begins with an empty memory. `memory` is that of document 0.
    memory: [B, K, G, H, V] float32.
    Returns: [B, T, K, G, V] float32, and the memory after the last token.
    """
    length = documents.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    inputs = DeltaInputs(*(_in_chunks(array.astype(jnp.float32), size) for array in inputs))
    # The tokens that fill the last chunk up are of the last document, and leave its memory as it is.
    chunks = _solve_chunks(inputs, _in_chunks(documents, size, mode="edge"))

    def run_chunk(memory: jax.Array, chunk: _Chunks) -> tuple[jax.Array, jax.Array]:
        writes = chunk.writes - jnp.einsum("BKGCH,BKGHV->BKGCV", chunk.reads, memory)
        output = jnp.einsum("BCKGH,BKGHV->BCKGV", chunk.query, memory)
        output = output + jnp.einsum("BKGCJ,BKGJV->BCKGV", chunk.scores, writes)
        memory = memory * chunk.fading[..., None, None] + jnp.einsum("BCKGH,BKGCV->BKGHV", chunk.key, writes)
        return memory, output

    memory, output = jax.lax.scan(run_chunk, memory, chunks)
    output = output.swapaxes(0, 1)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :length], memory


def _in_chunks(array: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """[B, T, ...] -> [N, B, C, ...], filled up to whole chunks."""
    batch, length, *rest = array.shape
    padding = [(0, 0), (0, -length % size)] + [(0, 0)] * len(rest)
    return jnp.pad(array, padding, mode=mode).reshape(batch, -1, size, *rest).swapaxes(0, 1)


def _solve_chunks(inputs: DeltaInputs, documents: jax.Array) -> _Chunks:
    """inputs: [N, B, C, ...] float32; documents: [N, B, C]."""
    query, key, value, log_decay, beta = inputs
    faded = jnp.cumsum(log_decay, axis=2)
    last = documents[:, :, -1]
    before = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    since_start = _fading(faded, documents == before[..., None])
    until_end = _fading(faded[:, :, -1:] - faded, documents == last[..., None])
    # From token J to token C of a chunk.
    since = (faded[:, :, :, None] - faded[:, :, None]).transpose(0, 1, 4, 5, 2, 3)
    earlier = (documents[..., None] == documents[:, :, None]) & jnp.tri(documents.shape[2], dtype=bool)
    between = jnp.exp(jnp.where(earlier[:, :, None, None], since, -jnp.inf))
    overlap = jnp.einsum("NBCKH,NBJKH->NBKCJ", key, key)[:, :, :, None] * between
    strength = beta.transpose(0, 1, 3, 4, 2)[..., None]
    read = jnp.einsum("NBCKH,NBCKG->NBKGCH", key, since_start)
    # Token C writes strength (value - what it reads), and it reads what the tokens J before it in the chunk wrote.
    solution = _unit_triangular_inverse(overlap * strength)
    return _Chunks(
        writes=jnp.einsum("NBKGCJ,NBJKGV->NBKGCV", solution, value * beta[..., None]),
        reads=jnp.einsum("NBKGCJ,NBKGJH->NBKGCH", solution, read * strength),
        scores=jnp.einsum("NBCKH,NBJKH->NBKCJ", query, key)[:, :, :, None] * between,
        query=query[:, :, :, :, None] * since_start[..., None],
        key=key[:, :, :, :, None] * until_end[..., None],
        fading=_fading(faded[:, :, -1], before == last),
    )


@jax.custom_vjp
def _unit_triangular_inverse(matrix: jax.Array) -> jax.Array:
    """Inverts I plus the part of [..., C, C] below its diagonal, C a power of two, by blocks of 1, 2, 4, ... rows.

    Matrix products only: jax's own solver is a call of LAPACK on a CPU, which can block when it is first met on several
    devices that wait for one another, and a loop over rows elsewhere.
    """
    size, lead = matrix.shape[-1], matrix.shape[:-2]
    inverse, width = jnp.ones((*lead, size, 1, 1), matrix.dtype), 1
    while width < size:
        blocks = matrix.reshape(*lead, size // width // 2, 2, width, size // width // 2, 2, width)
        below = jnp.einsum("...PIPJ->...PIJ", blocks[..., 1, :, :, 0, :])
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_exact_product(second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]


def _inverse_forward(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_triangular_inverse(matrix)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    turned = inverse.mT
    return (-jnp.tril(_exact_product(turned, gradient, turned), -1),)


_unit_triangular_inverse.defvjp(_inverse_forward, _inverse_backward)


def _exact_product(first: jax.Array, second: jax.Array, third: jax.Array) -> jax.Array:
    """Of small matrices, in whose product the errors of a whole chunk add up."""
    precision = jax.lax.Precision.HIGHEST
    return jnp.matmul(jnp.matmul(first, second, precision=precision), third, precision=precision)


def _fading(logarithm: jax.Array, reaches: jax.Array) -> jax.Array:
    """The factor [..., K, G] by which the memory fades, 0 where `reaches` [...] is not so: another document's."""
    return jnp.where(reaches[..., None, None], jnp.exp(logarithm), 0.0)
