"""Rotary position embeddings in the half-split layout (RoFormer, arXiv:2104.09864) and their frequency scalings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

ROPE_SCALING_KINDS = ("none", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context than the model was pretrained on.

    kind: "none", "linear" (Position Interpolation, arXiv:2306.15595) or "llama3" (Llama 3.1, arXiv:2407.21783).
    factor: how many times longer the context becomes.
    low_freq_factor, high_freq_factor: llama3 only; a wavelength longer than original / low is stretched in full, one
        shorter than original / high is kept, those between are blended.
    original_max_position_embeddings: llama3 only; context length of the pretraining, in tokens.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        """Refuse numbers that have no meaning."""
        if self.kind not in ROPE_SCALING_KINDS:
            raise ValueError(f"rope scaling kind {self.kind!r} is not one of {', '.join(ROPE_SCALING_KINDS)}")
        if self.factor <= 0.0:
            raise ValueError(f"rope scaling factor must be positive, not {self.factor}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling high_freq_factor ({self.high_freq_factor}) must exceed "
                f"low_freq_factor ({self.low_freq_factor})"
            )


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide the slow frequencies by the factor, keep the fast ones, blend between. Both arrays: [H/2] float64."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (1.0 - keep) * frequencies / scaling.factor + keep * frequencies


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle in radians by which one position turns each pair of features: theta^(-2i / head_dim), then scaled.

    Returns: [H/2] float32, computed in float64.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embeddings need an even head_dim, not {head_dim}")
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    return frequencies.astype(np.float32)


def rotation(positions: jax.Array, inv_freq: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles; compute it once per forward and share it among the layers.

    positions: [B, T] int32.
    inv_freq: [H/2] float32, radians a position.
    Returns: (cos, sin), each [B, T, H/2] float32.
    """
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn feature i and feature i + H/2 of every head together by their angle (Hugging Face's rotate_half layout).

    x: [B, T, N, H].
    cos, sin: [B, T, H/2] float32, from `rotation`.
    Returns: [B, T, N, H] in the dtype of x; the products are float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
