import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.convolution import causal_convolution, document_numbers, next_history

WIDTH, LENGTH, FEATURES = 4, 9, (2, 3)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, LENGTH, *FEATURES)).astype(np.float32)
KERNEL = RANDOM.normal(size=(WIDTH, *FEATURES)).astype(np.float32)
HISTORY = RANDOM.normal(size=(2, WIDTH - 1, *FEATURES)).astype(np.float32)
NOTHING = np.zeros_like(HISTORY)


@pytest.mark.parametrize(
    ("segments", "documents"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 1, 2, 2], [0, 0, 1, 1]),
        ([3, 5, 1, 0], [0, 1, 2, 2]),
        ([1, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_documents_are_numbered_and_padding_belongs_to_the_one_before(segments, documents):
    np.testing.assert_array_equal(document_numbers(jnp.asarray([segments])), [documents])


def test_each_token_sums_the_last_ones_of_its_document():
    documents = np.asarray([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    found = causal_convolution(jnp.asarray(X), jnp.asarray(KERNEL), documents, jnp.asarray(HISTORY))
    expected = np.zeros(X.shape)
    for row, token, back in np.ndindex(2, LENGTH, WIDTH):
        place = token - back
        if (documents[row, place] if place >= 0 else 0) == documents[row, token]:
            source = X[row, place] if place >= 0 else HISTORY[row, place]
            expected[row, token] += source.astype(float) * KERNEL[WIDTH - 1 - back]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_parts_of_a_row_are_the_row():
    documents = np.zeros((2, LENGTH), np.int32)
    convolve, remember = jax.jit(causal_convolution), jax.jit(next_history)
    whole = convolve(X, KERNEL, documents, NOTHING)
    history, parts = NOTHING, []
    # Parts shorter and longer than the kernel.
    for start, stop in ((0, 1), (1, 3), (3, 8), (8, 9)):
        part = X[:, start:stop]
        parts.append(convolve(part, KERNEL, documents[:, start:stop], history))
        history = remember(part, history, np.full(2, stop - start, np.int32))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)


def test_padding_is_not_remembered():
    found = next_history(jnp.asarray(X), jnp.asarray(HISTORY), jnp.asarray([5, 1]))
    np.testing.assert_array_equal(found[0], X[0, 2:5])
    np.testing.assert_array_equal(found[1], np.stack([HISTORY[1, 1], HISTORY[1, 2], X[1, 0]]))
    np.testing.assert_array_equal(next_history(jnp.asarray(X), jnp.asarray(HISTORY), jnp.asarray([0, 0])), HISTORY)


def test_history_keeps_its_dtype_and_sums_are_float32():
    low, history = jnp.asarray(X, jnp.bfloat16), jnp.asarray(HISTORY, jnp.bfloat16)
    assert next_history(low.astype(jnp.float32), history, jnp.asarray([1, 1])).dtype == jnp.bfloat16
    found = causal_convolution(low, jnp.asarray(KERNEL, jnp.bfloat16), jnp.zeros((2, LENGTH), jnp.int32), history)
    assert found.dtype == jnp.float32
