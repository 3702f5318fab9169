"""config.json <-> the keys of the model. Nothing here imports jax, so what is wrong with a folder shows at once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.check_model import MODEL_CHECKS
from maxlite.config.layers import layer_specs
from maxlite.config.schema import ModelConfig
from maxlite.errors import ConversionError
from maxlite.hf.compressed_json import METHOD as COMPRESSED
from maxlite.hf.compressed_json import ROUNDED_INPUTS
from maxlite.hf.families import BY_MODEL_TYPE, BY_WRAPPER, FAMILIES
from maxlite.hf.family_canonical import canonical, default_config
from maxlite.hf.family_fields import ConfigReader, Json, ModelKeys
from maxlite.hf.family_lines import Family
from maxlite.hf.quantization_json import quantization_method, quantization_problems

# Keys that say nothing about what the model computes, in any family.
IGNORED_KEYS = frozenset(
    {
        # who made the file, and for which code
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        # read elsewhere: the dtype of the files and the tokens that begin and end a text
        "dtype",
        "torch_dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "quantization_config",
        # how the first weights were drawn, and how the load of experts enters the loss
        "initializer_range",
        "router_aux_loss_coef",
        "output_router_logits",
        # how transformers runs it, and what it returns
        "use_cache",
        "cache_implementation",
        "pretraining_tp",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "id2label",
        "label2id",
    }
)
# Keys of multimodal folders besides text_config.
_WRAPPER_KEYS = frozenset(
    {
        "text_config",
        "vision_config",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "mm_tokens_per_image",
        "tie_word_embeddings",
    }
)
# Keys that may stand in any file, but with one value only.
_MUST_BE = {"is_encoder_decoder": (False,), "chunk_size_feed_forward": (0,), "add_cross_attention": (False,)}


def read_config(json: Mapping[str, Any], where: str) -> tuple[Family, ModelKeys]:
    """Reads a config.json of either spelling, that of transformers 4 or 5.

    where: the file's name, for messages. Returns: the family, whose table also knows what tensors of this very folder
    are left out, and every key of ModelConfig.

    Raises:
        ConversionError: lists every key that is missing, not known, or has a value that maxlite cannot honour.
    """
    family, text, problems = _choose_family(json, where)
    reader = ConfigReader(text, where)
    keys: ModelKeys = dataclasses.asdict(default_config().model)
    for line in family.lines:
        line.read(reader, keys)
    problems += reader.problems
    for name, allowed in _MUST_BE.items():
        if (value := reader.take(name)) not in (*allowed, None) and name in text:
            problems.append(f"{where}: {name}={value!r} is not supported; it may be {allowed[0]!r}.")
    problems += [
        f"{where}: the key {name}={text[name]!r} is not known for model_type {family.model_type}, and it may change "
        "what the model computes."
        for name in reader.unasked(IGNORED_KEYS | family.ignored_keys)
    ]
    problems += quantization_problems(json, where)
    if not problems:
        model = canonical(ModelConfig(**keys))
        config = dataclasses.replace(default_config(), model=model)
        problems = [f"{where}: {message}" for check in MODEL_CHECKS for message in check(config)]
        keys = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    if problems:
        raise ConversionError("\n".join(dict.fromkeys(problems)))
    left_out = (*reader.ignored, *([ROUNDED_INPUTS] if quantization_method(json) == COMPRESSED else []))
    table = dataclasses.replace(family.table, ignored=(*family.table.ignored, *left_out))
    return dataclasses.replace(family, table=table), keys


def write_config(
    family: Family, model: ModelConfig, dtype: str, token_ids: Mapping[str, int | list[int] | None] | None = None
) -> Json:
    """Returns a config.json, in the spelling of transformers 5, that says all of `model`.

    dtype: of the tensors beside it. token_ids: bos_token_id, eos_token_id and pad_token_id; null if not given, so that
    none is taken from the family's defaults.

    Raises:
        ConversionError: the family cannot express the model; names the keys.
    """
    differences = inexpressible_keys(family, model)
    if differences:
        raise ConversionError(
            f"model_type {family.model_type} of Hugging Face cannot express this model: {'; '.join(differences)}."
        )
    ids = {name: (token_ids or {}).get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"architectures": [family.architecture], **_written(family, canonical(model)), "dtype": dtype, **ids}


def family_for(model: ModelConfig) -> Family:
    """Returns the first family that can express `model`.

    Raises:
        ConversionError: none can; names the keys that are in the way of the family that comes nearest.
    """
    nearest: tuple[Family, list[str]] | None = None
    for family in FAMILIES:
        differences = inexpressible_keys(family, model)
        if not differences:
            return family
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = (family, differences)
    assert nearest is not None, "there are families"
    raise ConversionError(
        f"no model_type of Hugging Face that maxlite knows can express this model; the nearest is "
        f"{nearest[0].model_type}, in the way of which is: {'; '.join(nearest[1])}. Change those keys, or keep the "
        "model in maxlite's own checkpoint."
    )


def inexpressible_keys(family: Family, model: ModelConfig) -> list[str]:
    """Returns what of `model` would be lost in a config.json of `family`, one phrase a key; none if nothing would."""
    wanted = canonical(model)
    if family.whole_heads and wanted.emb_dim % wanted.num_query_heads:
        return [
            f"emb_dim={wanted.emb_dim} is not a multiple of num_query_heads={wanted.num_query_heads}, "
            "which transformers refuses"
        ]
    try:
        _, keys = read_config({"model_type": family.model_type, **_written(family, wanted)}, family.model_type)
    except ConversionError as error:
        return [line.removesuffix(".") for line in str(error).splitlines()]
    # No layer has this width, whatever it is; files keep it all the same.
    unused = () if any(spec.mlp != "moe" for spec in layer_specs(wanted)) else ("mlp_dim",)
    return [
        f"{name}={_shown(getattr(wanted, name))} (it would be {_shown(value)})"
        for name, value in keys.items()
        if value != getattr(wanted, name) and name not in unused
    ]


def _choose_family(json: Mapping[str, Any], where: str) -> tuple[Family, Mapping[str, Any], list[str]]:
    """The family, the object with the text model's keys, and what is wrong around it."""
    kind = json.get("model_type")
    problems: list[str] = []
    text = json
    if isinstance(kind, str) and kind in BY_WRAPPER:
        family = BY_WRAPPER[kind]
        inner = json.get("text_config")
        if not isinstance(inner, dict):
            raise ConversionError(f"{where}: model_type {kind} needs an object text_config.")
        unknown = sorted(json.keys() - _WRAPPER_KEYS - family.wrapper_keys - IGNORED_KEYS)
        problems += [f"{where}: the key {name}={json[name]!r} is not known for model_type {kind}." for name in unknown]
        text = dict(inner)
        tied = json.get("tie_word_embeddings")
        if tied is not None and text.setdefault("tie_word_embeddings", tied) != tied:
            problems.append(f"{where}: tie_word_embeddings={tied!r}, but in text_config it is {not tied}.")
        if (inner_kind := inner.get("model_type", family.model_type)) != family.model_type:
            problems.append(f"{where}: text_config.model_type={inner_kind!r}: it must be {family.model_type}.")
    else:
        # As transformers does: a Mistral with a list of kinds is a Ministral.
        name = "ministral" if kind == "mistral" and json.get("layer_types") is not None else kind
        if not isinstance(name, str) or name not in BY_MODEL_TYPE:
            known = ", ".join(sorted({*BY_MODEL_TYPE, *BY_WRAPPER}))
            raise ConversionError(f"{where}: model_type={kind!r} is not supported; it may be one of {known}.")
        family = BY_MODEL_TYPE[name]
    allowed = {family.architecture, family.wrapper_architecture}
    if kind == "mistral":
        allowed.add(BY_MODEL_TYPE["mistral"].architecture)
    given = json.get("architectures")
    if given is not None and (not isinstance(given, list) or not set(map(str, given)) <= allowed):
        listed = " or ".join(sorted(name for name in allowed if name))
        problems.append(f"{where}: architectures={given!r} is not supported for model_type {kind}; it may be {listed}.")
    return family, text, problems


def _written(family: Family, model: ModelConfig) -> Json:
    json: Json = {"model_type": family.model_type}
    for line in family.lines:
        line.write(model, json)
    return json


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, bool | None):
        return words[value]
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
