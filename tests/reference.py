"""Models from elsewhere, mapped by hand, and what another program says about them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from maxlite.config.layers import layer_groups, layer_places
from maxlite.config.schema import ModelConfig

STORIES = Path(__file__).parent / "assets" / "stories260K"
STORIES_KEYS = (
    "vocab_size=512",
    "emb_dim=64",
    "num_decoder_layers=5",
    "num_query_heads=8",
    "num_kv_heads=4",
    "head_dim=8",
    "mlp_dim=172",
    "max_position_embeddings=512",
    "max_target_length=256",
    "logits_via_embedding=true",
    "dtype=float32",
    "dataset_type=synthetic",
)


def stories_params() -> dict[str, Any]:
    """The weights as maxlite's nested dict, layers stacked. Hugging Face stores matrices as [out, in]."""
    weights = load_file(STORIES / "model.safetensors")

    def stacked(name: str, *shape: int) -> np.ndarray:
        layers = [weights[f"model.layers.{layer}.{name}.weight"] for layer in range(5)]
        return np.stack([layer.T.reshape(shape) for layer in layers])

    block = {
        "attention_norm": {"scale": stacked("input_layernorm", 64)},
        "attention": {
            "query": {"kernel": stacked("self_attn.q_proj", 64, 8, 8)},
            "key": {"kernel": stacked("self_attn.k_proj", 64, 4, 8)},
            "value": {"kernel": stacked("self_attn.v_proj", 64, 4, 8)},
            "out": {"kernel": stacked("self_attn.o_proj", 8, 8, 64)},
        },
        "mlp_norm": {"scale": stacked("post_attention_layernorm", 64)},
        "mlp": {
            "gate": {"kernel": stacked("mlp.gate_proj", 64, 172)},
            "up": {"kernel": stacked("mlp.up_proj", 64, 172)},
            "down": {"kernel": stacked("mlp.down_proj", 172, 64)},
        },
    }
    return {
        "embedding": {"table": weights["model.embed_tokens.weight"]},
        "group_0": {"layers": {"block_0": block}},
        "final_norm": {"scale": weights["model.norm.weight"]},
    }


def stories_generations() -> list[tuple[list[int], list[int]]]:
    """(prompt ids, the greedy ids that follow) of each prompt, by transformers."""
    rows = json.loads((STORIES / "golden_generation.json").read_text())
    return [(row["ids"], row["greedy_ids"][len(row["ids"]) :]) for row in rows]


def stories_logits() -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [T], logits [T, 512]) of the first prompts, by transformers."""
    with np.load(STORIES / "golden_logits_fp32.npz") as file:
        return [(file[f"ids_{index}"], file[f"logits_{index}"]) for index in range(3)]


def params_from_hugging_face(tensors: Mapping[str, np.ndarray], model: ModelConfig) -> dict[str, Any]:
    """Parameters of any Hugging Face Llama, by its tensor names; a missing or left-over tensor is an error."""
    left = dict(tensors)
    dim, width = model.emb_dim, model.head_dim
    groups = layer_groups(model)
    stacked: dict[str, Any] = {}
    for layer, place in enumerate(layer_places(groups)):

        def matrix(name: str, prefix: str = f"model.layers.{layer}.") -> np.ndarray:
            return np.asarray(left.pop(f"{prefix}{name}.weight")).T

        block = {
            "attention_norm": {"scale": matrix("input_layernorm")},
            "attention": {
                "query": {"kernel": matrix("self_attn.q_proj").reshape(dim, -1, width)},
                "key": {"kernel": matrix("self_attn.k_proj").reshape(dim, -1, width)},
                "value": {"kernel": matrix("self_attn.v_proj").reshape(dim, -1, width)},
                "out": {"kernel": matrix("self_attn.o_proj").reshape(-1, width, dim)},
            },
            "mlp_norm": {"scale": matrix("post_attention_layernorm")},
            "mlp": {name: {"kernel": matrix(f"mlp.{name}_proj")} for name in ("gate", "up", "down")},
        }
        blocks = stacked.setdefault(f"group_{place.group}", {}).setdefault("layers", {})
        _append(blocks.setdefault(f"block_{place.position}", {}), block)
    params = _stack(stacked)
    params["embedding"] = {"table": np.asarray(left.pop("model.embed_tokens.weight"))}
    params["final_norm"] = {"scale": np.asarray(left.pop("model.norm.weight"))}
    if not model.logits_via_embedding:
        params["output"] = {"kernel": np.asarray(left.pop("lm_head.weight")).T}
    else:
        left.pop("lm_head.weight", None)
    if left:
        raise ValueError(f"tensors left over: {sorted(left)}")
    return params


def _append(lists: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _append(lists.setdefault(name, {}), value)
        else:
            lists.setdefault(name, []).append(value)


def _stack(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _stack(value) if isinstance(value, dict) else np.stack(value) for name, value in tree.items()}
