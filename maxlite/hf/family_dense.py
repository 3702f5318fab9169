"""The dense families: config.json and tensors of each, with the defaults of transformers' configuration classes."""

from maxlite.hf import family_tensors as tensors
from maxlite.hf.family_fields import Expect, Field, Line, fixed
from maxlite.hf.family_layers import Windows, all_but_each, every_layer, from_max_window_layers
from maxlite.hf.family_lines import (
    ACTIVATION,
    ACTIVATIONS,
    ALL_BIASES,
    HEAD_NORM,
    NO_BIASES,
    NO_MLP_BIAS,
    NO_MROPE,
    PROJECTION_NORM,
    Family,
    head_dim,
    mlp_width,
    query_heads,
    sizes,
    tied,
)
from maxlite.hf.rope_json import Rope

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *sizes(32000, 4096, 32, (32, query_heads), 2048, 1e-6),
        head_dim(),
        mlp_width(11008),
        ACTIVATION,
        Field("mlp_bias", "mlp_bias", False),
        ALL_BIASES,
        tied(False),
        Rope(),
        Expect("rope_interleaved", (False, None)),
    ),
    tensors.table("llama", tensors.DENSE),
    ignored_keys=frozenset({"is_llama_config"}),
    whole_heads=True,
)

_MISTRAL = (
    *sizes(32000, 4096, 32, (32, 8), 131072, 1e-6),
    head_dim(),
    mlp_width(14336),
    ACTIVATION,
    NO_MLP_BIAS,
    *NO_BIASES,
    tied(False),
    Rope(),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (*_MISTRAL, Windows(4096, every_layer)),
    tensors.table("mistral", tensors.DENSE),
)
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    (*_MISTRAL, Windows(4096, every_layer, listed=True, always=True)),
    tensors.table("ministral", tensors.DENSE),
)

_QWEN = (
    *sizes(151936, 4096, 32, (32, 32), 32768, 1e-6),
    mlp_width(22016),
    ACTIVATION,
    NO_MLP_BIAS,
    tied(False),
    Rope(),
    Windows(4096, from_max_window_layers, listed=True, switched=True),
    NO_MROPE,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        *_QWEN,
        head_dim(),
        # In the code, not in the file: queries, keys and values have biases, the output has none.
        Expect("attention_bias", (True, None)),
        fixed(attention_bias=True, attention_out_bias=False),
    ),
    tensors.table("qwen2", tensors.DENSE),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (*_QWEN, head_dim(128, null=False), ALL_BIASES, HEAD_NORM),
    tensors.table("qwen3", tensors.DENSE),
)

_GEMMA_NORMS = fixed(norm_scale_offset=1.0, scale_embeddings=True)
_CAUSAL = Expect("use_bidirectional_attention", (False, None))
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    (
        *sizes(256000, 3072, 28, (16, 16), 8192, 1e-6),
        head_dim(256, null=False),
        mlp_width(24576),
        # The first files say gelu and mean its tanh form; some say that in hidden_activation besides.
        Field(
            "hidden_act",
            "mlp_activation",
            "gelu_tanh",
            words={"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS, "gelu": "gelu_tanh"},
        ),
        Expect("hidden_activation", ("gelu_pytorch_tanh", None)),
        NO_MLP_BIAS,
        ALL_BIASES,
        _GEMMA_NORMS,
        tied(True),
        Rope(),
        _CAUSAL,
    ),
    tensors.table("gemma", tensors.DENSE),
)


def _gemma2(defaults: tuple[Line, ...], attention_cap: float | None, final_cap: float | None) -> tuple[Line, ...]:
    """The lines that Gemma 2 and the text part of Gemma 3 share."""
    return (
        *defaults,
        head_dim(256, null=False),
        mlp_width(9216),
        Field("hidden_activation", "mlp_activation", "gelu_tanh", words=ACTIVATIONS, aliases=("hidden_act",)),
        NO_MLP_BIAS,
        ALL_BIASES,
        Field("query_pre_attn_scalar", "query_pre_attn_scalar", 256.0, unset=lambda m: m.head_dim, whole=True),
        Field("attn_logit_softcapping", "attn_logits_soft_cap", attention_cap),
        Field("final_logit_softcapping", "final_logits_soft_cap", final_cap),
        _GEMMA_NORMS,
        fixed(use_post_norms=True),
        tied(True),
        _CAUSAL,
    )


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_gemma2(sizes(256000, 2304, 26, (8, 4), 8192, 1e-6), 50.0, 30.0),
        Rope(),
        Windows(4096, all_but_each(2), listed=True, always=True),
    ),
    tensors.table("gemma2", tensors.DENSE_FOUR_NORMS),
    whole_heads=True,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_gemma2(sizes(262208, 2304, 26, (8, 4), 131072, 1e-6), None, None),
        HEAD_NORM,
        Rope(1e6, nested=True, local_theta=10000.0, local_name="rope_local_base_freq"),
        Windows(4096, all_but_each(6, "sliding_window_pattern"), listed=True, always=True),
    ),
    tensors.multimodal_table("gemma3_text", tensors.DENSE_FOUR_NORMS, "vision_tower", "multi_modal_projector"),
    ignored_keys=frozenset({"_sliding_window_pattern"}),
    wrapper="gemma3",
    wrapper_architecture="Gemma3ForConditionalGeneration",
    whole_heads=True,
)

_OLMO2 = (
    *sizes(50304, 4096, 32, (32, query_heads), 2048, 1e-5),
    head_dim(),
    mlp_width(11008),
    ACTIVATION,
    NO_MLP_BIAS,
    ALL_BIASES,
    PROJECTION_NORM,
    fixed(use_pre_norms=False, use_post_norms=True),
    tied(False),
)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", (*_OLMO2, Rope()), tensors.table("olmo2", tensors.DENSE_POST_NORM))
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    (*_OLMO2, Rope(500000.0, nested=True), Windows(4096, all_but_each(4), listed=True, always=True)),
    tensors.table("olmo3", tensors.DENSE_POST_NORM),
)
