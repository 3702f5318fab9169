"""The tensors of the families: which of the files' names are which of our parameters, and in what layout."""

import dataclasses

from maxlite.hf.rules import Ignored, Rule, Table
from maxlite.hf.transforms import Transform, by_head, depthwise, flat, grouped, interleaved, joined, kernel, same

_LAYER = "model.layers.{layer}."
_GATED = ("gate", "up", "down")


def _layer(
    tensor: str, path: str | tuple[str, ...], transform: Transform | None = None, *, float32: bool = False
) -> Rule:
    return Rule(_LAYER + tensor, path, kernel() if transform is None else transform, float32)


def _both(parents: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{parent}/{leaf}" for parent in parents)


def _norm(tensor: str, path: str) -> Rule:
    return _layer(f"{tensor}.weight", f"{path}/scale", same())


def _only(parameter: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules for layers that have this parameter."""
    return tuple(dataclasses.replace(rule, where=(parameter,)) for rule in rules)


def _gated(tensor: str, path: str) -> tuple[Rule, ...]:
    """gate_proj, up_proj and down_proj with their biases, if the model has any."""
    return tuple(
        rule
        for part in _GATED
        for rule in (
            _layer(f"{tensor}.{part}_proj.weight", f"{path}/{part}/kernel"),
            _layer(f"{tensor}.{part}_proj.bias", f"{path}/{part}/bias", same()),
        )
    )


_ENDS = (
    Rule("model.embed_tokens.weight", "embedding/table", same()),
    Rule("model.norm.weight", "final_norm/scale", same()),
    Rule("lm_head.weight", "output/kernel", kernel()),
)
_ATTENTION = (
    *(_layer(f"self_attn.{part[0]}_proj.weight", f"attention/{part}/kernel") for part in ("query", "key", "value")),
    *(_layer(f"self_attn.{part[0]}_proj.bias", f"attention/{part}/bias", flat()) for part in ("query", "key", "value")),
    _layer("self_attn.o_proj.weight", "attention/out/kernel", kernel(2)),
    _layer("self_attn.o_proj.bias", "attention/out/bias", same()),
    _layer("self_attn.q_norm.weight", "attention/query_norm/scale", flat()),
    _layer("self_attn.k_norm.weight", "attention/key_norm/scale", flat()),
    _layer("self_attn.sinks", "attention/sinks", same()),
)
_LATENT_ATTENTION = (
    _layer("self_attn.q_proj.weight", "attention/query/kernel"),
    _layer("self_attn.q_a_proj.weight", "attention/query_a/kernel"),
    _layer("self_attn.q_a_proj.bias", "attention/query_a/bias", same()),
    _norm("self_attn.q_a_layernorm", "attention/query_a_norm"),
    _layer("self_attn.q_b_proj.weight", "attention/query_b/kernel"),
    _layer("self_attn.kv_a_proj_with_mqa.weight", "attention/key_value_a/kernel"),
    _layer("self_attn.kv_a_proj_with_mqa.bias", "attention/key_value_a/bias", same()),
    _norm("self_attn.kv_a_layernorm", "attention/key_value_a_norm"),
    _layer("self_attn.kv_b_proj.weight", "attention/key_value_b/kernel"),
    _layer("self_attn.o_proj.weight", "attention/out/kernel", kernel(2)),
    _layer("self_attn.o_proj.bias", "attention/out/bias", same()),
)
_PRE_NORMS = (_norm("input_layernorm", "attention_norm"), _norm("post_attention_layernorm", "mlp_norm"))
_POST_NORMS = (
    _norm("post_attention_layernorm", "attention_post_norm"),
    _norm("post_feedforward_layernorm", "mlp_post_norm"),
)
_FOUR_NORMS = (
    _norm("input_layernorm", "attention_norm"),
    _norm("pre_feedforward_layernorm", "mlp_norm"),
    *_POST_NORMS,
)
_MLP = _gated("mlp", "mlp")
_EXPERTS = tuple(_layer(f"mlp.experts.{{expert}}.{part}_proj.weight", f"mlp/experts/{part}/kernel") for part in _GATED)
_ROUTER = _layer("mlp.gate.weight", "mlp/router/kernel")

_COMPUTED = Ignored(r"(.*\.)?rotary_emb\.inv_freq", "rotary frequencies are worked out from config.json")
_TIED_COPY = (("lm_head.weight", "model.embed_tokens.weight"),)
_PREDICTION = Ignored(r"mtp\..*", "multi-token prediction, without which the model answers")
_VISION = "part of the model of images or sound, without which the text model answers"
# Where versions of transformers have put the text model in a multimodal folder.
_TEXT_MODEL = (
    r"^(model\.language_model\.model|model\.language_model|language_model\.model\.model|language_model\.model)\."
)


def table(name: str, rules: tuple[Rule, ...]) -> Table:
    """Returns the table of a family of text models."""
    return Table(name, (*_ENDS, *rules), (_COMPUTED,), _TIED_COPY)


def predicting_table(name: str, rules: tuple[Rule, ...]) -> Table:
    """Returns the table of a family whose folders may also hold multi-token prediction."""
    text = table(name, rules)
    return dataclasses.replace(text, ignored=(*text.ignored, _PREDICTION))


def multimodal_table(name: str, rules: tuple[Rule, ...], *vision: str) -> Table:
    """Returns the table of a family that may also stand in a multimodal folder, next to parts with these names."""
    text = table(name, rules)
    ignored = Ignored(rf"(model\.)?({'|'.join(vision)})\..*", _VISION)
    spellings = ((r"^(model\.)?language_model\.lm_head\.", "lm_head."), (_TEXT_MODEL, "model."))
    return dataclasses.replace(text, ignored=(*text.ignored, ignored), spellings=spellings)


DENSE = (*_ATTENTION, *_PRE_NORMS, *_MLP)
DENSE_POST_NORM = (*_ATTENTION, *_POST_NORMS, *_MLP)
DENSE_FOUR_NORMS = (*_ATTENTION, *_FOUR_NORMS, *_MLP)
MIXTRAL = (
    *_ATTENTION,
    *_PRE_NORMS,
    _layer("block_sparse_moe.gate.weight", "mlp/router/kernel"),
    *(
        _layer(f"block_sparse_moe.experts.{{expert}}.{name}.weight", f"mlp/experts/{part}/kernel")
        for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
)
EXPERTS = (*DENSE, _ROUTER, *_EXPERTS)
_SHARED_EXPERT = (
    *_gated("mlp.shared_expert", "mlp/shared"),
    _layer("mlp.shared_expert_gate.weight", "mlp/shared_gate/kernel"),
)
QWEN2_MOE = (*EXPERTS, *_SHARED_EXPERT)
_QUERY_AND_GATE = ("attention/query", "attention/gate")
_GATED_ATTENTION = (
    _layer("self_attn.q_proj.weight", _both(_QUERY_AND_GATE, "kernel"), grouped(by_head())),
    _layer("self_attn.q_proj.bias", _both(_QUERY_AND_GATE, "bias"), grouped(same())),
    *(rule for rule in _ATTENTION if not str(rule.path).startswith("attention/query/")),
)
_DELTA_NET = (
    _layer(
        "linear_attn.in_proj_qkvz.weight",
        _both(("attention/query", "attention/key", "attention/value", "attention/gate"), "kernel"),
        grouped(by_head()),
    ),
    _layer("linear_attn.in_proj_ba.weight", _both(("attention/beta", "attention/step"), "kernel"), grouped(by_head())),
    _layer(
        "linear_attn.conv1d.weight",
        _both(("attention/query_conv", "attention/key_conv", "attention/value_conv"), "kernel"),
        joined(depthwise(), 0),
    ),
    _layer("linear_attn.A_log", "attention/log_rate", flat()),
    _layer("linear_attn.dt_bias", "attention/step_bias", flat()),
    _norm("linear_attn.norm", "attention/norm"),
    _layer("linear_attn.out_proj.weight", "attention/out/kernel", kernel(3)),
)
QWEN3_NEXT = (
    *_only("attention/query_norm/scale", _GATED_ATTENTION),
    *_only("attention/log_rate", _DELTA_NET),
    *_PRE_NORMS,
    *_MLP,
    _ROUTER,
    *_EXPERTS,
    *_SHARED_EXPERT,
)
DEEPSEEK = (
    *_LATENT_ATTENTION,
    *_PRE_NORMS,
    *_MLP,
    _ROUTER,
    _layer("mlp.gate.e_score_correction_bias", "mlp/selection_bias", same(), float32=True),
    *_EXPERTS,
    *_gated("mlp.shared_experts", "mlp/shared"),
)
_GATE_AND_UP = ("mlp/experts/gate", "mlp/experts/up")
GPT_OSS = (
    *_ATTENTION,
    *_PRE_NORMS,
    _layer("mlp.router.weight", "mlp/router/kernel"),
    _layer("mlp.router.bias", "mlp/router/bias", same()),
    _layer("mlp.experts.gate_up_proj", _both(_GATE_AND_UP, "kernel"), interleaved(same(), -1)),
    _layer("mlp.experts.gate_up_proj_bias", _both(_GATE_AND_UP, "bias"), interleaved(same(), -1)),
    _layer("mlp.experts.down_proj", "mlp/experts/down/kernel", same()),
    _layer("mlp.experts.down_proj_bias", "mlp/experts/down/bias", same()),
)
GEMMA4 = (
    *DENSE_FOUR_NORMS,
    _layer("layer_scalar", "scalar", same()),
    # Layers whose dense MLP has experts beside it.
    _norm("pre_feedforward_layernorm", "mlp/dense_norm"),
    _norm("post_feedforward_layernorm_1", "mlp/dense_post_norm"),
    _norm("pre_feedforward_layernorm_2", "mlp/moe_norm"),
    _norm("post_feedforward_layernorm_2", "mlp/moe_post_norm"),
    *_gated("mlp", "mlp/dense"),
    _layer("router.proj.weight", "mlp/moe/router/kernel"),
    _layer("router.scale", "mlp/moe/router/scale", same()),
    _layer("router.per_expert_scale", "mlp/moe/expert_scale", same()),
    _layer(
        "experts.gate_up_proj",
        ("mlp/moe/experts/gate/kernel", "mlp/moe/experts/up/kernel"),
        joined(kernel(stacked=True), -2),
    ),
    _layer("experts.down_proj", "mlp/moe/experts/down/kernel", kernel(stacked=True)),
)
LLAMA4 = (
    *_ATTENTION,
    *_PRE_NORMS,
    *_gated("feed_forward", "mlp"),
    _layer("feed_forward.router.weight", "mlp/router/kernel"),
    _layer("feed_forward.experts.gate_up_proj", _both(_GATE_AND_UP, "kernel"), joined(same(), -1)),
    _layer("feed_forward.experts.down_proj", "mlp/experts/down/kernel", same()),
    *_gated("feed_forward.shared_expert", "mlp/shared"),
)
