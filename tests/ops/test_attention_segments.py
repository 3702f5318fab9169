"""Chunks as segments: two tokens have the same number exactly where they are of one segment and of one chunk."""

import jax.numpy as jnp
import numpy as np

from maxlite.ops.attention_segments import chunk_segments, num_segments
from maxlite.ops.attention_types import Tokens


def test_chunks_become_segments():
    positions, segment_ids = jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2, 0]]), jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 0]])
    ids = np.asarray(chunk_segments(Tokens(None, positions, segment_ids), 2, 9))[0]
    same = ids[:, None] == ids
    wanted = np.asarray(positions[0])[:, None] // 2 == np.asarray(positions[0]) // 2
    wanted &= np.asarray(segment_ids[0])[:, None] == np.asarray(segment_ids[0])
    np.testing.assert_array_equal(same, wanted)
    assert ids[-1] == 0 and ids.max() < num_segments(9, 2)
    assert chunk_segments(Tokens(None, positions, None), None, 9) is None
    # A row whose first position is not 0 has a chunk more.
    ids = np.asarray(chunk_segments(Tokens(None, 1 + jnp.arange(4)[None], None), 2, 4))[0]
    assert (np.diff(ids) != 0).tolist() == [True, False, True] and ids[0] != ids[3] and ids.min() > 0
