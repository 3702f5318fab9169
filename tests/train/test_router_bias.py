import jax.numpy as jnp
import numpy as np

from maxlite.train.router_bias import with_updated_biases


def test_biases_move_towards_experts_that_got_less_wherever_they_are():
    zeros = jnp.zeros((2, 4))
    params = {
        "group_0": {
            "layers": {
                "block_0": {"mlp": {"gate": jnp.ones(3)}},
                "block_1": {"mlp": {"selection_bias": zeros, "router": jnp.ones(2)}},
                "block_2": {"mlp": {"dense": jnp.ones(1), "moe": {"selection_bias": zeros + 1}}},
            }
        },
        "embedding": {"table": jnp.ones(5)},
    }
    load = jnp.array([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 5.0]])
    new = with_updated_biases(params, {"group_0": {"block_1": load, "block_2": load}}, 0.1)
    moved = np.array([[-0.1, 0.1, 0.0, 0.0], [0.1, 0.1, 0.1, -0.1]])
    np.testing.assert_allclose(new["group_0"]["layers"]["block_1"]["mlp"]["selection_bias"], moved, atol=1e-7)
    np.testing.assert_allclose(new["group_0"]["layers"]["block_2"]["mlp"]["moe"]["selection_bias"], 1 + moved)
    # Nothing else is touched, the given tree included.
    assert new["embedding"] is params["embedding"]
    assert new["group_0"]["layers"]["block_0"] is params["group_0"]["layers"]["block_0"]
    assert float(jnp.abs(params["group_0"]["layers"]["block_1"]["mlp"]["selection_bias"]).max()) == 0
