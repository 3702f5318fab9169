import pytest

from maxlite.config.check import CHECKS
from maxlite.config.load import load_config
from maxlite.errors import ConfigError

MOE = ("num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=16")
GROUPS = ("n_routing_groups=4", "topk_routing_group=2", "router_group_score=top2_sum")
LOCAL = ("attention_pattern=local", "sliding_window_size=4")
MLA = (
    "attention_pattern=mla", "kv_lora_rank=8", "qk_nope_head_dim=12", "qk_rope_head_dim=4", "v_head_dim=8",
    "head_dim=16",
)  # fmt: skip
GDN = (
    "attention_pattern=gated_delta_net,full", "gdn_conv_kernel_dim=4", "gdn_num_key_heads=2", "gdn_num_value_heads=4",
    "gdn_key_head_dim=8", "gdn_value_head_dim=8",
)  # fmt: skip
# For each rule: overrides that break it, and the words that its message must hold.
MIXTURE = "[{path: a, weight: 2}, {path: b, weight: 1}]"
BROKEN = {
    "check_heads": [
        (["num_query_heads=6", "num_kv_heads=4"], ["num_query_heads=6", "num_kv_heads=4"]),
        (["global_num_kv_heads=3"], ["num_query_heads=8", "global_num_kv_heads=3"]),
        ([*LOCAL, "global_num_kv_heads=4"], ["global_num_kv_heads", "no full layer"]),
        ([*LOCAL, "global_head_dim=16"], ["global_head_dim", "no full layer"]),
        ([*LOCAL, "share_kv_projections=true"], ["share_kv_projections", "no full layer"]),
    ],
    "check_layer_kinds": [
        (["attention_pattern=local"], ["attention_pattern", "sliding_window_size"]),
        (["sliding_window_size=8"], ["sliding_window_size=8", "attention_pattern"]),
        (["num_decoder_layers=1", "attention_pattern=full,full"], ["attention_pattern", "num_decoder_layers=1"]),
        (["num_decoder_layers=1", "mlp_pattern=dense,dense"], ["mlp_pattern", "num_decoder_layers=1"]),
        (["attention_pattern=chunked"], ["attention_pattern", "chunk_attn_window_size"]),
        (["chunk_attn_window_size=8"], ["chunk_attn_window_size=8", "attention_pattern"]),
        (["num_dense_layers=1"], ["num_dense_layers=1", "mlp_pattern"]),
        (["mlp_pattern=moe", *MOE, "num_dense_layers=9"], ["num_dense_layers=9", "num_decoder_layers=4"]),
    ],
    "check_latent_attention": [
        (["kv_lora_rank=8"], ["kv_lora_rank=8", "mla"]),
        (["attention_pattern=mla", "kv_lora_rank=8"], ["qk_nope_head_dim, qk_rope_head_dim, v_head_dim"]),
        ([*MLA, "head_dim=24"], ["head_dim=24", "qk_nope_head_dim + qk_rope_head_dim = 16"]),
        ([*MLA, "num_kv_heads=4"], ["num_kv_heads=4", "num_query_heads=8"]),
        ([*MLA, "use_qk_norm=true"], ["use_qk_norm", "mla"]),
        ([*MLA, "use_v_norm=true"], ["use_v_norm", "mla"]),
        ([*MLA, "attention_sink=true"], ["attention_sink", "mla"]),
        ([*MLA, "attention_output_gate=true"], ["attention_output_gate", "mla"]),
        ([*MLA, "attn_logits_soft_cap=2"], ["attn_logits_soft_cap", "mla"]),
        ([*MLA, "attention_pattern=mla,full"], ["attention_pattern", "[mla]"]),
    ],
    "check_delta_net": [
        (["gdn_num_key_heads=2"], ["gdn_num_key_heads=2", "gated_delta_net"]),
        (GDN[:3], ["attention_pattern", "gdn_num_value_heads, gdn_key_head_dim, gdn_value_head_dim"]),
        ([*GDN, "gdn_num_value_heads=5"], ["gdn_num_value_heads=5", "gdn_num_key_heads=2"]),
    ],
    "check_experts": [
        (["mlp_pattern=moe", *MOE[1:]], ["mlp_pattern", "num_experts is not set"]),
        (["mlp_pattern=moe", *MOE[:2]], ["mlp_pattern", "moe_mlp_dim"]),
        (["num_experts=4"], ["num_experts=4", "mlp_pattern=[moe]"]),
        (["mlp_pattern=moe", *MOE, "n_routing_groups=3"], ["num_experts=4", "n_routing_groups=3"]),
        (["mlp_pattern=moe", *MOE, "topk_routing_group=2"], ["topk_routing_group=2", "n_routing_groups=1"]),
        (
            ["mlp_pattern=moe", "num_experts=8", "num_experts_per_tok=3", MOE[2], "n_routing_groups=4"],
            ["num_experts_per_tok=3", "2 experts"],
        ),
        (
            ["mlp_pattern=moe", "num_experts=4", "num_experts_per_tok=1", MOE[2], *GROUPS],
            ["router_group_score=top2_sum"],
        ),
        (["mlp_pattern=moe", *MOE, "shared_expert_gate=true"], ["shared_expert_gate", "shared_expert_mlp_dim"]),
    ],
    "check_norms": [
        (["use_pre_norms=false"], ["use_pre_norms", "use_post_norms"]),
        (["mlp_pattern=dense_and_moe", *MOE], ["dense_and_moe", "use_post_norms=true"]),
    ],
    "check_temperature": [(["temperature_tuning=true"], ["temperature_tuning", "nope"])],
    "check_rope": [
        (["rope_type=llama3"], ["rope_type=llama3", "original_max_position_embeddings"]),
        (
            ["rope_type=llama3", "original_max_position_embeddings=64", "rope_low_freq_factor=5"],
            ["rope_high_freq_factor=4", "rope_low_freq_factor=5"],
        ),
        (["rope_factor=8"], ["rope_factor=8", "rope_type=default"]),
        (["rope_type=yarn"], ["rope_type=yarn", "original_max_position_embeddings"]),
        (
            ["rope_type=yarn", "original_max_position_embeddings=64", "beta_fast=0.5"],
            ["beta_fast=0.5", "beta_slow=1"],
        ),
        (["local_rope_max_timescale=1e4"], ["local_rope_max_timescale", "local"]),
        (["head_dim=15"], ["head_dim", "15", "even"]),
        (["global_head_dim=15"], ["head_dim", "15", "even"]),
        (["partial_rotary_factor=0.3"], ["partial_rotary_factor", "7", "even"]),
        ([*MLA, "partial_rotary_factor=0.5"], ["partial_rotary_factor", "qk_rope_head_dim"]),
        (
            [key for key in MLA if "rope" not in key and "nope" not in key]
            + ["qk_rope_head_dim=5", "qk_nope_head_dim=11"],
            ["qk_rope_head_dim", "5", "even"],
        ),
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
    "check_processes": [
        (["num_processes=2"], ["num_processes=2", "process_id", "coordinator_address"]),
        (["process_id=1", "coordinator_address=h:1"], ["process_id=1", "num_processes"]),
        (
            ["num_processes=2", "process_id=2", "coordinator_address=h:1"],
            ["process_id=2 is not below num_processes=2"],
        ),
        (["num_processes=2", "process_id=1", "coordinator_address=h"], ["coordinator_address=h", "host:port"]),
    ],
    "check_axis_rules": [
        (
            ["logical_axis_rules=[[embed, [fspd]]]"],
            ["logical_axis_rules", "fspd", "data, stage, fsdp, context, expert, tensor"],
        ),
        (["logical_axis_rules=[[embed, [fsdp, fsdp]]]"], ["logical_axis_rules", "embed", "twice"]),
        (["logical_axis_rules=[[embed, [fsdp]], [vocab, [tensor, fsdp]]]"], ["vocab and embed", "fsdp", "apart"]),
        (["logical_axis_rules=[[batch, [fsdp]], [length, [fsdp]]]"], ["batch and length", "fsdp"]),
    ],
    "check_capacity": [
        (
            ["capacity_factor=1.25", "ici_context_parallelism=2"],
            ["capacity_factor=1.25", "ici_context_parallelism=2", "capacity_factor=null"],
        ),
    ],
    "check_router_keys": [
        (["routed_bias_update_rate=0.001"], ["routed_bias_update_rate=0.001", "routed_bias=true"]),
        (["load_balance_loss_weight=0.01"], ["load_balance_loss_weight=0.01", "mlp_pattern"]),
    ],
    "check_stages": [
        (["num_pipeline_microbatches=4"], ["num_pipeline_microbatches=4", "ici_pipeline_parallelism"]),
    ],
    "check_compile": [
        (["compile_topology_num_slices=2"], ["compile_topology_num_slices=2", "compile_topology=v5e-16"]),
        (["compile_topology=v5e-16", "cpu_devices=8"], ["compile_topology=v5e-16", "cpu_devices=8"]),
    ],
    "check_remat": [
        (
            ["remat_policy=custom", "query_wa_proj=device"],
            ["query_wa_proj=device", "decoder_layer_input, query_proj, key_proj", "mlpwo", "query_wa_proj=remat"],
        ),
    ],
    "check_quant_rules": [
        (["lora_module_path=(", "lora_rank=2"], ["lora_module_path='('", "regular expression"]),
        (["quant_rules=[{module_path: a, act_qtype: int8}]"], ["'a'", "weight_qtype"]),
        (["quant_rules=[{module_path: a, weight_qtype: int8, bwd_qtype: int8}]"], ["'a'", "bwd_qtype", "act_qtype"]),
    ],
    "check_stored_weights": [
        (["weight_quantization=int8", "quantization=int8"], ["weight_quantization=int8", "quantization"]),
        (["weight_quantization=nf4", "weight_quant_tile_size=7"], ["weight_quant_tile_size=7", "nf4"]),
    ],
    "check_adapters": [
        (
            ["lora_rank=2", "mlp_pattern=moe", *MOE, "routed_bias=true", "routed_bias_update_rate=0.1"],
            ["lora_rank=2", "routed_bias_update_rate=0.1"],
        ),
    ],
    "check_cache": [
        (
            ["quantize_kvcache=true", "kv_quant_dtype=int4", "head_dim=7", "partial_rotary_factor=0.6"],
            ["kv_quant_dtype=int4", "head_dim=7", "int8"],
        ),
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
        (["dataset_type=synthetic", "num_epoch=2"], ["num_epoch=2", "synthetic"]),
        (["vocab_size=257"], ["vocab_size=257", "258", "dataset_type"]),
        (["dataset_type=tfds"], ["dataset_type=tfds", "dataset_name"]),
        (["dataset_name=wikitext"], ["dataset_name=wikitext", "tfds"]),
        (["dataset_type=jsonl", "eval_split=test"], ["eval_split=test", "eval_dataset_path"]),
    ],
    "check_mixture": [
        ([f"dataset_mixture={MIXTURE}", "dataset_path=c"], ["dataset_path", "dataset_mixture"]),
        ([f"dataset_mixture={MIXTURE}", "eval_dataset_path=c"], ["eval_dataset_path", "eval_fraction"]),
        ([f"dataset_mixture={MIXTURE}", "num_epoch=1"], ["num_epoch", "epochs"]),
        ([f"dataset_mixture={MIXTURE}", "dataset_type=tfds", "dataset_name=a"], ["dataset_mixture", "tfds"]),
    ],
    "check_objective": [
        (["objective=sft"], ["objective=sft", "dataset_type=text", "jsonl"]),
        (["tokenize_train_data=false"], ["tokenize_train_data=false", "dataset_type=text"]),
    ],
    "check_rows": [
        (["padding_buckets=64"], ["padding_buckets", "packing=false"]),
        (["packing=false", "padding_buckets=64,512"], ["padding_buckets has 512", "max_target_length=256"]),
        (
            ["packing_type=concat_then_split", "max_segments_per_seq=2"],
            ["max_segments_per_seq=2", "concat_then_split"],
        ),
    ],
    "check_run_name": [(["run_name=a/b"], ["run_name='a/b'"]), (["run_name=.."], ["run_name='..'"])],
    "check_places": [
        (
            ["base_output_directory=gs://bucket/runs"],
            ["base_output_directory=gs://bucket/runs", "checkpoint_directory"],
        ),
        (["checkpoint_directory=s3://bucket/runs"], ["checkpoint_directory=s3://bucket/runs", "gs://"]),
        (
            ["checkpoint_directory=gs://bucket/runs", "checkpoint_atomicity=rename"],
            ["checkpoint_atomicity=rename", "commit_file"],
        ),
    ],
    "check_best": [
        (["checkpoint_best_metric=loss"], ["checkpoint_best_metric=loss", "eval/avg_loss"]),
        (["checkpoint_keep_best=2", "eval_interval=0"], ["checkpoint_keep_best=2", "eval/avg_loss", "eval_interval=0"]),
    ],
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
    "check_start": [(["load_hf=a", "load_parameters_path=b"], ["load_hf", "load_parameters_path"])],
}


def test_every_rule_has_a_case():
    assert [check.__name__ for check in CHECKS] == list(BROKEN)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [pytest.param(*case, id=f"{name}-{i}") for name, cases in BROKEN.items() for i, case in enumerate(cases)],
)
def test_a_broken_rule_is_one_message_that_names_the_keys(overrides, words):
    # Of two that give one key the later counts: the command line itself refuses such.
    last = {text.partition("=")[0]: text for text in overrides}
    with pytest.raises(ConfigError) as caught:
        load_config("base.yml", list(last.values()), {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention_pattern=local,full", "sliding_window_size=1"],
        [*GDN, "attention_output_gate=true"],
        [GDN[0], "gdn_conv_kernel_dim=1", "gdn_num_key_heads=4", *GDN[3:]],
        ["rope_type=linear", "rope_factor=2"],
        ["rope_type=proportional", "partial_rotary_factor=0.3"],
        ["mlp_pattern=dense_and_moe", *MOE, "num_dense_layers=1", "use_post_norms=true"],
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
