import pytest

from maxlite.config.check import CHECKS
from maxlite.config.load import load_config
from maxlite.errors import ConfigError

# For each rule: overrides that break it, and the words that its message must hold.
BROKEN = {
    "check_heads": [
        (["num_query_heads=6", "num_kv_heads=4"], ["num_query_heads=6", "num_kv_heads=4"]),
        (["head_dim=15"], ["head_dim=15", "even"]),
    ],
    "check_layer_kinds": [
        (["attention_pattern=local"], ["attention_pattern", "sliding_window_size"]),
        (["sliding_window_size=8"], ["sliding_window_size=8", "attention_pattern"]),
        (["num_decoder_layers=1", "attention_pattern=full,full"], ["attention_pattern", "num_decoder_layers=1"]),
        (["num_decoder_layers=1", "mlp_pattern=dense,dense"], ["mlp_pattern", "num_decoder_layers=1"]),
    ],
    "check_rope": [
        (["rope_type=llama3"], ["rope_type=llama3", "original_max_position_embeddings"]),
        (
            ["rope_type=llama3", "original_max_position_embeddings=64", "rope_low_freq_factor=4"],
            ["rope_high_freq_factor=4", "rope_low_freq_factor=4"],
        ),
        (["rope_factor=8"], ["rope_factor=8", "rope_type=default"]),
    ],
    "check_lengths": [
        (["max_target_length=5000"], ["max_target_length=5000", "max_position_embeddings=4096"]),
        (["num_vocab_tiling=257"], ["num_vocab_tiling=257", "max_target_length=256"]),
    ],
    "check_degrees": [
        (["ici_data_parallelism=-1"], ["ici_data_parallelism (command line)", "ici_fsdp_parallelism (base.yml:"]),
        (["dcn_fsdp_parallelism=-1"], ["dcn_data_parallelism", "dcn_fsdp_parallelism"]),
        (["ici_tensor_parallelism=0"], ["ici_tensor_parallelism=0"]),
    ],
    "check_axis_rules": [
        (["logical_axis_rules=[[embed, [fspd]]]"], ["logical_axis_rules", "fspd", "data, fsdp, tensor"]),
        (["logical_axis_rules=[[embed, [fsdp, fsdp]]]"], ["logical_axis_rules", "embed", "twice"]),
    ],
    "check_schedule": [
        (
            ["lr_schedule_type=wsd", "warmup_steps_fraction=0.6", "wsd_decay_steps_fraction=0.5"],
            ["warmup_steps_fraction", "wsd_decay_steps_fraction", "1.1"],
        ),
    ],
    "check_moments": [(["adam_b1=1"], ["adam_b1=1"]), (["adam_b2=1"], ["adam_b2=1"])],
    "check_dataset": [
        (["dataset_type=synthetic", "dataset_path=x"], ["dataset_path", "dataset_type=synthetic"]),
        (["dataset_type=synthetic", "eval_dataset_path=x"], ["eval_dataset_path", "dataset_type=synthetic"]),
        (["vocab_size=257"], ["vocab_size=257", "258", "dataset_type"]),
    ],
    "check_run_name": [(["run_name=a/b"], ["run_name='a/b'"]), (["run_name=.."], ["run_name='..'"])],
    "check_peak": [
        (["peak_tflops_per_device=fast"], ["peak_tflops_per_device=fast", "auto"]),
        (["peak_tflops_per_device=0"], ["peak_tflops_per_device=0"]),
        (["peak_tflops_per_device=inf"], ["peak_tflops_per_device=inf"]),
    ],
    "check_sampling": [
        (["decode_sampling_top_k=5"], ["decode_sampling_top_k=5", "topk or composite"]),
        (["decode_sampling_strategy=topk", "decode_sampling_nucleus_p=0.5"], ["decode_sampling_nucleus_p", "nucleus"]),
        (["decode_sampling_strategy=nucleus", "decode_sampling_min_p=0.1"], ["decode_sampling_min_p", "composite"]),
        (["decode_sampling_temperature=0.7"], ["decode_sampling_temperature=0.7", "weighted"]),
    ],
    "check_prompts": [
        (["prompt_file=p.txt", "prompt_ids=1,2"], ["prompt_file", "prompt_ids"]),
        (["prompt=a", "prompt_ids=1,2"], ["prompt", "prompt_ids", "null"]),
    ],
}


def test_every_rule_has_a_case():
    assert [check.__name__ for check in CHECKS] == list(BROKEN)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [pytest.param(*case, id=f"{name}-{i}") for name, cases in BROKEN.items() for i, case in enumerate(cases)],
)
def test_a_broken_rule_is_one_message_that_names_the_keys(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config("base.yml", overrides, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention_pattern=local,full", "sliding_window_size=1"],
        ["rope_type=linear", "rope_factor=2"],
        ["rope_type=llama3", "rope_factor=8", "original_max_position_embeddings=64"],
        ["max_target_length=4096"],
        ["lr_schedule_type=wsd", "warmup_steps_fraction=0.5", "wsd_decay_steps_fraction=0.5"],
        ["peak_tflops_per_device=0.5"],
        ["dataset_type=synthetic", "vocab_size=1"],
        ["ici_data_parallelism=-1", "ici_fsdp_parallelism=8"],
        ["adam_b1=0", "adam_b2=0.999"],
    ],
)
def test_the_edge_of_what_is_allowed(overrides):
    load_config("base.yml", overrides, {})
