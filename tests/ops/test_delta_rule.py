import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.delta_rule import CHUNK, DeltaInputs, chunked_delta_rule, delta_rule_step

BATCH, HEADS, GROUPS, WIDTH, VALUE = 2, 2, 3, 5, 4
# One chunk, one full, several with a rest.
LENGTHS = (1, 7, CHUNK, 2 * CHUNK + 9)

in_chunks, in_one_step = jax.jit(chunked_delta_rule), jax.jit(delta_rule_step)


def make_inputs(length: int, seed: int = 0, decay: float = 0.5) -> DeltaInputs:
    random = np.random.default_rng(seed)
    query, key = random.normal(size=(2, BATCH, length, HEADS, WIDTH))
    # Longer than one, a key would make the memory grow without end.
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(BATCH, length, HEADS, GROUPS, VALUE))
    log_decay, beta = random.uniform(size=(2, BATCH, length, HEADS, GROUPS))
    return DeltaInputs(query, key, value, -decay * log_decay, beta)


def make_memory(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, HEADS, GROUPS, WIDTH, VALUE))


def reference(inputs: DeltaInputs, documents: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule of the paper, token by token and head by head, in float64."""
    memory, output = memory.copy(), np.zeros(inputs.value.shape)
    for row, token, head, group in np.ndindex(output.shape[:4]):
        held = memory[row, head, group]
        if documents[row, token] != (documents[row, token - 1] if token else 0):
            held = np.zeros_like(held)
        key, query = inputs.key[row, token, head], inputs.query[row, token, head]
        alpha, beta = np.exp(inputs.log_decay[row, token, head, group]), inputs.beta[row, token, head, group]
        held = alpha * (np.eye(WIDTH) - beta * np.outer(key, key)) @ held
        held = held + beta * np.outer(key, inputs.value[row, token, head, group])
        output[row, token, head, group] = query @ held
        memory[row, head, group] = held
    return output, memory


def in_float32(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*(np.asarray(array, np.float32) for array in inputs))


def close(found, expected, tolerance=2e-5):
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


def borders(length: int) -> np.ndarray:
    """Documents that begin inside of chunks, at their border, and one token after it; the second row has others."""
    first = np.zeros((BATCH, length), np.int32)
    for begin in (3, 5, CHUNK, CHUNK + 1, 2 * CHUNK - 1):
        first[0, begin:] += 1
    first[1, length // 2 :] += 1
    first[1, 0:] += 1
    return first


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_the_rule(length):
    inputs, memory, one_document = make_inputs(length), make_memory(), np.zeros((BATCH, length), np.int32)
    found = in_chunks(in_float32(inputs), one_document, memory.astype(np.float32))
    for array, expected in zip(found, reference(inputs, one_document, memory), strict=True):
        close(array, expected)


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_a_document_begins_with_an_empty_memory(length):
    inputs, memory, documents = make_inputs(length, 2), make_memory(3), borders(length)
    found = in_chunks(in_float32(inputs), documents, memory.astype(np.float32))
    for array, expected in zip(found, reference(inputs, documents, memory), strict=True):
        close(array, expected)


def test_steps_are_the_rule_and_parts_of_a_row_are_the_row():
    length, cut = CHUNK + 13, 13
    inputs, memory = make_inputs(length, 4), make_memory(5)
    expected, last = reference(inputs, np.zeros((BATCH, length), np.int32), memory)
    inputs, memory = in_float32(inputs), memory.astype(np.float32)
    outputs = []
    for token in range(cut):
        output, memory = in_one_step(DeltaInputs(*(array[:, token : token + 1] for array in inputs)), memory)
        outputs.append(output)
    rest = DeltaInputs(*(array[:, cut:] for array in inputs))
    output, memory = in_chunks(rest, np.zeros((BATCH, length - cut), np.int32), memory)
    close(np.concatenate([*outputs, output], axis=1), expected)
    close(memory, last)


def test_a_token_without_decay_and_beta_leaves_the_memory():
    inputs, memory = make_inputs(CHUNK + 6, 6), make_memory(7).astype(np.float32)
    real = np.arange(CHUNK + 6) < 7
    quiet = {"log_decay": inputs.log_decay * real[:, None, None], "beta": inputs.beta * real[:, None, None]}
    documents = np.zeros((BATCH, CHUNK + 6), np.int32)
    found = in_chunks(in_float32(inputs._replace(**quiet)), documents, memory)
    expected = in_chunks(in_float32(DeltaInputs(*(array[:, :7] for array in inputs))), documents[:, :7], memory)
    close(np.asarray(found[0])[:, :7], expected[0], 1e-6)
    close(found[1], expected[1], 1e-6)
    one = in_float32(DeltaInputs(*(array[:, -1:] for array in inputs._replace(**quiet))))
    np.testing.assert_array_equal(in_one_step(one, memory)[1], memory)


def test_gradients_are_those_of_the_steps():
    length = CHUNK + 5
    inputs, memory = in_float32(make_inputs(length, 8)), make_memory(9).astype(np.float32)
    documents = borders(length)
    weights = np.random.default_rng(10).normal(size=inputs.value.shape).astype(np.float32)

    def step_by_step(inputs, memory):
        def run(memory, token):
            inputs, begins = token
            memory = jnp.where(begins[:, None, None, None, None], 0.0, memory)
            output, memory = delta_rule_step(DeltaInputs(*(array[:, None] for array in inputs)), memory)
            return memory, output[:, 0]

        begins = np.diff(documents, axis=1, prepend=0) != 0
        tokens = jax.tree.map(lambda array: array.swapaxes(0, 1), (inputs, begins))
        memory, output = jax.lax.scan(run, memory, tokens)
        return (output.swapaxes(0, 1) * weights).sum() + (memory**2).sum()

    def by_chunks(inputs, memory):
        output, memory = chunked_delta_rule(inputs, documents, memory)
        return (output * weights).sum() + (memory**2).sum()

    found, expected = (jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs, memory) for loss in (by_chunks, step_by_step))
    jax.tree.map(lambda x, y: close(x, y, 1e-4), found, expected)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("decay", [0.0, 2000.0])
def test_the_extremes_are_finite(decay):
    length = 2 * CHUNK
    inputs = make_inputs(length, decay=decay)
    # All keys alike, and all that is held replaced: the system of a chunk is then as full as it can be.
    inputs = inputs._replace(key=np.broadcast_to(inputs.key[:, :1], inputs.key.shape), beta=np.ones_like(inputs.beta))
    documents, memory = borders(length), make_memory()

    def loss(inputs, memory):
        output, memory = chunked_delta_rule(inputs, documents, memory)
        return output.sum() + memory.sum(), (output, memory)

    arguments = in_float32(inputs), memory.astype(np.float32)
    gradients, found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*arguments)
    for array, expected in zip(found, reference(inputs, documents, memory), strict=True):
        close(array, expected, 1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_memory_grows_with_the_length_and_not_with_its_square():
    def most_bytes(length):
        inputs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, jnp.float32), make_inputs(length))
        memory = jax.ShapeDtypeStruct((BATCH, HEADS, GROUPS, WIDTH, VALUE), jnp.float32)
        documents = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
        loss = jax.grad(lambda inputs, *rest: chunked_delta_rule(inputs, *rest)[0].sum())
        return jax.jit(loss).lower(inputs, documents, memory).compile().memory_analysis().temp_size_in_bytes

    assert most_bytes(16 * CHUNK) < 4.5 * most_bytes(4 * CHUNK)
