"""Seeded weights of the tiny reference models, a function of a tensor's name, and the noise of low precision."""

import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

# Far from a default start (norms all one, matrices near zero), which hides most mistakes.
DEVIATION = 0.15
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "qwen3_next")


def noise(name: str, shape: Sequence[int], kind: str = "plain") -> np.ndarray:
    """Returns float32 normals of deviation 0.15 that depend on `name` alone; around one where kind is "scale"."""
    assert kind in ("plain", "scale"), kind
    random = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    values = random.standard_normal(tuple(shape), np.float32) * np.float32(DEVIATION)
    return values + np.float32(1) if kind == "scale" else values


def noise_kind(name: str, model_type: str) -> str:
    """Returns the kind of noise that a tensor of a file gets. A norm that is stored as an offset from one is plain."""
    if name.endswith(
        ("sinks", ".layer_scalar", ".scale", ".per_expert_scale", "conv1d.weight", "linear_attn.norm.weight")
    ):
        return "scale"
    if re.search(r"norm(_\d)?\.weight$", name):
        return "plain" if model_type in OFFSET_NORMS else "scale"
    return "plain"


def noisy_tensors(shapes: Mapping[str, Sequence[int]], model_type: str) -> dict[str, np.ndarray]:
    """Returns a float32 array for every tensor name of a file."""
    return {name: noise(name, shape, noise_kind(name, model_type)) for name, shape in shapes.items()}


def drift(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Returns the mean difference of the logits at the median position; found, exact: of each prompt, [T, V].

    The median, because a near tie between experts is decided otherwise now and then, in any program at another
    token, and such a token is then off by a hundred times what rounding does.
    """
    return float(np.median(np.concatenate([np.abs(a - b).mean(-1) for a, b in zip(found, exact, strict=True)])))
