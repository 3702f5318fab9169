"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and the ways their frequencies are scaled."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

ROPE_SCALING_KINDS = ("none", "linear", "llama3", "yarn", "proportional")

# Two bounds of yarn's ramp that fall together are held this far apart, in pairs of features; the published models were
# trained with this number.
LEAST_RAMP = 0.001


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context than the model was pretrained on.

    kind: "none", "linear" (Position Interpolation, arXiv:2306.15595), "llama3" (Llama 3.1, arXiv:2407.21783), "yarn"
        (arXiv:2309.00071) or "proportional" (Gemma 4), in which the slowest pairs stand still.
    factor: how many times longer the context becomes.
    low_freq_factor, high_freq_factor: llama3 only; a wavelength longer than original / low is stretched in full, one
        shorter than original / high is kept, those between are blended.
    original_max_position_embeddings: llama3 and yarn; context length of the pretraining, in tokens.
    beta_fast, beta_slow: yarn only; a pair of features that turned more than beta_fast times in the original context
        is kept, one that turned less than beta_slow times is stretched in full, those between are blended.
    truncate: yarn only; widen the blended range to whole pairs.
    mscale, mscale_all_dim: yarn only; weights of the logarithm in `rotation_factor` and `softmax_factor`.
    attention_factor: yarn only; `rotation_factor` itself, None for the formula.
    share: proportional only; the share of the pairs that turns.
    Raises ValueError for numbers that have no meaning.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers that have no meaning."""
        if self.kind not in ROPE_SCALING_KINDS:
            raise ValueError(f"rope scaling kind {self.kind!r} is not one of {', '.join(ROPE_SCALING_KINDS)}")
        if self.factor <= 0.0:
            raise ValueError(f"rope scaling factor must be positive, not {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings <= 0:
            raise ValueError(
                f"rope scaling original_max_position_embeddings must be positive for {self.kind}, "
                f"not {self.original_max_position_embeddings}"
            )
        if self.kind == "llama3" and not 0.0 < self.low_freq_factor <= self.high_freq_factor:
            raise ValueError(
                f"rope scaling needs 0 < low_freq_factor ({self.low_freq_factor}) "
                f"<= high_freq_factor ({self.high_freq_factor})"
            )
        if self.kind == "yarn" and not 0.0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"rope scaling needs 0 < beta_slow ({self.beta_slow}) <= beta_fast ({self.beta_fast}); "
                "a fast pair makes more turns"
            )

    @property
    def rotation_factor(self) -> float:
        """What cosines and sines are multiplied by, on queries and keys alike: 1 for every kind but yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    @property
    def softmax_factor(self) -> float:
        """What multi-head latent attention, and no other, multiplies its scores by (DeepSeek-V2, arXiv:2405.04434).

        It makes up for the divisor in `rotation_factor`, and grows the features that do not turn as well.
        """
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Growth of queries and keys that keeps the attention's entropy when the context is `factor` times longer."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divide the slow frequencies by the factor, keep the fast ones, blend between. Both arrays: [R/2] float64."""
    wavelengths = 2.0 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    width = scaling.high_freq_factor - scaling.low_freq_factor
    if width == 0.0:
        # Llama 4's instruction-tuned models have no range between.
        keep = (turns >= scaling.low_freq_factor).astype(np.float64)
    else:
        keep = np.clip((turns - scaling.low_freq_factor) / width, 0.0, 1.0)
    return (1.0 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn_frequencies(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Divide the slow frequencies by the factor, with a ramp over the pairs. Both arrays: [R/2] float64."""
    dim = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        """The fractional index of the pair that turns so often in the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return dim * math.log(wavelength / (2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper limit counts features where the ramp counts pairs; the published models were trained so.
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else LEAST_RAMP
    stretch = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return stretch * frequencies / scaling.factor + (1.0 - stretch) * frequencies


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle in radians by which one position turns each pair of features: theta^(-2i / dim), then scaled.

    dim: how many features of a head turn (R); less than the head's width in partial rotary embeddings.
    Returns: [R/2] float32, computed in float64.
    """
    if dim % 2 or dim <= 0:
        raise ValueError(f"rotary embeddings turn pairs of features, so they need an even head_dim, not {dim}")
    frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif scaling is not None and scaling.kind == "yarn":
        frequencies = _yarn_frequencies(frequencies, theta, scaling)
    elif scaling is not None and scaling.kind == "proportional":
        frequencies = frequencies / scaling.factor
        frequencies[int(scaling.share * dim // 2) :] = 0.0
    return frequencies.astype(np.float32)


def rotation(
    positions: jax.Array, inv_freq: np.ndarray | jax.Array, factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles; compute it once per forward and share it among the layers.

    positions: [B, T] int32.
    inv_freq: [R/2] float32, radians a position.
    factor: multiplies both, `RopeScaling.rotation_factor`.
    Returns: (cos, sin), each [B, T, R/2] float32.
    """
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleave: bool = False) -> jax.Array:
    """Turn the first R features of every head in pairs; those after pass through.

    Feature i turns with feature i + R/2 (Hugging Face's rotate_half layout), or with `interleave` feature 2i with
    2i + 1. The result of both is in half-split order (the firsts of all pairs, then the seconds): an interleaved head
    is not put back, because queries and keys are permuted alike and only their products matter.

    x: [B, T, N, H], R <= H.
    cos, sin: [B, T, R/2] float32, from `rotation`.
    Returns: [B, T, N, H] in the dtype of x; the products are float32.
    """
    rotary_dim = 2 * cos.shape[-1]
    rotary = x[..., :rotary_dim].astype(jnp.float32)
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleave else jnp.split(rotary, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if rotary_dim == x.shape[-1] else jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
