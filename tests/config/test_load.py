import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from maxlite.config.load import (
    MODEL_KEYS,
    RENAMED,
    RESOLVED_HEADER,
    dump_config,
    load_config,
    model_names,
    package_roots,
    suggestion,
)
from maxlite.config.schema import KEYS
from maxlite.errors import ConfigError

BASE = package_roots()[-1] / "base.yml"


def problems_of(path="base.yml", overrides=(), environment=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), overrides, environment or {})
    return str(caught.value).splitlines()


def line_of(text: str, file: Path = BASE) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if line.startswith(text))


@pytest.fixture
def model_yaml(tmp_path, monkeypatch):
    """Writes models/x.yml into a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    def write(text: str) -> str:
        (tmp_path / "models" / "x.yml").write_text(text)
        return "model=x"

    return write


def test_base_alone():
    config = load_config("base.yml", [], {})
    assert config.flat() == load_config(str(BASE), [], {}).flat()
    for name in KEYS:
        assert config.sources[name] == f"base.yml:{line_of(name + ':')}"


@pytest.mark.parametrize("text", ["1e-4", "1.e-4", "1E-4", ".0001", "0.0001"])
def test_scientific_notation(text, model_yaml):
    assert load_config("base.yml", [f"learning_rate={text}"], {}).optimizer.learning_rate == 0.0001
    assert load_config("base.yml", [], {"MAXLITE_LEARNING_RATE": text}).optimizer.learning_rate == 0.0001
    config = load_config("base.yml", [model_yaml(f"normalization_layer_epsilon: {text}\n")], {})
    assert config.model.normalization_layer_epsilon == 0.0001
    own = Path("own.yml")
    own.write_text(f"learning_rate: {text}\n")
    assert load_config(str(own), [], {}).optimizer.learning_rate == 0.0001


def test_a_whole_number_is_a_float_where_a_float_is_asked():
    value = load_config("base.yml", ["learning_rate=3"], {}).optimizer.learning_rate
    assert value == 3.0 and type(value) is float


def test_a_word_for_a_number_names_key_value_and_source():
    (line,) = problems_of(overrides=["learning_rate=abc"])
    assert line == "learning_rate=abc (command line): not a number; it takes a number, at least 0."


@pytest.mark.parametrize("text", ["False", "false"])
def test_false_is_false(text):
    assert load_config("base.yml", [f"packing={text}"], {}).data.packing is False
    assert load_config("base.yml", [], {"MAXLITE_PACKING": text}).data.packing is False


@pytest.mark.parametrize("text", ["maybe", "0"])
def test_what_is_neither_true_nor_false(text):
    assert problems_of(overrides=[f"packing={text}"]) == [
        f"packing={text} (command line): not true or false; it takes true or false."
    ]


def test_a_file_and_the_command_line_spell_alike(tmp_path):
    own = tmp_path / "own.yml"
    own.write_text("run_name: 007\nsteps: 010\nmodel: default\ndataset_path: no\n")
    config = load_config(str(own), [], {})
    assert (config.run.run_name, config.train.steps, config.data.dataset_path) == ("007", 10, ("no",))
    own.write_text("packing: yes\nsteps: 0x10\n")
    assert [line.split(" ")[0] for line in problems_of(own)] == ["packing=yes", "steps=0x10"]


@pytest.mark.parametrize("way", ["command line", "model YAML", "environment", "base file"])
def test_a_misspelt_key_names_its_place_and_the_nearest_key(way, model_yaml):
    arguments, source = {
        "command line": (("base.yml", ["emb_dmi=8"]), "command line"),
        "model YAML": (("base.yml", [model_yaml("vocab_size: 8\nemb_dmi: 8\n")]), "models/x.yml:2"),
        "environment": (("base.yml", [], {"MAXLITE_EMB_DMI": "8"}), "environment MAXLITE_EMB_DMI"),
        "base file": (("own.yml", []), "own.yml:1"),
    }[way]
    Path("own.yml").write_text("emb_dmi: 8\n")
    lines = problems_of(*arguments)
    assert f"{source}: unknown key emb_dmi; did you mean emb_dim?" in lines


def test_learning_rat():
    assert problems_of(overrides=["learning_rat=1e-3"]) == [
        "command line: unknown key learning_rat; did you mean learning_rate?"
    ]


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_tells_the_new_one(old):
    (line,) = problems_of(overrides=[f"{old}=1"])
    assert line == f"command line: unknown key {old}; here it is called {RENAMED[old]}."
    assert old not in KEYS
    assert all(new in KEYS for new in RENAMED[old].split(", "))


def test_a_word_like_no_key_points_to_the_list():
    assert "maxlite config base.yml" in suggestion("qwertyuiop")


def test_duplicate_key(model_yaml):
    lines = problems_of(overrides=[model_yaml("max_target_length: 32\nemb_dim: 8\nmax_target_length: 64\n")])
    assert lines == ["models/x.yml: max_target_length is set twice, in lines 1 and 3; keep one."]
    assert problems_of(overrides=["steps=1", "steps=2"]) == ["command line: steps is given twice (1 and 2)."]


def test_who_wins(model_yaml):
    model = model_yaml("# sizes\nnum_decoder_layers: 6\n")
    environment = {"MAXLITE_NUM_DECODER_LAYERS": "5"}
    for overrides, variables, value, source in [
        ([], {}, 4, f"base.yml:{line_of('num_decoder_layers')}"),
        ([model], {}, 6, "models/x.yml:2"),
        ([model], environment, 5, "environment MAXLITE_NUM_DECODER_LAYERS"),
        ([model, "num_decoder_layers=3"], environment, 3, "command line"),
        (["num_decoder_layers=3", model], {}, 3, "command line"),
    ]:
        config = load_config("base.yml", overrides, variables)
        assert (config.model.num_decoder_layers, config.sources["num_decoder_layers"]) == (value, source)
    assert load_config("base.yml", [model], {}).sources["model"] == "command line"


def test_environment():
    config = load_config("base.yml", ["steps=7"], {"MAXLITE_STEPS": "5", "STEPS": "9", "MAXLIT_STEPS": "9"})
    assert (config.train.steps, config.sources["steps"]) == (7, "command line")
    config = load_config("base.yml", [], {"MAXLITE_STEPS": "5"})
    assert (config.train.steps, type(config.train.steps)) == (5, int)
    assert config.sources["steps"] == "environment MAXLITE_STEPS"
    assert problems_of(environment={"MAXLITE_STEP": "5"})[0].startswith("environment MAXLITE_STEP: unknown key step;")
    assert problems_of(environment={"MAXLITE_STEPS": "five"})[0].startswith("steps=five (environment MAXLITE_STEPS)")
    chosen = load_config("base.yml", [], {"MAXLITE_MODEL": "llama3.2-1b"})
    assert chosen.model.emb_dim == 2048 and chosen.sources["model"] == "environment MAXLITE_MODEL"


def test_the_process_environment_is_read_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("MAXLITE_STEPS", "5")
    assert load_config("base.yml").train.steps == 5
    assert load_config("base.yml", [], {}).sources["steps"].startswith("base.yml:")


def test_all_errors_at_once(model_yaml):
    model = model_yaml("emb_dmi: 8\nsteps: 3\nhead_dim: wide\n")
    lines = problems_of(
        overrides=[model, "learning_rate=abc", "no_such_key=1", "word", "--steps=3", "num_query_heads=3"],
        environment={"MAXLITE_PACKING": "maybe"},
    )
    for part in ["emb_dmi", "models/x.yml:2: a model YAML may set only architecture keys, and steps", "head_dim=wide",
                 "learning_rate=abc", "no_such_key", "'word' is not key=value", "write steps=3, without dashes",
                 "packing=maybe", "num_query_heads=3"]:  # fmt: skip
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == 9


def test_a_model_yaml_is_a_name_or_a_path(tmp_path, model_yaml):
    model_yaml("emb_dim: 40\n")
    assert load_config("base.yml", ["model=models/x.yml"], {}).model.emb_dim == 40
    assert load_config("base.yml", [f"model={tmp_path}/models/x.yml"], {}).model.emb_dim == 40
    assert load_config("base.yml", ["model=x"], {}).model.emb_dim == 40
    (tmp_path / "own.yml").write_text("model: x\nmlp_dim: 48\n")
    config = load_config("own.yml", [], {})
    assert (config.model.emb_dim, config.model.mlp_dim) == (40, 48)
    assert (config.sources["emb_dim"], config.sources["mlp_dim"]) == ("models/x.yml:1", "own.yml:2")


def test_a_model_that_does_not_exist():
    assert problems_of(overrides=["model=llama3-8"])[0].startswith(
        "command line: no model YAML llama3-8; did you mean llama3-8b"
    )
    assert "`maxlite models`" in problems_of(overrides=["model=zzz"])[0]


@pytest.mark.parametrize("path", ["nothing.yml", "."])
def test_a_base_that_does_not_exist(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = problems_of(path)
    assert line.startswith(f"{path}: ")


def test_interpolation_is_refused_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    own = tmp_path / "own.yml"
    own.write_text("run_name: ${oc.env:SECRET}\ndataset_path: ['${oc.env:SECRET}']\n")
    lines = problems_of(own, ["logits_path=${oc.env:SECRET}"], {"MAXLITE_PROMPT_FILE": "${x}"})
    assert len(lines) == 4 and all("${...}" in line for line in lines) and "swordfish" not in str(lines)


def test_a_long_value_is_cut_in_the_message():
    (line,) = problems_of(overrides=["steps=" + "x" * 5000])
    assert len(line) < 200 and "..." in line


VARIANTS = [
    [],
    ["model=llama3.1-8b"],
    ["model=llama3.2-1b", "smoke=true", "emb_dim=48", "steps=3"],
    ["model=llama2-7b", "smoke=true"],
    ["run_name=007", "dataset_path=a,b c", "prompt= x:\n# 'é", "profiler=xplane", "learning_rate=1e-7",
     "attention_pattern=local,full", "sliding_window_size=8", "logical_axis_rules=[[embed, [fsdp]], [norm, null]]"],
    ["dataset_mixture=[{path: a, weight: 2, epochs: 3}, {path: b, weight: 1, name: x}]"],
    ["quantization=int8", "quant_rules=[{module_path: '.*/mlp/.*', weight_qtype: int8}, {module_path: a}]"],
    ["packing=false", "padding_buckets=64,128", "train_data_columns=prompt,completion", "dataset_type=jsonl"],
    ["prompt=${HOME}", "decode_seed=7", "num_epoch=2", "mu_dtype=bfloat16", "jax_cache_dir=null"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", VARIANTS)
def test_a_dumped_config_reloads_to_the_same_values(overrides, tmp_path):
    config = load_config("base.yml", overrides, {})
    (tmp_path / "config.yml").write_text(dump_config(config))
    again = load_config(str(tmp_path / "config.yml"), [], {})
    assert again.flat() == config.flat()
    assert dump_config(again) == dump_config(config)
    assert set(again.sources.values()) <= {f"{tmp_path}/config.yml:{n}" for n in range(2, 2 + len(KEYS) * 3)}


def test_a_run_directory_is_the_run_wherever_it_is(tmp_path):
    config = load_config("base.yml", ["run_name=old", "base_output_directory=somewhere"], {})
    (tmp_path / "config.yml").write_text(dump_config(config))
    again = load_config(str(tmp_path), [], {})
    places = {"base_output_directory": str(tmp_path.parent), "run_name": tmp_path.name}
    assert again.flat() == config.flat() | places
    assert again.sources["run_name"] == f"run directory {tmp_path}"
    assert load_config(str(tmp_path), ["run_name=new"], {}).run.run_name == "new"


def test_another_model_takes_the_place_of_the_saved_one_whole(tmp_path):
    (tmp_path / "config.yml").write_text(dump_config(load_config("base.yml", ["model=llama3.1-8b"], {})))
    for name in ("llama3-8b", "default"):
        plain = load_config("base.yml", [f"model={name}"], {})
        assert load_config(str(tmp_path), [f"model={name}"], {}).model == plain.model


def test_a_dumped_config_takes_overrides_and_another_model(tmp_path):
    (tmp_path / "config.yml").write_text(dump_config(load_config("base.yml", ["model=llama3-8b", "smoke=true"], {})))
    config = load_config(str(tmp_path), ["steps=9"], {"MAXLITE_LOG_PERIOD": "2"})
    assert (config.train.steps, config.metrics.log_period, config.model.emb_dim) == (9, 2, 64)
    other = load_config(str(tmp_path), ["model=llama3.2-1b"], {})
    assert other.model.logits_via_embedding and other.model.rope_factor == 32
    assert other.model.emb_dim == 64 and other.sources["emb_dim"] == "smoke=true"


def test_a_dumped_config_does_not_need_its_model_yaml(tmp_path, model_yaml):
    config = load_config("base.yml", [model_yaml("emb_dim: 40\n")], {})
    (tmp_path / "config.yml").write_text(dump_config(config))
    (tmp_path / "models" / "x.yml").unlink()
    assert load_config(str(tmp_path / "config.yml"), [], {}).flat() == config.flat()


def test_a_dump_is_plain_yaml_with_its_mark():
    text = dump_config(load_config("base.yml", [], {}))
    assert text.startswith(RESOLVED_HEADER + "\n")
    assert list(yaml.safe_load(text)) == list(KEYS)


# What differs between any two models; the other switches stand where a model has them.
REQUIRED = {
    "vocab_size", "emb_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads", "head_dim", "mlp_dim",
    "max_position_embeddings", "attention_pattern", "mlp_pattern", "mlp_activation", "normalization_layer_epsilon",
    "logits_via_embedding", "rope_max_timescale",
}  # fmt: skip
SCALING = {
    "default": set(),
    "linear": {"rope_type", "rope_factor"},
    "llama3": {
        "rope_type", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "original_max_position_embeddings"
    },
    "yarn": {"rope_type", "rope_factor", "original_max_position_embeddings"},
    "proportional": {"rope_type", "partial_rotary_factor"},
}  # fmt: skip


@pytest.mark.parametrize("name", model_names())
def test_model_yaml_says_everything_about_its_architecture(name):
    file = package_roots()[-1] / "models" / f"{name}.yml"
    lines = file.read_text().splitlines()
    assert 10 <= len(lines) <= 60 and lines[0].startswith("# ") and lines[0].endswith(".")
    config = load_config("base.yml", [f"model={name}"], {})
    set_here = {key for key in KEYS if config.sources[key].startswith(f"models/{name}.yml:")}
    assert REQUIRED | SCALING[config.model.rope_type] <= set_here <= MODEL_KEYS


def test_an_error_is_fast_and_needs_no_jax():
    code = (
        "import sys\nfrom maxlite.config.load import load_config\nfrom maxlite.errors import ConfigError\n"
        "try:\n    load_config('base.yml', ['learning_rat=1e-3'], {})\n"
        "except ConfigError as error:\n    print(error.exit_code, 'jax' in sys.modules)\n"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BASE.parent)
    assert result.stdout == "2 False\n", result.stderr
    assert time.monotonic() - start < 5  # an idle machine needs a fifth of a second


CASES = [["learning_rat=1e-3"], ["packing=maybe"], ["num_query_heads=3"]]


@pytest.mark.parametrize("overrides", CASES)
def test_command_line_exits_with_2_and_one_line(overrides, fork_maxlite, tmp_path):
    arguments = ["train", "base.yml", *overrides, "ici_fsdp_parallelism=1"]
    result = fork_maxlite(arguments, tmp_path)
    assert (result.code, result.stdout) == (2, ""), result.stderr
    assert overrides[0].split("=")[0] in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_command_line_prints_values_and_sources(fork_maxlite, tmp_path):
    arguments = ["config", "base.yml", "model=llama3-8b", "num_decoder_layers=3", "--json"]
    result = fork_maxlite(arguments, tmp_path, {"MAXLITE_STEPS": "5"})
    assert result.code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert rows["num_decoder_layers"] == {"value": 3, "source": "command line"}
    assert rows["steps"] == {"value": 5, "source": "environment MAXLITE_STEPS"}
    assert rows["emb_dim"] == {"value": 4096, "source": "models/llama3-8b.yml:3"}
    assert rows["log_period"]["source"] == f"base.yml:{line_of('log_period')}"
