import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.model.build import build_model


@pytest.fixture(scope="module")
def model(tiny_config):
    config = tiny_config("emb_dim=32", "mlp_dim=48", "head_dim=8", "num_decoder_layers=3",
                         "attention_pattern=local,full", "sliding_window_size=3")  # fmt: skip
    return build_model(config.model, config.compute)


@pytest.fixture(scope="module")
def forward(model, noisy_params):
    params, apply = noisy_params(model), jax.jit(model.apply)

    def run(tokens, positions, segments):
        return np.asarray(
            apply(params, *(jnp.asarray([row], jnp.int32) for row in (tokens, positions, segments))).hidden[0]
        )

    return run


def test_packed_documents_never_see_one_another(forward):
    packed = forward([5, 6, 7, 8, 9, 5, 6, 7, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2, 0, 0], [1] * 5 + [2] * 3 + [0] * 2)
    np.testing.assert_allclose(packed[5:8], packed[:3], atol=1e-5)
    other = forward([1, 2, 3, 4, 4, 5, 6, 7, 9, 9], [0, 1, 2, 3, 4, 0, 1, 2, 0, 0], [1] * 5 + [2] * 3 + [0] * 2)
    np.testing.assert_allclose(other[5:8], packed[5:8], atol=1e-5)
    assert np.isfinite(packed).all()


def test_no_token_sees_a_later_one(forward):
    one = forward([5, 6, 7, 8, 9, 1, 2, 3, 4, 5], range(10), [1] * 10)
    two = forward([5, 6, 7, 8, 9, 1, 60, 61, 62, 63], range(10), [1] * 10)
    np.testing.assert_allclose(one[:6], two[:6], atol=1e-5)
    assert np.abs(one[6:] - two[6:]).max(axis=1).min() > 1e-2


def test_only_distances_matter(forward):
    near = forward([5, 6, 7, 8, 9, 1, 2, 3, 4, 5], range(10), [1] * 10)
    far = forward([5, 6, 7, 8, 9, 1, 2, 3, 4, 5], range(100, 110), [1] * 10)
    np.testing.assert_allclose(near, far, atol=1e-3)
