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


def test_scaled_embeddings_are_multiplied_by_a_rounded_root(tiny_config, rngs):
    for dtype, root in (("float32", 60**0.5), ("bfloat16", 7.75)):
        config = tiny_config(f"dtype={dtype}", "emb_dim=60", "scale_embeddings=true")
        embedding = Embedding(config.model, config.compute, rngs=rngs)
        rows = jnp.asarray(embedding.table[...][:3], dtype)
        np.testing.assert_array_equal(embedding(jnp.array([[0, 1, 2]]))[0], rows * jnp.asarray(root, dtype))
        # The output matrix is the table itself.
        np.testing.assert_array_equal(embedding.matrix()[:, :3].T, rows)


def test_the_output_matrix_is_its_kernel(tiny_config, rngs):
    config = tiny_config("vocab_size=40")
    output = OutputMatrix(config.model, config.compute, rngs=rngs)
    assert output.matrix().shape == (64, 40)
    np.testing.assert_array_equal(output.matrix(), output.kernel[...])
    assert output.kernel.get_metadata()["axes"] == ("embed", "vocab")
