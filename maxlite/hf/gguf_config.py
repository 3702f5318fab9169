"""The metadata of a GGUF file as a config.json, in transformers' spelling. Imports no jax."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from maxlite.data.gguf_header import GgufHeader
from maxlite.data.gguf_tokenizer import token_ids
from maxlite.errors import ConversionError
from maxlite.hf.source import Source

ROPE_FACTORS = "rope_freqs.weight"

# Metadata, after the architecture's name -> config.json.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# What may only be so, and what says nothing about the model's numbers.
_MUST_BE = (("expert_count", 0), ("expert_used_count", 0), ("attention.causal", True))
_IGNORED = ("rope.scaling.finetuned", "tensor_data_layout")
_SCALING: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"rope.scaling.factor": "factor"},
    "yarn": {
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    },
}
_BIASES = {"blk.0.attn_q.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_THETA = 10000.0
_REQUIRED = object()

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What llama.cpp calls an architecture.

    model_type: transformers' name for it. keys, optional: its metadata besides the sizes -> config.json. activation:
    that of the MLP. tensors: names in a layer that differ from those of most architectures. pairs: the two dimensions
    of a query or key that rotate together are written side by side. norm_offset: what is added to the scale of every
    norm. wide_layers: the number of layers of the one size whose queries are scaled by the model's width shared out
    over the heads, and not by their own; None where transformers has no key for it.
    """

    model_type: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activation: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"hidden_act": "silu"})
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pairs: bool = False
    norm_offset: float = 0.0
    wide_layers: int | None = None

    @property
    def spellings(self) -> tuple[tuple[str, str], ...]:
        """(regular expression, replacement) pairs from llama.cpp's names of tensors to Hugging Face's."""
        layers = {**_TENSORS, **self.tensors}.items()
        return (
            *((rf"^{theirs}\.", f"{ours}.") for theirs, ours in _ENDS.items()),
            *((rf"^blk\.(\d+)\.{theirs}\.", rf"model.layers.\1.{ours}.") for theirs, ours in layers),
        )


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", activation=_TANH, norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2", {**_WINDOW, **_CAPS}, activation=_TANH, tensors=_FOUR_NORMS, norm_offset=1.0, wide_layers=46
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _WINDOW,
        {"rope.freq_base_swa": "rope_local_base_freq"},
        activation=_TANH,
        tensors=_FOUR_NORMS,
        norm_offset=1.0,
        wide_layers=62,
    ),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Returns what the file says that it holds.

    Raises:
        ConversionError: it is not known, or the file holds part of a model.
    """
    said = {name: header.metadata.get(name) for name in ("general.architecture", "general.type", "split.count")}
    if said["split.count"] not in (None, 0, 1):
        raise ConversionError(
            f"{header.path} is one of {said['split.count']} parts; join them with llama-gguf-split --merge."
        )
    if said["general.type"] not in (None, "model"):
        raise ConversionError(f"{header.path} holds no model: general.type={said['general.type']!r}.")
    architecture = ARCHITECTURES.get(str(said["general.architecture"]))
    if architecture is None:
        raise ConversionError(
            f"{header.path}: general.architecture={said['general.architecture']!r} is not supported; it may be "
            f"{', '.join(ARCHITECTURES)}. Convert the model's Hugging Face folder instead."
        )
    return architecture


def model_config(header: GgufHeader, source: Source) -> dict[str, Any]:
    """Returns the config.json of the same model.

    source: the file's tensors under their own names, some of which say what the metadata does not.

    Raises:
        ConversionError: lists every key that is missing, not known, or has a value that maxlite cannot honour.
    """
    architecture, metadata = architecture_of(header), _Metadata(header)
    sizes = {ours: metadata.number(theirs) for theirs, ours in {**_SIZES, **architecture.keys}.items()}
    metadata.check()
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    head_dim = metadata.number("attention.key_length", width // heads)
    for name, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), *_MUST_BE):
        metadata.expect(name, value)
    config = {
        "model_type": architecture.model_type,
        **sizes,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": metadata.number("vocab_size", _rows_of(source, "token_embd.weight")),
        **architecture.activation,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        **{key: True for tensor, key in _BIASES.items() if tensor in source.tensors},
        **_rope(metadata, source, head_dim),
        **token_ids(header),
    }
    for theirs, ours in architecture.optional.items():
        if (number := metadata.number(theirs, None)) is not None:
            config[ours] = number
    if architecture.wide_layers is not None:
        wide = sizes["num_hidden_layers"] == architecture.wide_layers
        config["query_pre_attn_scalar"] = width // heads if wide else head_dim
    metadata.check(complete=True)
    return config


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """Returns the generation_config.json of the same model: which ids end a text or a turn."""
    return {name: ids for name, ids in token_ids(header).items() if ids is not None}


class _Metadata:
    """Hands out what a file says of its architecture, remembers what was asked for, collects what is wrong."""

    def __init__(self, header: GgufHeader):
        self._where, self._name = header.path, header.metadata["general.architecture"]
        prefix = f"{self._name}."
        self._values = {
            key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)
        }
        self._asked: set[str] = set(_IGNORED)
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a number above 0, or the default if there is none."""
        self._asked.add(name)
        value = self._values.get(name, default)
        if value is _REQUIRED:
            self.refuse(f"{self._name}.{name} is missing")
        elif name in self._values and not (isinstance(value, int | float) and value > 0):
            self.refuse(f"{self._name}.{name}={_shown(value)}: it must be one number above 0")
            return 1
        return value

    def word(self, name: str, default: str, allowed: Iterable[str]) -> str:
        self._asked.add(name)
        value = self._values.get(name, default)
        if value not in allowed:
            self.refuse(f"{self._name}.{name}={_shown(value)} is not supported; it may be {', '.join(allowed)}")
            return default
        return value

    def expect(self, name: str, value: Any) -> None:
        """Refuses another value."""
        self._asked.add(name)
        if (given := self._values.get(name, value)) != value:
            self.refuse(f"{self._name}.{name}={_shown(given)} is not supported; it may be {value}")

    def refuse(self, problem: str) -> None:
        self._problems.append(f"{self._where}: {problem}.")

    def check(self, *, complete: bool = False) -> None:
        """Raises ConversionError if something is wrong; complete: keys that nobody asked for are wrong too."""
        for name in sorted(self._values.keys() - self._asked) if complete else ():
            self.refuse(
                f"the key {self._name}.{name}={_shown(self._values[name])} is not known, and it may change what the "
                "model computes"
            )
        if self._problems:
            raise ConversionError("\n".join(self._problems))


