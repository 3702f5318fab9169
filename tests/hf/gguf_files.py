"""A Hugging Face model written as a GGUF file, the way llama.cpp's converter does it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"gemma3_text": "gemma3"}
NUMBERS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
}
REALS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
BLOCK = 32


def write_gguf(
    file: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    kind: str = "F32",
) -> Path:
    """Writes `config`, of transformers 5, and its tensors.

    metadata: more of it; a key replaces one that the config gives, and one whose value is None is left out. kind: how
    the matrices are stored.
    """
    written = {**described(config), **(metadata or {})}
    writer = gguf.GGUFWriter(str(file), written.pop("general.architecture"))
    for key, value in written.items():
        if value is not None:
            add_value(writer, key, value)
    for name, values in tensors.items():
        name, values = llama_cpp_tensor(name, values, config)
        fits = values.ndim > 1 and values.shape[-1] % BLOCK == 0
        its = getattr(gguf.GGMLQuantizationType, kind if fits else "F32")
        writer.add_tensor(name, gguf.quants.quantize(values, its), raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that says what a config.json says."""
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    found = {theirs: config.get(ours) for ours, theirs in NUMBERS.items()}
    found |= {theirs: config.get(ours) and float(config[ours]) for ours, theirs in REALS.items()}
    found |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        rope = rope["full_attention"]
    found["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}}


def llama_cpp_tensor(name: str, values: np.ndarray, config: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """The name of a tensor in a GGUF file, and what is in it there."""
    module, _, leaf = name.rpartition(".")
    names = {**NAMES, **(FOUR_NORMS if config["model_type"] in ("gemma2", "gemma3_text") else {})}
    prefix = ""
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        prefix = f"blk.{layer}."
    if config["model_type"] == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        # Llama's own code rotates neighbouring dimensions, and the file is in its order.
        heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if config["model_type"].startswith("gemma") and module.endswith("norm"):
        values = values + np.float32(1)
    return f"{prefix}{names[module]}.{leaf}", np.ascontiguousarray(values)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds one value, in the type that llama.cpp would give it."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)
