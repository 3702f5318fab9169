"""Gemma 4: config.json and tensors of its text models, with the defaults of transformers' configuration classes."""

import dataclasses
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import family_tensors as tensors
from maxlite.hf.family_fields import ABSENT, ConfigReader, Expect, Field, Json, Line, ModelKeys, fixed, is_count
from maxlite.hf.family_layers import Windows, all_but_each
from maxlite.hf.family_lines import (
    ACTIVATIONS,
    ALL_BIASES,
    HEAD_NORM,
    NO_MLP_BIAS,
    Family,
    head_dim,
    mlp_width,
    sizes,
    tied,
)
from maxlite.hf.rope_json import Rope

_OVERRIDES = {"head_dim": "global_head_dim", "num_key_value_heads": "global_num_kv_heads"}
_DEFAULT_GLOBAL_HEAD_DIM = 512
_EXPERT_SIZES = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "moe_mlp_dim",
}


@dataclasses.dataclass(frozen=True)
class _FullLayers:
    """Heads of the full layers: global_head_dim and num_global_key_value_heads, or what per_layer_config overrides."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads both spellings; of two in one file per_layer_config counts, as in transformers."""
        width, number = reader.take("global_head_dim"), reader.take_given("num_global_key_value_heads")
        overrides = reader.take_given("per_layer_config")
        if overrides is None:
            width = _DEFAULT_GLOBAL_HEAD_DIM if width is ABSENT else width
            read = {"head_dim": width}
            # transformers looks at the number only where keys are values.
            if number is not None and keys["share_kv_projections"]:
                read["num_key_value_heads"] = number
        else:
            read = self._of_full_layers(overrides, reader, keys)
        for theirs, value in read.items():
            if is_count(value) and value > 0:
                keys[_OVERRIDES[theirs]] = value
            else:
                reader.refuse(f"{theirs}={value!r} of full_attention layers: it must be a whole number above 0")

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the first spelling, which all versions read."""
        json["global_head_dim"] = model.global_head_dim or model.head_dim
        json["num_global_key_value_heads"] = model.global_num_kv_heads

    @staticmethod
    def _of_full_layers(given: Any, reader: ConfigReader, keys: ModelKeys) -> dict[str, Any]:
        """What all full layers, and no others, have in per_layer_config."""
        pattern = keys["attention_pattern"]
        full = [n for n in range(keys["num_decoder_layers"]) if pattern[n % len(pattern)] == "full"]
        # transformers fills up the numbers with zeros to one length.
        known = isinstance(given, dict) and all(n.isdecimal() for n in given)
        layers = {int(n): value for n, value in given.items()} if known else {-1: given}
        same = layers.get(full[-1], {})
        wanted = dict.fromkeys(full, same) if same else {}
        if not isinstance(same, dict) or same.keys() - _OVERRIDES.keys() or layers != wanted:
            reader.refuse(
                f"per_layer_config={given!r}: it may say {' and '.join(_OVERRIDES)} of the full_attention layers, the "
                "same of all of them, and nothing else"
            )
            return {}
        return same


@dataclasses.dataclass(frozen=True)
class _ExpertsBeside:
    """enable_moe_block: whether the dense MLP of every layer has experts beside it, and how many of what width."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads the kind of all layers and the experts' sizes, which count for nothing if there are none."""
        enabled = reader.take_bool("enable_moe_block", False)
        keys["mlp_pattern"] = ("dense_and_moe",) if enabled else ("dense",)
        for theirs, ours in _EXPERT_SIZES.items():
            value = reader.take_given(theirs)
            if enabled and not (is_count(value) and value > 0):
                reader.refuse(f"{theirs}={value!r}: with enable_moe_block it must be a whole number above 0")
            elif enabled:
                keys[ours] = value

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes all four keys."""
        json["enable_moe_block"] = enabled = "dense_and_moe" in model.mlp_pattern
        for theirs, ours in _EXPERT_SIZES.items():
            json[theirs] = getattr(model, ours) if enabled else None


def _gemma4(length: int, window: int) -> tuple[Line, ...]:
    """The lines that both have."""
    return (
        *sizes(262144, 2304, 30, (8, 4), length, 1e-6),
        head_dim(256, null=False),
        mlp_width(9216),
        Field("hidden_activation", "mlp_activation", "gelu_tanh", words=ACTIVATIONS),
        NO_MLP_BIAS,
        ALL_BIASES,
        HEAD_NORM,
        Field("final_logit_softcapping", "final_logits_soft_cap", None),
        fixed(
            query_pre_attn_scalar=1.0,
            use_v_norm=True,
            use_post_norms=True,
            use_layer_scalar=True,
            scale_embeddings=True,
            scaled_router=True,
        ),
        tied(True),
        Rope(
            1e6,
            nested=True,
            local_theta=10000.0,
            absent={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            new_only=True,
        ),
        Windows(window, all_but_each(6), listed=True, always=True, last_full=True),
        Field("attention_k_eq_v", "share_kv_projections", False),
        _FullLayers(),
        # Images see both ways, text does not.
        Expect("use_bidirectional_attention", ("vision", None)),
        # The small models have layers that use the keys and values of earlier ones.
        Expect("num_kv_shared_layers", (0,)),
        Expect("use_double_wide_mlp", (False,)),
    )


# Rows of a table that only models with hidden_size_per_layer_input have, and a width that nothing reads.
_IGNORED = frozenset({"vocab_size_per_layer_input", "expert_intermediate_size"})
_AROUND = frozenset(
    {"audio_config", "vision_soft_tokens_per_image", "eoa_token_index"}
    | {f"{token}_token_id" for token in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")}
)
GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    (
        *_gemma4(131072, 512),
        # The small models give every layer an embedding of its own.
        Expect("hidden_size_per_layer_input", (0,), written=0, default=256),
        _ExpertsBeside(),
    ),
    tensors.multimodal_table(
        "gemma4_text", tensors.GEMMA4, "vision_tower", "embed_vision", "audio_tower", "embed_audio"
    ),
    ignored_keys=_IGNORED,
    wrapper="gemma4",
    wrapper_architecture="Gemma4ForConditionalGeneration",
    wrapper_keys=_AROUND,
)
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    (
        *_gemma4(262144, 1024),
        Expect("hidden_size_per_layer_input", (0, None)),
        Expect("enable_moe_block", (False, None)),
        Expect("num_experts", (0, None)),
        Expect("top_k_experts", (0, None)),
        Expect("moe_intermediate_size", (0, None)),
    ),
    tensors.multimodal_table("gemma4_unified_text", tensors.GEMMA4, "vision_embedder", "embed_vision", "embed_audio"),
    ignored_keys=_IGNORED,
    wrapper="gemma4_unified",
    wrapper_architecture="Gemma4UnifiedForConditionalGeneration",
    wrapper_keys=_AROUND,
)
