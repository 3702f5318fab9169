import pytest

from maxlite.config.load import load_config, mesh_names
from maxlite.config.shown import shown_values
from maxlite.errors import ConfigError


@pytest.mark.parametrize("name", mesh_names())
def test_every_preset_fills_eight_devices(name):
    config = load_config("base.yml", [f"mesh={name}", "cpu_devices=8"], {})
    shown = shown_values(config)
    product = 1
    for key, value in shown.items():
        product *= value if key.endswith("_parallelism") else 1
    assert product == 8
    assert any(source.startswith(f"meshes/{name}.yml") for source in config.sources.values())


def test_a_preset_lies_between_the_model_and_the_command_line(tmp_path):
    preset = tmp_path / "mine.yml"
    preset.write_text("ici_tensor_parallelism: 2\nici_fsdp_parallelism: 2\n")
    config = load_config("base.yml", [f"mesh={preset}", "ici_fsdp_parallelism=4"], {})
    assert (config.parallel.ici_tensor_parallelism, config.parallel.ici_fsdp_parallelism) == (2, 4)
    config = load_config("base.yml", [f"mesh={preset}"], {"MAXLITE_ICI_TENSOR_PARALLELISM": "8"})
    assert (config.parallel.ici_tensor_parallelism, config.parallel.ici_fsdp_parallelism) == (8, 2)


def test_a_base_file_may_name_a_preset_and_a_command_may_take_it_back(tmp_path):
    base = tmp_path / "run.yml"
    base.write_text("mesh: fsdp-tensor4\n")
    assert load_config(str(base), [], {}).parallel.ici_tensor_parallelism == 4
    assert load_config(str(base), ["mesh=null"], {}).parallel.ici_tensor_parallelism == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh=fsdp-tensor", ["no mesh preset fsdp-tensor", "did you mean fsdp-tensor4"]),
        ("mesh=nothing", ["no mesh preset nothing", "there are", "zero1"]),
        ("mesh=models/llama3-8b.yml", ["a mesh preset may set only keys of the parallel section", "emb_dim"]),
    ],
)
def test_what_is_no_preset(text, words):
    with pytest.raises(ConfigError) as caught:
        load_config("base.yml", [text], {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_name_from_elsewhere_is_told_its_name_here():
    with pytest.raises(ConfigError, match="here it is called ici_pipeline_parallelism"):
        load_config("base.yml", ["ici_stage_parallelism=2"], {})