def _rope(metadata: _Metadata, source: Source, head_dim: int) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", _THETA)
    # As llama.cpp has it: a factor without a type is linear.
    usual = "linear" if "rope.scaling.factor" in metadata else "none"
    kind = metadata.word("rope.scaling.type", usual, _SCALING)
    numbers = {ours: metadata.number(theirs, None) for theirs, ours in _SCALING[kind].items()}
    scaling = {"rope_type": kind, **{ours: number for ours, number in numbers.items() if number is not None}}
    if ROPE_FACTORS in source.tensors:
        llama3 = _llama3_scaling(source, theta, head_dim)
        if llama3 is None or kind != "none":
            metadata.refuse(
                f"{ROPE_FACTORS} is not supported: its factors are not those of Llama 3.1's scaling (from 8192 "
                "positions, with low_freq_factor 1 and high_freq_factor 4) alone"
            )
        return {"rope_theta": theta, "rope_scaling": llama3}
    return {"rope_theta": theta} if kind == "none" else {"rope_theta": theta, "rope_scaling": scaling}


def _llama3_scaling(source: Source, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Returns the scaling that has these factors, one for every frequency; None if that of Llama 3.1 has others."""
    factors = source.rows(ROPE_FACTORS, 0, source.tensors[ROPE_FACTORS].shape[0]).astype(np.float64)
    factor = float(factors.max())
    scaling = {"factor": factor, **_LLAMA3}
    if factors.shape != (head_dim // 2,):
        return None
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
    )
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    # From frequencies that turn seldom, which are slowed by the factor, to those that turn often, which are not.
    share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    return {"rope_type": "llama3", **scaling} if np.allclose(factors, expected, rtol=1e-4) else None


def _rows_of(source: Source, name: str) -> int:
    # A file without it is refused when its tensors are compared with the model's.
    return source.tensors[name].shape[0] if name in source.tensors else 1


def _shown(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)
