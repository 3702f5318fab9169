"""Rules between the keys of the architecture. Each takes a Config and returns messages, as in check.py."""

from collections.abc import Callable, Iterator

from maxlite.config.key_groups import FULL_LAYERS, GDN_SIZES, MLA_SIZES
from maxlite.config.layers import has_experts, rotary_dim
from maxlite.config.schema import Config


def check_heads(config: Config) -> Iterator[str]:
    """Query heads are shared out evenly over key/value heads, and what is said of full layers has such layers."""
    model = config.model
    for name in ("num_kv_heads", "global_num_kv_heads"):
        if (number := getattr(model, name)) is not None and model.num_query_heads % number:
            yield (
                f"num_query_heads={model.num_query_heads} is not a multiple of {name}={number}; "
                "each key/value head serves the same number of query heads."
            )
    for name in FULL_LAYERS:
        if getattr(model, name) and "full" not in model.attention_pattern:
            yield f"{name} has no effect: attention_pattern has no full layer."


def check_layer_kinds(config: Config) -> Iterator[str]:
    """A window or a chunk is given exactly where a layer kind uses it, and patterns fit the layers."""
    model = config.model
    for kind, name in (("local", "sliding_window_size"), ("chunked", "chunk_attn_window_size")):
        size = getattr(model, name)
        if kind in model.attention_pattern and size is None:
            yield f"attention_pattern has {kind} layers, but {name} is not set."
        if kind not in model.attention_pattern and size is not None:
            yield (
                f"{name}={size} has no effect: attention_pattern has no {kind} layer; "
                f"set attention_pattern=[{kind}] or {name}=null."
            )
    for name in ("attention_pattern", "mlp_pattern"):
        if len(pattern := getattr(model, name)) > model.num_decoder_layers:
            yield f"{name} names {len(pattern)} layers, but num_decoder_layers={model.num_decoder_layers}."
    if model.num_dense_layers >= model.num_decoder_layers:
        yield (
            f"num_dense_layers={model.num_dense_layers} leaves no other layer of "
            f"num_decoder_layers={model.num_decoder_layers}; make it smaller."
        )
    if model.num_dense_layers and not has_experts(model):
        yield f"num_dense_layers={model.num_dense_layers} has no effect: mlp_pattern has no moe layer."


def check_latent_attention(config: Config) -> Iterator[str]:
    """Latent attention has all of its sizes, and nothing else has any."""
    model = config.model
    sizes = {name: getattr(model, name) for name in (*MLA_SIZES, "q_lora_rank")}
    if "mla" not in model.attention_pattern:
        for name, size in sizes.items():
            if size is not None:
                yield f"{name}={size} has no effect: attention_pattern has no mla layer."
        return
    missing = [name for name in MLA_SIZES if sizes[name] is None]
    if missing:
        yield f"attention_pattern has mla layers, which need {', '.join(missing)}."
        return
    width = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    if model.head_dim != width:
        yield f"head_dim={model.head_dim}, but for mla it is qk_nope_head_dim + qk_rope_head_dim = {width}."
    if model.num_kv_heads != model.num_query_heads:
        yield (
            f"num_kv_heads={model.num_kv_heads}, but in mla every query head has keys of its own: "
            f"set it to num_query_heads={model.num_query_heads}."
        )
    for name in ("use_qk_norm", "use_v_norm", "attention_sink", "attention_output_gate"):
        if getattr(model, name):
            yield f"{name}=true has no meaning for mla layers; leave it out."
    if model.attn_logits_soft_cap is not None:
        yield "attn_logits_soft_cap has no meaning for mla layers; leave it out."
    if set(model.attention_pattern) != {"mla"}:
        yield "attention_pattern mixes mla with other kinds, whose heads have other widths; make it [mla]."


def check_delta_net(config: Config) -> Iterator[str]:
    """Gated DeltaNet has all of its sizes, and nothing else has any; a key head serves whole value heads."""
    model = config.model
    sizes = {name: getattr(model, name) for name in GDN_SIZES}
    if "gated_delta_net" not in model.attention_pattern:
        for name, size in sizes.items():
            if size is not None:
                yield f"{name}={size} has no effect: attention_pattern has no gated_delta_net layer."
        return
    if missing := [name for name, size in sizes.items() if size is None]:
        yield f"attention_pattern has gated_delta_net layers, which need {', '.join(missing)}."
        return
    if sizes["gdn_num_value_heads"] % sizes["gdn_num_key_heads"]:
        yield (
            f"gdn_num_value_heads={sizes['gdn_num_value_heads']} is not a multiple of "
            f"gdn_num_key_heads={sizes['gdn_num_key_heads']}; each key head serves the same number of value heads."
        )


