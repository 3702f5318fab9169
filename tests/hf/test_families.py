"""The families' tables against golden files, and against transformers where it is installed."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxlite.config.layers import layer_groups, layer_places
from maxlite.config.schema import KEYS, ModelConfig
from maxlite.errors import ConversionError
from maxlite.hf.config_json import read_config, write_config
from maxlite.hf.families import BY_MODEL_TYPE, BY_WRAPPER, FAMILIES
from maxlite.hf.family_canonical import default_config
from maxlite.hf.family_fields import Field, Fixed
from maxlite.hf.plan import plan_tensors
from maxlite.hf.source import Respelled
from maxlite.model.build import build_model
from tests.hf.cases import CASES

GOLDENS = Path(__file__).parents[1] / "golden" / "hf"
GROUPS = {case.config_class: name for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_tables_hold_every_tensor_in_its_shape(name):
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    family, keys = read_config(golden["config"], "config.json")
    model = build_model(ModelConfig(**keys), default_config().compute)
    places = layer_places(layer_groups(model.config))
    plan = plan_tensors(family.table, model.abstract_params, places)
    shapes = {piece.tensor: "x".join(map(str, piece.shape)) for piece in plan.pieces}
    assert shapes == golden["tensors"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_lines_name_keys_that_exist(family):
    model_keys = {name for name, key in KEYS.items() if key.section == "model"}
    fields = [line for line in family.lines if isinstance(line, Field)]
    written = [field.name for field in fields]
    assert len(written) == len(set(written))
    for field in fields:
        assert ({field.keys} if isinstance(field.keys, str) else set(field.keys)) <= model_keys
        assert field.words is None or set(field.words.values()) <= set(KEYS[field.key].choices)
    for line in family.lines:
        if isinstance(line, Fixed):
            assert dict(line.values).keys() <= model_keys
    assert family.table.name == family.model_type


def test_wrappers_and_aliases_find_their_family():
    assert {name: family.model_type for name, family in BY_WRAPPER.items()} == {
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "llama4": "llama4_text",
    }
    assert BY_MODEL_TYPE["kimi_k2"] is BY_MODEL_TYPE["deepseek_v3"]


class _Names:
    """A source of which only the names matter."""

    def __init__(self, *names: str):
        self.place = Path("folder")
        self.tensors: dict[str, Any] = dict.fromkeys(names)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.language_model.model.",
                                    "language_model.model.model.", "model."])  # fmt: skip
@pytest.mark.parametrize("kind", BY_WRAPPER)
def test_text_part_of_multimodal_folders(kind, prefix):
    table = BY_WRAPPER[kind].table
    head = {"language_model.model.": "language_model.lm_head.weight"}.get(prefix, "lm_head.weight")
    names = _Names(f"{prefix}layers.0.self_attn.q_proj.weight", f"{prefix}norm.weight", head)
    assert set(Respelled(names, table.spellings).tensors) == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("gemma3", "vision_tower.vision_model.post_layernorm.weight"),
        ("gemma3", "model.vision_tower.embeddings.patch_embedding.bias"),
        ("gemma3", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ("gemma4", "model.vision_tower.std_bias"),
        ("gemma4", "model.audio_tower.output_proj.bias"),
        ("gemma4", "model.embed_audio.embedding_projection.weight"),
        ("gemma4_unified", "model.vision_embedder.patch_dense.weight"),
        ("llama4", "vision_model.class_embedding"),
        ("llama4", "multi_modal_projector.linear_1.weight"),
    ],
)
def test_vision_part_is_left_out_knowingly(kind, tensor):
    table = BY_WRAPPER[kind].table
    (name,) = Respelled(_Names(tensor), table.spellings).tensors
    assert any("text model answers" in ignored.reason for ignored in table.ignored if ignored.matches(name))
    assert not any(ignored.matches("model.layers.0.mlp.foo.weight") for ignored in table.ignored)


def test_multi_token_prediction_of_qwen3_next_is_left_out():
    ignored = BY_MODEL_TYPE["qwen3_next"].table.ignored
    assert any(one.matches("mtp.layers.0.self_attn.q_proj.weight") for one in ignored)
    assert not any(one.matches("model.layers.0.linear_attn.foo.weight") for one in ignored)


def test_computed_frequencies_in_old_files_are_left_out():
    for family in FAMILIES:
        names = ("model.layers.3.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
        assert all(any(ignored.matches(name) for ignored in family.table.ignored) for name in names)


def test_router_bias_stays_float32():
    kept = {rule.path for family in FAMILIES for rule in family.table.rules if rule.float32}
    assert kept == {"mlp/selection_bias"}


# --- against transformers ---

torch_mark = pytest.mark.torch
# Keys that transformers works out of others, or that say the same in another way.
_DERIVED = {
    "transformers_version", "architectures", "dtype", "torch_dtype", "max_window_layers", "no_rope_layer_interval",
    "interleave_moe_layer_step", "decoder_sparse_step", "mlp_only_layers", "num_nextn_predict_layers", "head_dim",
    "_sliding_window_pattern", "n_group", "topk_group", "floor_scale", "attn_scale", "sliding_window",
    "rope_parameters", "_name_or_path",
}  # fmt: skip
_LAYER_LISTS = ("layer_types", "no_rope_layers", "moe_layers")


@pytest.fixture
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    module.utils.logging.set_verbosity_error()
    return module


def plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def keys_or_refusal(given: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return read_config(given, "config.json")[1]
    except ConversionError as error:
        return str(error)


@torch_mark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_what_is_written(name, transformers, tmp_path):
    case = CASES[name]
    for turned in ({}, *case.turned):
        settings = copy.deepcopy({**case.settings, **turned})
        given = plain(getattr(transformers, case.config_class)(**settings))
        family, keys = read_config(given, "config.json")
        ids = {key: given.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        written = write_config(family, ModelConfig(**keys), "bfloat16", ids)
        (tmp_path / "config.json").write_text(json.dumps(written))
        opened = transformers.AutoConfig.from_pretrained(tmp_path)
        assert type(opened).__name__ == case.config_class
        assert str(opened.dtype) == "torch.bfloat16"
        found = plain(opened)
        assert read_config(found, "config.json")[1] == keys
        different = {key for key in {*given, *found} - _DERIVED if given.get(key) != found.get(key)}
        assert not different, {key: (given.get(key), found.get(key)) for key in different}


@torch_mark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GROUPS.values())
def test_absent_keys_have_the_defaults_of_the_class(name, transformers):
    case = CASES[name]
    config_class = getattr(transformers, case.config_class)
    # A width that every default number of heads divides; the cases' sizes differ from all defaults.
    given = plain(config_class(**copy.deepcopy({**case.settings, "hidden_size": 64})))
    for key in sorted(given.keys() - {"model_type"}):
        # Lists of layers have as many entries as there are layers.
        gone = {key, *_LAYER_LISTS} if key == "num_hidden_layers" else {key}
        rest = {name: value for name, value in copy.deepcopy(given).items() if name not in gone}
        if (config_class.model_type, key) != ("deepseek_v2", "num_experts_per_tok"):
            filled = plain(config_class.from_dict(copy.deepcopy(rest)))
            ours, theirs = keys_or_refusal(rest), keys_or_refusal(filled)
            assert ours == theirs, f"{key}: {ours} {theirs}"


@torch_mark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config_class", GROUPS)
def test_an_empty_file_is_the_class_as_it_is(config_class, transformers):
    chosen = getattr(transformers, config_class)
    # What the class has of itself is no model that maxlite, or in the first case transformers, can make.
    needed = {"deepseek_v2": {"num_experts_per_tok": 6}, "gemma4_text": {"hidden_size_per_layer_input": 0}}
    given = needed.get(chosen.model_type, {})
    filled = read_config(plain(chosen(**given)), "config.json")[1]
    assert read_config({"model_type": chosen.model_type, **given}, "config.json")[1] == filled


@torch_mark
@pytest.mark.filterwarnings("ignore")
def test_architectures_are_those_that_transformers_opens(transformers):
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {family.model_type: family.architecture for family in FAMILIES} == {
        family.model_type: mapping[family.model_type] for family in FAMILIES
    }


def test_cases_cover_every_family():
    classes = {re.sub(r"[^a-z0-9]", "", case.config_class.lower().removesuffix("config")) for case in CASES.values()}
    assert {family.model_type.replace("_", "") for family in FAMILIES} <= classes | {"ministral"}
