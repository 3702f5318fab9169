import dataclasses
import json

import pytest

from maxlite.config.schema import ModelConfig
from maxlite.errors import ConfigError
from maxlite.launcher import models

NAMES = ["gemma3-1b", "llama4-17b-128e", "mixtral-8x7b"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(models, "model_names", lambda: NAMES)


def test_the_list_shows_sizes_that_a_model_has(capsys):
    models.print_models(False)
    title, *lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["gemma3-1b", "999,885,952", "999,885,952", "26", "1152", "4/1", "256", "6912", "262144", "yes"],
        ["llama4-17b-128e", "400,711,848,960", "17,184,691,200", "48", "5120", "40/8", "128", "16384", "1/128", "8192",
         "202048", "no"],
        ["mixtral-8x7b", "46,702,792,704", "12,879,925,248", "32", "4096", "32/8", "128", "2/8", "14336", "32000",
         "no"],
    ]  # fmt: skip
    assert {len(line) for line in [title, *lines]} == {len(title)} and len(title) <= 120
    assert "parameters" in title and "active" in title


def test_as_json_every_key_of_every_model(capsys):
    models.print_models(True)
    rows = json.loads(capsys.readouterr().out)
    keys = [field.name for field in dataclasses.fields(ModelConfig)]
    assert [row["model"] for row in rows] == NAMES
    assert all(list(row) == ["model", "num_parameters", "num_active_parameters", *keys] for row in rows)
    assert rows[2]["num_active_parameters"] == 12_879_925_248
    assert rows[0]["attention_pattern"] == ["local"] * 5 + ["full"]
    models.print_model("show", "mixtral-8x7b", [], True)
    assert json.loads(capsys.readouterr().out) == rows[2]


def shown(capsys, name, *overrides):
    models.print_model("show", name, list(overrides), False)
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def test_show_leaves_out_what_a_family_does_not_have(capsys):
    llama = shown(capsys, "llama2-7b")
    assert llama["model"] == '"llama2-7b"' and llama["num_parameters"] == llama["num_active_parameters"]
    assert llama["num_parameters"] == "6,738,415,616" and llama["rope_type"] == '"default"'
    assert not llama.keys() & {"num_experts", "kv_lora_rank", "use_qk_norm", "sliding_window_size", "beta_fast"}
    deepseek = shown(capsys, "deepseek3-671b")
    assert (deepseek["num_parameters"], deepseek["num_active_parameters"]) == ("671,026,419,200", "37,552,297,472")
    assert deepseek["kv_lora_rank"] == "512" and deepseek["routed_score_func"] == '"sigmoid"'
    assert deepseek["beta_fast"] == "32.0" and "sliding_window_size" not in deepseek


def test_show_takes_overrides(capsys):
    row = shown(capsys, "llama2-7b", "num_decoder_layers=1", "use_qk_norm=true")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096 + 2 * 128
    assert row["num_parameters"] == f"{2 * 32000 * 4096 + 4096 + layer:,}"
    assert row["use_qk_norm"] == "true" and "qk_norm_type" not in row


@pytest.mark.parametrize(("action", "name"), [("list", None), ("show", None), ("llama2-7b", None)])
def test_another_action_says_what_there_is(action, name):
    with pytest.raises(ConfigError, match="maxlite models show NAME"):
        models.print_model(action, name, [], False)


def test_no_device_is_asked_for(run_maxlite):
    finished = run_maxlite(["models", "show", "kimi-k2-1t"], env={"JAX_PLATFORMS": "nowhere"})
    assert finished.code == 0, finished.stderr
    assert "num_parameters: 1,026,408,232,448" in finished.stdout
