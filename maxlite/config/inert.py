"""Keys that were given but that another key keeps from acting. They are no error: a line says so."""

from collections.abc import Callable

from maxlite.config.check_data import SPLIT_TYPES
from maxlite.config.compute_schema import LAYER_INPUT, REMAT_TENSORS
from maxlite.config.key_groups import LLAMA3_ROPE, ROUTER, SWIGLUOAI, TEMPERATURE, YARN
from maxlite.config.schema import Config

_ADAM = ("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "mu_dtype")
_WSD = ("wsd_decay_steps_fraction", "wsd_decay_style")
_BEST = ("checkpoint_best_metric", "checkpoint_best_mode")
_SAVING = (
    "checkpoint_directory",
    "checkpoint_atomicity",
    "checkpoint_period",
    "checkpoint_period_minutes",
    "async_checkpointing",
    "max_num_checkpoints_to_keep",
    "checkpoint_keep_period",
    "checkpoint_keep_minutes",
    "checkpoint_keep_best",
    "save_checkpoint_on_completion",
)
_PACKING = ("packing_type", "max_segments_per_seq")
_ENCODING = (
    "objective",
    "train_data_columns",
    "tokenize_train_data",
    "bad_rows",
    "chat_template_path",
    "add_bos",
    "add_eos",
)
_DOCUMENTS = ("packing", "long_documents", "enable_data_shuffling", "eval_fraction", *_PACKING, *_ENCODING)
_SOFTMAX = (
    "attention_bias",
    "attention_out_bias",
    "use_qk_norm",
    "use_v_norm",
    "query_pre_attn_scalar",
    "attn_logits_soft_cap",
    "attention_sink",
    "attention_output_gate",
)

# Why, when, and which keys.
_INERT: tuple[tuple[str, Callable[[Config], bool], tuple[str, ...]], ...] = (
    ("opt_type is not adamw", lambda c: c.optimizer.opt_type != "adamw", _ADAM),
    ("lr_schedule_type is not wsd", lambda c: c.optimizer.lr_schedule_type != "wsd", _WSD),
    ("dataset_type is synthetic", lambda c: c.data.dataset_type == "synthetic", _DOCUMENTS),
    (
        "dataset_type is tokenized: `maxlite data tokenize` saw to that",
        lambda c: c.data.dataset_type == "tokenized",
        (*_ENCODING, "sft_train_on_completion_only"),
    ),
    (
        "dataset_type is text, where a file that is no text is always skipped and counted",
        lambda c: c.data.dataset_type == "text",
        ("bad_rows", "train_data_columns"),
    ),
    (
        "dataset_type is neither hf nor tfds",
        lambda c: c.data.dataset_type not in SPLIT_TYPES,
        ("train_split",),
    ),
    (
        "objective is not sft",
        lambda c: c.data.objective != "sft",
        ("sft_train_on_completion_only", "chat_template_path"),
    ),
    (
        "what is held out is given by eval_dataset_path or eval_split",
        lambda c: c.data.eval_dataset_path is not None or c.data.eval_split is not None,
        ("eval_fraction",),
    ),
    ("packing is false", lambda c: not c.data.packing, _PACKING),
    ("data_worker_count is 0", lambda c: c.data.data_worker_count == 0, ("data_worker_buffer_size",)),
    ("enable_checkpointing is false", lambda c: not c.checkpoint.enable_checkpointing, _SAVING),
    ("checkpoint_keep_best is 0", lambda c: c.checkpoint.checkpoint_keep_best == 0, _BEST),
    ("watchdog_factor is 0", lambda c: c.metrics.watchdog_factor == 0, ("watchdog_min_seconds",)),
    ("eval_interval is 0", lambda c: c.train.eval_interval == 0, ("eval_steps",)),
    (
        "profiler is not set",
        lambda c: c.metrics.profiler is None,
        ("skip_first_n_steps_for_profiler", "profiler_steps"),
    ),
    (
        "remat_policy is not custom",
        lambda c: c.compute.remat_policy != "custom",
        (LAYER_INPUT, *REMAT_TENSORS),
    ),
    (
        "nothing is quantized, so there is nothing more to keep",
        lambda c: c.compute.remat_policy.endswith("_quantization") and not _rounds_products(c),
        ("remat_policy",),
    ),
    (
        "weight_quantization is null",
        lambda c: c.compute.weight_quantization is None,
        ("weight_quant_tile_size", "weight_quant_module_path"),
    ),
    ("quantize_kvcache is false", lambda c: not c.compute.quantize_kvcache, ("kv_quant_axis", "kv_quant_dtype")),
    (
        "all layers are gated_delta_net, which keep no keys and values",
        lambda c: set(c.model.attention_pattern) == {"gated_delta_net"},
        ("quantize_kvcache",),
    ),
    (
        "a latent has no heads",
        lambda c: c.compute.quantize_kvcache and set(c.model.attention_pattern) <= {"mla", "gated_delta_net"},
        ("kv_quant_axis",),
    ),
    ("lora_rank is 0", lambda c: c.compute.lora_rank == 0, ("lora_alpha", "lora_module_path")),
    (
        "no degree of context is above 1",
        lambda c: c.parallel.ici_context_parallelism == c.parallel.dcn_context_parallelism == 1,
        ("context_parallel_strategy", "context_parallel_load_balance"),
    ),
    (
        "no degree of pipeline is above 1",
        lambda c: not _has_stages(c),
        ("num_layers_per_pipeline_stage",),
    ),
    (
        "a stage loops over its layers",
        lambda c: _has_stages(c),
        ("scan_layers",),
    ),
    (
        "training runs on the devices that are here; estimate and compile take it",
        lambda c: c.compile.compile_topology is not None,
        ("compile_topology", "compile_topology_num_slices"),
    ),
    (
        "opt_type is sgd, which has no moments",
        lambda c: c.optimizer.opt_type == "sgd",
        ("optimizer_memory_host_offload", "shard_optimizer_over_data"),
    ),
    ("rope_type is not llama3", lambda c: c.model.rope_type != "llama3", LLAMA3_ROPE),
    ("rope_type is not yarn", lambda c: c.model.rope_type != "yarn", YARN),
    (
        "rope_type is neither llama3 nor yarn",
        lambda c: c.model.rope_type not in ("llama3", "yarn"),
        ("original_max_position_embeddings",),
    ),
    ("all layers are gated_delta_net", lambda c: set(c.model.attention_pattern) == {"gated_delta_net"}, _SOFTMAX),
    ("no layer is moe", lambda c: c.model.num_experts == 0, (*ROUTER, "capacity_factor")),
    ("n_routing_groups is 1", lambda c: c.model.n_routing_groups == 1, ("router_group_score",)),
    ("use_qk_norm is false", lambda c: not c.model.use_qk_norm, ("qk_norm_type",)),
    (
        "mlp_activation is not swigluoai",
        lambda c: c.model.mlp_activation != "swigluoai",
        SWIGLUOAI,
    ),
    (
        "temperature_tuning is false",
        lambda c: not c.model.temperature_tuning,
        TEMPERATURE,
    ),
)


def _has_stages(config: Config) -> bool:
    return config.parallel.ici_pipeline_parallelism != 1 or config.parallel.dcn_pipeline_parallelism != 1


def _rounds_products(config: Config) -> bool:
    return config.compute.quantization is not None or config.compute.quant_rules is not None


def inert_keys(config: Config) -> list[str]:
    """Returns one line for each reason why keys given to this very command have no effect."""
    found = []
    for reason, applies, names in _INERT:
        given = [name for name in names if config.was_given(name)]
        if given and applies(config):
            found.append(f"No effect, because {reason}: {', '.join(given)}")
    return found
