import jax.numpy as jnp
import numpy as np

from maxlite.nn.rotary import rope_scaling, rotary_tables, rotations

YARN = ("rope_type=yarn", "rope_factor=8", "original_max_position_embeddings=64")


def test_local_layers_have_their_own_base_and_no_scaling(tiny_config):
    model = tiny_config(
        "attention_pattern=local,full", "sliding_window_size=4", "rope_max_timescale=1e6",
        "local_rope_max_timescale=1e4", "rope_type=linear", "rope_factor=8",
    ).model  # fmt: skip
    tables = rotary_tables(model)
    steps = -np.arange(0, 16, 2) / 16
    np.testing.assert_allclose(tables["local"].inverse_frequencies, 1e4**steps, rtol=1e-6)
    np.testing.assert_allclose(tables["full"].inverse_frequencies, 1e6**steps / 8, rtol=1e-6)
    assert (tables["local"].factor, tables["full"].factor) == (1.0, 1.0)


def test_layers_without_positions_have_no_table_and_equal_ones_are_one_array(tiny_config):
    model = tiny_config("attention_pattern=nope,local,full", "num_decoder_layers=3", "sliding_window_size=4").model
    tables = rotary_tables(model)
    assert list(tables) == ["local", "full"]
    turns = rotations(tables, jnp.arange(5)[None])
    assert turns["local"] is turns["full"]
    np.testing.assert_allclose(turns["full"][0][0, 3, 1], np.cos(3 * 1e4 ** (-1 / 8)), atol=1e-6)


def test_yarn_scales_cosine_and_sine(tiny_config):
    model = tiny_config(*YARN).model
    cos, sin = rotations(rotary_tables(model), jnp.arange(3)[None])["full"]
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * np.log(8) + 1) ** 2, rtol=1e-5)


def test_only_the_share_that_turns_has_angles(tiny_config):
    (table,) = rotary_tables(tiny_config("partial_rotary_factor=0.5").model).values()
    np.testing.assert_allclose(table.inverse_frequencies, 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)


def test_in_a_proportional_rotation_the_slow_pairs_stand_still(tiny_config):
    model = tiny_config(
        "rope_type=proportional", "partial_rotary_factor=0.5", "rope_factor=2", "attention_pattern=local,full",
        "sliding_window_size=4", "local_rope_max_timescale=1e2", "global_head_dim=24",
    ).model  # fmt: skip
    tables = rotary_tables(model)
    moving = 1e4 ** (-np.arange(0, 12, 2) / 24) / 2
    np.testing.assert_allclose(tables["full"].inverse_frequencies, [*moving, *[0] * 6], rtol=1e-6)
    np.testing.assert_allclose(tables["local"].inverse_frequencies, 1e2 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)


def test_scaling_is_what_the_keys_say(tiny_config):
    assert rope_scaling(tiny_config().model) is None
    scaling = rope_scaling(tiny_config("model=llama3.2-1b").model)
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    scaling = rope_scaling(tiny_config(*YARN, "mscale=0.7", "rope_mscale_all_dim=0.5", "beta_fast=16").model)
    assert scaling is not None
    assert (scaling.kind, scaling.mscale, scaling.mscale_all_dim, scaling.beta_fast) == ("yarn", 0.7, 0.5, 16.0)
