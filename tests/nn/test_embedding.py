import jax
import jax.numpy as jnp
import numpy as np

from maxlite.nn.embedding import Embedding, OutputMatrix
from tests.nn.layers import filled, run


def test_a_token_is_its_row(tiny_config):
    config = tiny_config("dtype=bfloat16")
    embedding = filled(Embedding(config.model, config.compute, rngs=None))
    table = embedding.table.get_raw_value()
    tokens = np.array([[3, 0, 63], [1, 1, 2]])
    found = run(embedding, tokens)
    assert table.shape == (64, 64) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, table[tokens].astype(jnp.bfloat16))
    np.testing.assert_array_equal(jax.jit(embedding.matrix)(), table.T.astype(jnp.bfloat16))


def test_scaled_embeddings_are_multiplied_by_a_rounded_root(tiny_config):
    for dtype, root in (("float32", 60**0.5), ("bfloat16", 7.75)):
        config, dtype = tiny_config(f"dtype={dtype}", "emb_dim=60", "scale_embeddings=true"), jnp.dtype(dtype)
        embedding = filled(Embedding(config.model, config.compute, rngs=None))
        rows = embedding.table.get_raw_value()[:3].astype(dtype)
        found = run(embedding, np.array([[0, 1, 2]]))[0]
        np.testing.assert_array_equal(found, rows * np.asarray(root, dtype))
        # The output matrix is the table itself.
        np.testing.assert_array_equal(np.asarray(jax.jit(embedding.matrix)())[:, :3].T, rows)


def test_the_output_matrix_is_its_kernel(tiny_config):
    config = tiny_config("vocab_size=40")
    output = filled(OutputMatrix(config.model, config.compute, rngs=None))
    matrix = jax.jit(output.matrix)()
    assert matrix.shape == (64, 40)
    np.testing.assert_array_equal(matrix, output.kernel.get_raw_value())
    assert output.kernel.get_metadata()["axes"] == ("embed", "vocab")
