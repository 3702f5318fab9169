"""From the model's keys to rotary angles: one table for each base and scaling that its layers use."""

from typing import NamedTuple

import jax
import numpy as np

from maxlite.config.layers import rotary_dim
from maxlite.config.schema import ModelConfig
from maxlite.ops.rope import RopeScaling, inverse_frequencies, rotation


class RotaryTable(NamedTuple):
    """Angles a position and pair of features [R/2], and the factor of cosine and sine. Hashable: a module is static."""

    inverse_frequencies: tuple[float, ...]
    factor: float


def rotary_tables(model: ModelConfig) -> dict[str, RotaryTable]:
    """Returns the table of each kind of attention in the model that turns queries and keys."""
    tables = {}
    for kind in dict.fromkeys(model.attention_pattern):
        dim = rotary_dim(model, kind)
        if dim == 0:
            continue
        own_base = kind == "local" and model.local_rope_max_timescale is not None
        scaling = None if own_base else rope_scaling(model)
        theta = model.local_rope_max_timescale if own_base else model.rope_max_timescale
        assert theta is not None
        frequencies = inverse_frequencies(dim, theta, scaling).tolist()
        tables[kind] = RotaryTable(tuple(frequencies), 1.0 if scaling is None else scaling.rotation_factor)
    return tables


def rotations(tables: dict[str, RotaryTable], positions: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """positions: [B, T]. Returns (cos, sin), each [B, T, R/2] float32, of each kind; equal tables are one array."""
    distinct = {
        table: rotation(positions, np.array(table.inverse_frequencies, np.float32), table.factor)
        for table in tables.values()
    }
    return {kind: distinct[table] for kind, table in tables.items()}


def rope_scaling(model: ModelConfig) -> RopeScaling | None:
    """Returns the rotary scaling that the model's keys describe."""
    if model.rope_type == "default":
        return None
    return RopeScaling(
        kind=model.rope_type,
        factor=model.rope_factor,
        low_freq_factor=model.rope_low_freq_factor,
        high_freq_factor=model.rope_high_freq_factor,
        # linear scaling has none, and does not look at it
        original_max_position_embeddings=model.original_max_position_embeddings or model.max_position_embeddings,
        beta_fast=model.beta_fast,
        beta_slow=model.beta_slow,
        truncate=model.rope_truncate,
        mscale=model.mscale,
        mscale_all_dim=model.rope_mscale_all_dim,
        attention_factor=model.rope_attention_factor,
        share=model.partial_rotary_factor,
    )