def check_experts(config: Config) -> Iterator[str]:
    """Experts have sizes exactly where layers have experts, and a token can find as many as it is sent to."""
    model = config.model
    uses_experts = has_experts(model)
    for name, off in (("num_experts", 0), ("num_experts_per_tok", 0), ("moe_mlp_dim", None)):
        size = getattr(model, name)
        if uses_experts and size == off:
            yield f"mlp_pattern has moe layers, but {name} is not set."
        if not uses_experts and size != off:
            yield f"{name}={size} has no effect: no layer is moe; set mlp_pattern=[moe]."
    if not uses_experts or not model.num_experts:
        return
    groups, kept = model.n_routing_groups, model.topk_routing_group
    reachable = model.num_experts // groups * kept
    if model.num_experts % groups:
        yield f"num_experts={model.num_experts} is not a multiple of n_routing_groups={groups}."
    elif kept > groups:
        yield f"topk_routing_group={kept} is above n_routing_groups={groups}."
    elif model.num_experts_per_tok > reachable:
        per_token = model.num_experts_per_tok
        yield f"num_experts_per_tok={per_token} is above the {reachable} experts that a token may choose."
    if model.router_group_score == "top2_sum" and groups > 1 and model.num_experts // groups < 2:
        yield "router_group_score=top2_sum needs at least two experts in a group."
    if model.shared_expert_gate and model.shared_expert_mlp_dim is None:
        yield "shared_expert_gate=true needs a shared expert: set shared_expert_mlp_dim."


def check_norms(config: Config) -> Iterator[str]:
    """A block has a norm somewhere, and two MLPs side by side have them before and after."""
    model = config.model
    if not model.use_pre_norms and not model.use_post_norms:
        yield "use_pre_norms and use_post_norms are both false: a block needs norms before or after its parts."
    elif "dense_and_moe" in model.mlp_pattern and not (model.use_pre_norms and model.use_post_norms):
        yield "mlp_pattern has dense_and_moe layers, which need use_pre_norms=true and use_post_norms=true."


def check_temperature(config: Config) -> Iterator[str]:
    """Temperature tuning acts on layers without rotary positions."""
    if config.model.temperature_tuning and "nope" not in config.model.attention_pattern:
        yield "temperature_tuning=true has no effect: attention_pattern has no nope layer."


def check_rope(config: Config) -> Iterator[str]:
    """Scaling keys are given where the type uses them, and what turns is made of pairs."""
    model = config.model
    if model.rope_type in ("llama3", "yarn") and model.original_max_position_embeddings is None:
        yield f"rope_type={model.rope_type} needs original_max_position_embeddings (8192 for Llama 3.1 to 3.3)."
    if model.rope_type == "llama3" and model.rope_high_freq_factor < model.rope_low_freq_factor:
        yield (
            f"rope_high_freq_factor={model.rope_high_freq_factor:g} must not be below "
            f"rope_low_freq_factor={model.rope_low_freq_factor:g}."
        )
    if model.rope_type == "default" and model.rope_factor != 1:
        yield f"rope_factor={model.rope_factor:g} has no effect with rope_type=default; set rope_type or leave it at 1."
    if model.rope_type == "yarn" and model.beta_fast < model.beta_slow:
        yield f"beta_fast={model.beta_fast:g} must not be below beta_slow={model.beta_slow:g}."
    if model.local_rope_max_timescale is not None and "local" not in model.attention_pattern:
        yield "local_rope_max_timescale has no effect: attention_pattern has no local layer."
    if "mla" in model.attention_pattern and model.partial_rotary_factor != 1:
        yield "partial_rotary_factor has no meaning for mla: qk_rope_head_dim says what turns."
    elif "mla" not in model.attention_pattern or model.qk_rope_head_dim is not None:
        for kind in dict.fromkeys(model.attention_pattern):
            if (width := rotary_dim(model, kind)) % 2:
                name = "qk_rope_head_dim" if kind == "mla" else "head_dim x partial_rotary_factor"
                yield f"{name} is {width}, which is odd; rotary positions turn pairs, so make it even."


MODEL_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_heads,
    check_layer_kinds,
    check_latent_attention,
    check_delta_net,
    check_experts,
    check_norms,
    check_temperature,
    check_rope,
)
