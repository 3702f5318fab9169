"""What metadata says in config.json's words, where no small file can show it: large models, and scaled frequencies."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxlite.data.gguf_header import GgufHeader
from maxlite.errors import ConversionError
from maxlite.hf.config_json import read_config
from maxlite.hf.gguf_config import model_config
from maxlite.hf.source import StoredTensor

SIZES = {
    "block_count": 2, "context_length": 131072, "embedding_length": 4608, "feed_forward_length": 64,
    "attention.head_count": 32, "attention.head_count_kv": 16, "attention.key_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


class Tensors:
    """The few tensors of a file that its config depends on."""

    def __init__(self, **found: np.ndarray):
        self.place = Path("model.gguf")
        self.found = {"token_embd.weight": np.zeros((300, 1), np.float32), **found}
        self.tensors = {name: StoredTensor(v.shape, v.dtype, v.nbytes, self.place) for name, v in self.found.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.found[name][start:stop]


def config_of(name: str, changes: dict[str, Any], **tensors: np.ndarray) -> dict[str, Any]:
    sizes = {f"{name}.{key}": value for key, value in {**SIZES, **changes}.items() if value is not None}
    header = GgufHeader(Path("model.gguf"), 0, {"general.architecture": name, **sizes}, {})
    return model_config(header, Tensors(**{key.replace("__", "."): value for key, value in tensors.items()}))


def llama3_factors(factor: float, theta: float, head_dim: int, original: int = 8192) -> np.ndarray:
    """As the converter of llama.cpp writes them, one for each pair of dimensions."""
    factors = []
    for pair in range(head_dim // 2):
        length = 2 * math.pi * theta ** (2 * pair / head_dim)
        smooth = (original / length - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if length < original / 4 else factor if length > original else between)
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("name", "layers", "scalar"),
    [("gemma2", 42, 128), ("gemma2", 46, 144), ("gemma3", 48, 128), ("gemma3", 62, 144)],
)
def test_the_largest_gemma_scales_its_queries_otherwise(name, layers, scalar):
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if name == "gemma2" else {}
    config = config_of(name, {"block_count": layers, "attention.sliding_window": 4096, **caps})
    _, keys = read_config(config, "model.gguf")
    assert (keys["query_pre_attn_scalar"] or keys["head_dim"]) == scalar


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 5e5), (32.0, 5e5)])
def test_frequencies_of_llama_3(factor, theta):
    """3.1 and 3.2: the file has the factor of each frequency, and not what they were worked out from."""
    factors = llama3_factors(factor, theta, 128)
    assert len(set(factors)) == 8
    config = config_of("llama", {"rope.freq_base": theta}, rope_freqs__weight=factors)
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": factor, **scaling}
    _, keys = read_config(config, "model.gguf")
    assert (keys["rope_type"], keys["rope_factor"], keys["rope_max_timescale"]) == ("llama3", factor, theta)


@pytest.mark.parametrize(
    ("factors", "changes"),
    [
        (llama3_factors(8.0, 5e5, 128, 4096), {}),
        (llama3_factors(8.0, 5e5, 64), {}),
        (np.linspace(1, 4, 64, dtype=np.float32), {}),
        (llama3_factors(8.0, 5e5, 128), {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    ],
)
def test_frequencies_that_are_none_of_llama_3(factors, changes):
    with pytest.raises(ConversionError, match="rope_freqs.weight is not supported"):
        config_of("llama", {"rope.freq_base": 5e5, **changes}, rope_freqs__weight=factors)


def test_what_may_be_left_out():
    """As in llama.cpp: as many heads of keys as of queries, heads that share out the width, and the first base."""
    left_out = {"attention.head_count_kv": None, "attention.key_length": None}
    config = config_of("llama", {**left_out, "rope.scaling.factor": 4.0})
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (32, 144, 300)
    assert config["tie_word_embeddings"] is True and "attention_bias" not in config
    # A factor alone is linear.
    assert (config["rope_theta"], config["rope_scaling"]) == (1e4, {"rope_type": "linear", "factor": 4.0})


def test_everything_wrong_is_said_at_once():
    changes = {"expert_count": 4, "rope.scaling.attn_factor": 2.0, "attention.key_length": "wide", "clip": [1, 2, 3]}
    with pytest.raises(ConversionError) as error:
        config_of("llama", changes)
    lines = str(error.value).splitlines()
    assert all(line.startswith("model.gguf: ") for line in lines)
    for words in (
        "llama.expert_count=4 is not supported",
        "llama.attention.key_length='wide': it must be one number above 0",
        "the key llama.rope.scaling.attn_factor=2.0 is not known",
        "the key llama.clip=a list of 3 is not known",
    ):
        assert any(words in line for line in lines), words
