"""What the families' tables share: the Family itself, and the lines that most of them have."""

import dataclasses
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.family_fields import ConfigReader, Expect, Field, Json, Line, ModelKeys, fixed
from maxlite.hf.rules import Table


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type.

    architecture: the class that opens it. lines: its config.json, in the order of reading, since a default may be
    worked out from keys before it. table: its tensors. ignored_keys: keys of its config.json that change nothing,
    besides those that change nothing anywhere. aliases: other model_types that mean the same. wrapper: the model_type
    of multimodal folders whose text part this is, wrapper_architecture their class, and wrapper_keys what they have
    around the text part that others have not. whole_heads: transformers refuses a hidden_size that is not a multiple of
    the number of heads.
    """

    model_type: str
    architecture: str
    lines: tuple[Line, ...]
    table: Table
    ignored_keys: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    wrapper: str | None = None
    wrapper_architecture: str | None = None
    wrapper_keys: frozenset[str] = frozenset()
    whole_heads: bool = False


# Of several words for one of ours the first is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")

ALL_BIASES = Field("attention_bias", ("attention_bias", "attention_out_bias"), False)
NO_BIASES = (Expect("attention_bias", (False, None)), fixed(attention_bias=False, attention_out_bias=False))
HEAD_NORM = fixed(use_qk_norm=True, qk_norm_type="head")
PROJECTION_NORM = fixed(use_qk_norm=True, qk_norm_type="projection")
ACTIVATION = Field("hidden_act", "mlp_activation", "silu", words=ACTIVATIONS)
NO_MLP_BIAS = Expect("mlp_bias", (False, None))
EVERY_LAYER_MOE = fixed(mlp_pattern=("moe",), num_dense_layers=0)
TOPK_NORM = Field("norm_topk_prob", "norm_topk_prob", False)
NO_JITTER = Expect("router_jitter_noise", (0, None))
NO_MROPE = Expect("use_mrope", (False, None))


def query_heads(keys: ModelKeys) -> Any:
    """As many as there are query heads."""
    return keys["num_query_heads"]


def divided_width(keys: ModelKeys) -> Any:
    """The model's width shared out over the query heads."""
    return keys["emb_dim"] // keys["num_query_heads"]


def sizes(vocab: int, width: int, layers: int, heads: tuple[int, Any], length: int, epsilon: float) -> tuple[Line, ...]:
    """Returns the lines that all families have, with their defaults; heads: of queries, and of keys and values."""
    return (
        Field("vocab_size", "vocab_size", vocab),
        Field("hidden_size", "emb_dim", width),
        Field("num_hidden_layers", "num_decoder_layers", layers),
        Field("num_attention_heads", "num_query_heads", heads[0]),
        Field("num_key_value_heads", "num_kv_heads", heads[1], null=query_heads),
        Field("max_position_embeddings", "max_position_embeddings", length),
        Field("rms_norm_eps", "normalization_layer_epsilon", epsilon),
        # It acts in training only; to train on without it would be another model's training.
        Expect("attention_dropout", (0, None)),
    )


def head_dim(default: Any = divided_width, *, null: bool = True) -> Field:
    """Returns the line of head_dim; null: whether null means the width shared out over the heads."""
    return Field("head_dim", "head_dim", default, null=divided_width if null else None)


@dataclasses.dataclass(frozen=True)
class DividedHeads:
    """head_dim of a family whose heads always share out the model's width."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Works head_dim out, and refuses another one."""
        keys["head_dim"] = divided_width(keys)
        if (given := reader.take_given("head_dim")) not in (None, keys["head_dim"]):
            reader.refuse(
                f"head_dim={given!r} is not supported; in this family it is hidden_size / num_attention_heads, "
                f"{keys['head_dim']}"
            )

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes nothing."""


def mlp_width(default: int) -> Field:
    """Returns the line of the dense MLP's width."""
    return Field("intermediate_size", "mlp_dim", default)


def tied(default: bool) -> Field:
    """Returns the line of tied embeddings."""
    return Field("tie_word_embeddings", "logits_via_embedding", default)


def experts(number: int, chosen: Any, name: str = "num_experts") -> tuple[Field, Field]:
    """Returns the lines of routed experts: how many there are, under `name`, and how many a token is sent to."""
    others = tuple(other for other in _EXPERT_NAMES if other != name)
    return (
        Field(name, "num_experts", number, aliases=others),
        Field("num_experts_per_tok", "num_experts_per_tok", chosen, aliases=("experts_per_token",)),
    )


def expert_width(default: int, *keys: str, name: str = "moe_intermediate_size") -> Field:
    """Returns the line of an expert's width, and of other widths that are the same."""
    return Field(name, ("moe_mlp_dim", *keys), default, unset=lambda model: default)
