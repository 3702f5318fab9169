"""A trained dense model as a mixture of experts: each is its MLP, so whatever the router says, nothing changes."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxlite.model.build import build_model
from tests.hf.folders import load_folder
from tests.hf.noise import noise
from tests.reference import STORIES, stories_generations, stories_logits

NUM_EXPERTS, LAYERS, WIDTH, HIDDEN = 4, 5, 64, 172
# As long as the longest prompt and its story here.
PADDED = 256
LLAMA_MLP = ("gate_proj", "up_proj", "down_proj")


def split_into_experts(names: dict[str, str], router: str, *, scale: float = 1.0) -> dict[str, np.ndarray]:
    """The trained tensors with `names` for the experts' parts ({layer}, {expert}) and a random router."""
    tensors = dict(load_file(STORIES / "model.safetensors"))
    for layer in range(LAYERS):
        for part in LLAMA_MLP:
            weight = tensors.pop(f"model.layers.{layer}.mlp.{part}.weight")
            for expert in range(NUM_EXPERTS):
                name = names[part].format(layer=layer, expert=expert)
                tensors[name] = weight * np.float32(scale if part == "down_proj" else 1)
        tensors[router.format(layer=layer)] = 3 * noise(f"router {layer}", (NUM_EXPERTS, WIDTH))
    return tensors


def mixtral() -> tuple[dict, dict[str, np.ndarray]]:
    moe = "model.layers.{layer}.block_sparse_moe."
    words = dict(zip(LLAMA_MLP, ("w1", "w3", "w2"), strict=True))
    names = {part: f"{moe}experts.{{expert}}.{word}.weight" for part, word in words.items()}
    settings = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    return {"model_type": "mixtral", **settings}, split_into_experts(names, f"{moe}gate.weight")


def qwen2_moe() -> tuple[dict, dict[str, np.ndarray]]:
    """A share of the MLP is the shared expert's, whose gate is one half; biases are zero."""
    mlp = "model.layers.{layer}.mlp."
    names = {part: f"{mlp}experts.{{expert}}.{part}.weight" for part in LLAMA_MLP}
    tensors = split_into_experts(names, f"{mlp}gate.weight", scale=0.75)
    dense = load_file(STORIES / "model.safetensors")
    for layer in range(LAYERS):
        for part in LLAMA_MLP:
            weight = dense[f"model.layers.{layer}.mlp.{part}.weight"]
            shared = f"model.layers.{layer}.mlp.shared_expert.{part}.weight"
            tensors[shared] = weight * np.float32(0.5 if part == "down_proj" else 1)
        tensors[f"model.layers.{layer}.mlp.shared_expert_gate.weight"] = np.zeros((1, WIDTH), np.float32)
        for part, size in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.zeros(size, np.float32)
    settings = {
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": HIDDEN, "norm_topk_prob": True,
        "shared_expert_intermediate_size": HIDDEN, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    return {"model_type": "qwen2_moe", **settings}, tensors


def write(folder: Path, settings: dict, tensors: dict[str, np.ndarray]) -> Path:
    dense = json.loads((STORIES / "config.json").read_text())
    kept = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act",
            "intermediate_size"}  # fmt: skip
    folder.mkdir()
    config = {name: value for name, value in dense.items() if name in kept} | settings
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def build_logits(model):
    """logits(params, ids): prompts of any length are padded to one, so that they share a program."""

    @jax.jit
    def forward(params, tokens, segment_ids):
        positions = np.arange(PADDED, dtype=np.int32)[None]
        return model.logits(params, model.apply(params, tokens, positions, segment_ids).hidden)[0]

    def logits(params, ids) -> np.ndarray:
        padding = [0] * (PADDED - len(ids))
        segment_ids = np.array([[1] * len(ids) + padding], np.int32)
        return np.asarray(forward(params, np.array([[*ids, *padding]], np.int32), segment_ids))[: len(ids)]

    return logits


@pytest.mark.parametrize("layout", [mixtral, qwen2_moe])
def test_logits_are_those_of_the_dense_model(layout, tmp_path):
    loaded = load_folder(write(tmp_path / "moe", *layout()))
    assert loaded.config.model.num_experts == NUM_EXPERTS
    ids, expected = stories_logits()[0]
    np.testing.assert_allclose(build_logits(loaded.model)(loaded.params, ids), expected, atol=1e-4)


@pytest.mark.parametrize(
    "router",
    [
        {"routed_score_func": "sigmoid", "routed_bias": True, "router_group_score": "top2_sum"},
        {"routed_score_func": "softmax", "routed_bias": False, "router_group_score": "max"},
    ],
    ids=["deepseek v3", "deepseek v2 groups"],
)
def test_routing_in_groups_with_a_shared_expert_is_the_dense_model(router):
    """DeepSeek's way to route, with the MLP shared out between routed experts (0.7) and the shared one (0.3)."""
    dense = load_folder(STORIES)
    config = dataclasses.replace(
        dense.config.model, mlp_pattern=("moe",), num_dense_layers=1, num_experts=8, num_experts_per_tok=3,
        moe_mlp_dim=HIDDEN, shared_expert_mlp_dim=HIDDEN, n_routing_groups=4, topk_routing_group=2,
        norm_topk_prob=True, routed_scaling_factor=0.7, **router,
    )  # fmt: skip
    model = build_model(config, dense.config.compute)
    blocks = jax.tree.map(np.asarray, dense.params["group_0"]["layers"]["block_0"])
    first, rest = (jax.tree.map(lambda x, part=part: x[part], blocks) for part in (slice(0, 1), slice(1, None)))
    mlp = rest["mlp"]
    expert = {name: {"kernel": np.stack([mlp[name]["kernel"]] * 8, 1)} for name in ("gate", "up", "down")}
    down = {"kernel": mlp["down"]["kernel"] * np.float32(0.3)}
    rest["mlp"] = {
        "router": {"kernel": noise("router", (LAYERS - 1, WIDTH, 8))},
        "experts": expert,
        "shared": {"gate": mlp["gate"], "up": mlp["up"], "down": down},
    }
    if config.routed_bias:
        rest["mlp"]["selection_bias"] = noise("selection", (LAYERS - 1, 8))
    params = {**dense.params, "group_0": {"layers": {"block_0": first}}, "group_1": {"layers": {"block_0": rest}}}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, model.abstract_params)
    ids, expected = stories_logits()[0]
    np.testing.assert_allclose(build_logits(model)(params, ids), expected, atol=1e-4)


def test_the_trained_model_by_itself():
    """Logits of all golden prompts, and their loss on what the model was trained to write."""
    loaded = load_folder(STORIES)
    logits = build_logits(loaded.model)
    for ids, expected in stories_logits():
        np.testing.assert_allclose(logits(loaded.params, ids), expected, atol=1e-4)
    # Its own greedy story is likelier than the 1.28 nats a token of text that people wrote.
    prompt, story = max(stories_generations(), key=lambda row: len(row[1]))
    ids = np.array([*prompt, *story])[:256]
    found = logits(loaded.params, ids)[:-1]
    losses = (
        np.log(np.exp(found - found.max(-1, keepdims=True)).sum(-1)) + found.max(-1) - found[np.arange(255), ids[1:]]
    )
    assert 0.2 < losses.mean() < 1.0
