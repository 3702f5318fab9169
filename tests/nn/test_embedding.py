import jax.numpy as jnp
import numpy as np

from maxlite.nn.embedding import Embedding, OutputMatrix


def test_a_token_is_its_row(tiny_config, rngs):
    config = tiny_config("dtype=bfloat16")
    embedding = Embedding(config.model, config.compute, rngs=rngs)
    table = np.asarray(embedding.table[...])
    tokens = np.array([[3, 0, 63], [1, 1, 2]])
    found = embedding(jnp.asarray(tokens))
    assert table.shape == (64, 64) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(table[tokens], jnp.bfloat16))
    np.testing.assert_array_equal(embedding.matrix(), jnp.asarray(table.T, jnp.bfloat16))


def test_the_output_matrix_is_its_kernel(tiny_config, rngs):
    config = tiny_config("vocab_size=40")
    output = OutputMatrix(config.model, config.compute, rngs=rngs)
    assert output.matrix().shape == (64, 40)
    np.testing.assert_array_equal(output.matrix(), output.kernel[...])
    assert output.kernel.get_metadata()["axes"] == ("embed", "vocab")
