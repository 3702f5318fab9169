"""Every key: its type, what it may be, and what it means. Values live in base.yml alone.

`Config` is a frozen dataclass of frozen sections. The YAML files and the command line are flat: a field's
name is the key, and no two sections share one, so a key finds its section by itself. Objects take the
section they need, never the whole `Config`.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REMAT_POLICY_NAMES = (
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
)
ATTENTION_KINDS = ("full", "local", "chunked", "nope", "mla", "gated_delta_net")
MLP_KINDS = ("dense", "moe", "dense_and_moe")

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
MLP_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swigluoai")

# Mesh axes, outermost first, and the two levels of each.
MESH_AXES = ("data", "fsdp", "tensor")
LEVELS = ("dcn", "ici")
# The names that weights and activations give their dimensions.
LOGICAL_AXES = (
    "batch",
    "length",
    "vocab",
    "embed",
    "mlp",
    "heads",
    "kv_heads",
    "head_dim",
    "conv",
    "q_lora",
    "kv_lora",
    "exp",
    "norm",
    "layers",
    "activation_embed",
    "activation_heads",
    "activation_kv_heads",
    "activation_mlp",
)
COMMAND_LINE = "command line"
ENVIRONMENT = "environment "

LogicalAxisRules = tuple[tuple[str, tuple[str, ...]], ...]


def key(
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declares a key. `above` is an exclusive lower bound; `choices` also bound the items of a list."""
    return dataclasses.field(
        metadata={"meaning": meaning, "choices": choices, "minimum": minimum, "maximum": maximum, "above": above}
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Which model, where its output goes, on which devices."""

    model: str = key("Name of a model YAML, or a path to one. A label: no code asks which model it is.")
    run_name: str | None = key("Folder of the run; the model's name if not set.")
    base_output_directory: str = key("Folder that holds the runs.")
    smoke: bool = key("Shrink the model to seconds on a CPU.")
    cpu_devices: int = key("Number of fake CPU devices; 0 uses what the machine has.", minimum=0, maximum=4096)
    init_weights_seed: int = key("Seed of the initial weights.", minimum=0, maximum=2**32 - 1)
    jax_cache_dir: str | None = key("Folder of compiled programs.")

    @property
    def directory(self) -> Path:
        """Folder of the run: base_output_directory, then run_name or the model's name."""
        # Not Path.stem, which takes "llama3.1-8b" for a file called llama3.
        name = self.run_name or Path(self.model).name.removesuffix(".yml").removesuffix(".yaml")
        return Path(self.base_output_directory).expanduser() / name


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. Nothing here depends on where or how the model runs."""

    vocab_size: int = key("Rows of the embedding.", minimum=1)
    emb_dim: int = key("Width of the residual stream.", minimum=1)
    num_decoder_layers: int = key("Number of residual blocks.", minimum=1, maximum=10_000)
    num_query_heads: int = key("Number of attention heads.", minimum=1)
    num_kv_heads: int = key("Number of key and value heads.", minimum=1)
    head_dim: int = key("Width of one head.", minimum=1)
    global_num_kv_heads: int | None = key("full layers: number of key and value heads.", minimum=1)
    global_head_dim: int | None = key("full layers: width of one head.", minimum=1)
    mlp_dim: int = key("Hidden width of the dense MLP.", minimum=1)
    max_position_embeddings: int = key("Longest sequence that the model may be asked for.", minimum=1)
    attention_pattern: tuple[str, ...] = key("Kinds of attention, repeated over the layers.", choices=ATTENTION_KINDS)
    mlp_pattern: tuple[str, ...] = key("Kinds of MLP, repeated over the layers.", choices=MLP_KINDS)
    num_dense_layers: int = key("So many first layers are dense, whatever mlp_pattern says.", minimum=0)
    sliding_window_size: int | None = key("Keys that a token sees in a local layer, itself included.", minimum=1)
    chunk_attn_window_size: int | None = key("Positions in a chunk of a chunked layer.", minimum=1)
    attention_bias: bool = key("Biases on queries, keys and values.")
    attention_out_bias: bool = key("Bias on the output of attention.")
    use_qk_norm: bool = key("Normalize queries and keys.")
    qk_norm_type: str = key("What is normalized, and when.", choices=("head", "projection", "l2"))
    use_v_norm: bool = key("Normalize values, without a scale.")
    share_kv_projections: bool = key("full layers: values are the keys before norm and positions.")
    query_pre_attn_scalar: float | None = key("Scores are divided by its square root.", above=0)
    attn_logits_soft_cap: float | None = key("Bound of attention scores, by tanh.", above=0)
    attention_sink: bool = key("A learned logit a head that takes attention away from all keys.")
    attention_output_gate: bool = key("A learned gate on what attention gives.")
    temperature_tuning: bool = key("nope layers: queries grow with the logarithm of their position.")
    temperature_tuning_floor: int = key("temperature_tuning: positions in one step of it.", minimum=1)
    temperature_tuning_scale: float = key("temperature_tuning: factor of the logarithm.", minimum=0)
    q_lora_rank: int | None = key("mla: width of the query's latent; not set = no latent.", minimum=1)
    kv_lora_rank: int | None = key("mla: width of the latent of keys and values.", minimum=1)
    qk_nope_head_dim: int | None = key("mla: width of a head's part without rotary positions.", minimum=1)
    qk_rope_head_dim: int | None = key("mla: width of a head's part with rotary positions.", minimum=2)
    v_head_dim: int | None = key("mla: width of a value head.", minimum=1)
    gdn_conv_kernel_dim: int | None = key("gated_delta_net: tokens that its convolutions see.", minimum=1)
    gdn_num_key_heads: int | None = key("gated_delta_net: number of query and key heads.", minimum=1)
    gdn_num_value_heads: int | None = key("gated_delta_net: number of value heads.", minimum=1)
    gdn_key_head_dim: int | None = key("gated_delta_net: width of a query or key head.", minimum=1)
    gdn_value_head_dim: int | None = key("gated_delta_net: width of a value head.", minimum=1)
    mlp_activation: str = key("Function on the gate of the MLP.", choices=MLP_ACTIVATIONS)
    mlp_activations_limit: float = key("swigluoai: bound of gate and up.", above=0)
    glu_alpha: float = key("swigluoai: factor inside the sigmoid.", above=0)
    mlp_bias: bool = key("Biases in the MLP and the experts.")
    num_experts: int = key("Routed experts of a moe layer.", minimum=0)
    num_experts_per_tok: int = key("Experts that a token is sent to.", minimum=0)
    moe_mlp_dim: int | None = key("Hidden width of one expert.", minimum=1)
    shared_expert_mlp_dim: int | None = key("Hidden width of the expert that serves every token.", minimum=1)
    shared_expert_gate: bool = key("A learned gate on the shared expert.")
    routed_score_func: str = key("From router logits to scores.", choices=("softmax", "sigmoid"))
    norm_topk_prob: bool = key("Scores of the chosen experts are made to sum to 1.")
    routed_scaling_factor: float = key("Factor of the routed experts' weights.", above=0)
    routed_bias: bool = key("A bias that takes part in choosing experts, and not in weighting them.")
    router_bias: bool = key("A bias on router logits.")
    scaled_router: bool = key("The router norms and scales its input, and each expert has a learned factor.")
    n_routing_groups: int = key("Groups of experts.", minimum=1)
    topk_routing_group: int = key("Groups that a token may choose experts from.", minimum=1)
    router_group_score: str = key("Score of a group.", choices=("max", "top2_sum"))
    scale_expert_input: bool = key("The score multiplies what goes into an expert, not what comes out.")
    normalization_layer_epsilon: float = key("Added to the mean square in RMSNorm.", above=0)
    norm_scale_offset: float = key("Added to every norm's scale.", minimum=0)
    use_pre_norms: bool = key("Norms before attention and MLP.")
    use_post_norms: bool = key("Norms after attention and MLP.")
    use_layer_scalar: bool = key("A learned factor of what a layer gives.")
    scale_embeddings: bool = key("Embeddings times the square root of emb_dim.")
    logits_via_embedding: bool = key("Tie the output matrix to the embedding.")
    final_logits_soft_cap: float | None = key("Bound of the logits, by tanh.", above=0)
    rope_type: str = key("How rotary frequencies are scaled.", choices=ROPE_TYPES)
    rope_max_timescale: float = key("Rotary base, called theta.", above=0)
    local_rope_max_timescale: float | None = key("Rotary base of local layers, unscaled.", above=0)
    rope_factor: float = key("By how much scaling stretches positions.", above=0)
    rope_low_freq_factor: float = key("llama3 scaling: its low frequency factor.", above=0)
    rope_high_freq_factor: float = key("llama3 scaling: its high frequency factor.", above=0)
    original_max_position_embeddings: int | None = key("llama3, yarn: context length before it.", minimum=1)
    beta_fast: float = key("yarn: turns above which a frequency is kept.", above=0)
    beta_slow: float = key("yarn: turns below which a frequency is stretched fully.", above=0)
    mscale: float | None = key("yarn: numerator of the attention factor.", minimum=0)
    rope_mscale_all_dim: float | None = key("yarn: denominator of it, and mla's softmax factor.", minimum=0)
    rope_truncate: bool = key("yarn: round the bounds of the blend to whole features.")
    rope_attention_factor: float | None = key("yarn: factor of cosine and sine; not set = by formula.", above=0)
    rope_interleave: bool = key("Rotary pairs are neighbours, not halves.")
    partial_rotary_factor: float = key("Share of a head that turns.", above=0, maximum=1)


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed. Of these keys only weight_dtype changes what is stored in a checkpoint."""

    dtype: str = key("Dtype of activations.", choices=("auto", "float32", "bfloat16"))
    weight_dtype: str = key("Dtype of parameters.", choices=("float32", "bfloat16"))
    matmul_precision: str = key("Precision of float32 matrix products.", choices=("default", "high", "highest"))
    scan_layers: bool = key("Loop over layers in the compiled program, or unroll them.")
    remat_policy: str = key("What the backward pass keeps of each layer.", choices=REMAT_POLICY_NAMES)
    num_vocab_tiling: int = key("Tiles of the sequence in the loss; 0 chooses by size.", minimum=0)


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the mesh axes, and which logical axis of a tensor lies along which of them."""

    dcn_data_parallelism: int = key("Data degree between slices.", minimum=-1)
    dcn_fsdp_parallelism: int = key("Fully sharded degree between slices.", minimum=-1)
    dcn_tensor_parallelism: int = key("Tensor degree between slices.", minimum=-1)
    ici_data_parallelism: int = key("Data degree within a slice.", minimum=-1)
    ici_fsdp_parallelism: int = key("Fully sharded degree within a slice.", minimum=-1)
    ici_tensor_parallelism: int = key("Tensor degree within a slice.", minimum=-1)
    logical_axis_rules: LogicalAxisRules = key("Rows of [logical axis, [mesh axes]].")

    def degrees(self, level: str) -> dict[str, int]:
        """Returns key -> degree of each of MESH_AXES at `level`, "dcn" or "ici"."""
        names = [f"{level}_{axis}_parallelism" for axis in MESH_AXES]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how documents become batches."""

    dataset_type: str = key("Kind of data.", choices=("text", "synthetic"))
    dataset_path: tuple[str, ...] | None = key("Files, folders or globs.")
    eval_dataset_path: tuple[str, ...] | None = key("Held-out files, folders or globs.")
    eval_fraction: float = key("Share of the documents held out.", minimum=0, maximum=0.9)
    max_target_length: int = key("Tokens in a row.", minimum=1)
    per_device_batch_size: float = key("Rows a device and step.", above=0, maximum=1_000_000)
    packing: bool = key("Several short documents in one row.")
    long_documents: str = key("What happens to a document longer than a row.", choices=("split", "truncate"))
    add_bos: bool = key("Begin each document with the begin mark.")
    add_eos: bool = key("End each document with the end mark.")
    enable_data_shuffling: bool = key("A new order of rows each epoch.")
    data_shuffle_seed: int = key("Seed of that order.", minimum=0, maximum=2**32 - 1)
    num_epoch: int | None = key("Passes over the data.", minimum=1)
    tokenizer_path: str | None = key("A tokenizer.json, a folder with one, or a GGUF file.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its schedule."""

    opt_type: str = key("Update rule.", choices=("adamw", "sgd"))
    learning_rate: float = key("Peak learning rate.", minimum=0)
    lr_schedule_type: str = key("Shape of the schedule.", choices=("cosine", "wsd"))
    learning_rate_schedule_steps: int | None = key("Length of the schedule in steps.", minimum=1)
    warmup_steps_fraction: float = key("Share of the schedule that warms up.", minimum=0, maximum=1)
    learning_rate_final_fraction: float = key("Final rate as a share of the peak.", minimum=0, maximum=1)
    wsd_decay_steps_fraction: float = key("wsd: share of the schedule that decays.", minimum=0, maximum=1)
    wsd_decay_style: str = key("wsd: shape of the decay.", choices=("linear", "cosine"))
    adam_b1: float = key("Decay of the first moment.", minimum=0, maximum=1)
    adam_b2: float = key("Decay of the second moment.", minimum=0, maximum=1)
    adam_eps: float = key("Added outside the square root.", minimum=0)
    adam_eps_root: float = key("Added inside the square root.", minimum=0)
    adam_weight_decay: float = key("Decoupled decay of matrices and embeddings.", minimum=0)
    mu_dtype: str | None = key("Dtype of the first moment.", choices=("float32", "bfloat16"))
    gradient_clipping_threshold: float = key("Largest global gradient norm; 0 = no clipping.", minimum=0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = key("The run ends when this many steps are done.", minimum=1)
    gradient_accumulation_steps: int = key("Micro-batches a step.", minimum=1)
    z_loss_multiplier: float = key("Weight of logsumexp(logits)^2.", minimum=0)
    eval_interval: int = key("Steps between evaluations; 0 = never.", minimum=0)
    eval_steps: int = key("Batches an evaluation; -1 = all.", minimum=-1)
    abort_on_nan_loss: bool = key("Stop when the loss is NaN.")
    abort_on_inf_loss: bool = key("Stop when the loss is infinite.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what is loaded first."""

    enable_checkpointing: bool = key("Save and resume.")
    async_checkpointing: bool = key("Write in the background.")
    checkpoint_period: int = key("Steps between saves.", minimum=1)
    max_num_checkpoints_to_keep: int = key("Checkpoints kept; older ones are removed.", minimum=1)
    save_checkpoint_on_completion: bool = key("Also save after the last step.")
    load_parameters_path: str | None = key("Run, or RUN/checkpoints/<n>, whose parameters are the start.")
    load_hf: str | None = key("Hugging Face folder or GGUF file that is the start.")

    @property
    def start(self) -> str | None:
        """Where the first parameters come from; None begins with random ones."""
        return self.load_parameters_path or self.load_hf


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """What is reported."""

    log_period: int = key("Steps between log lines.", minimum=1)
    enable_tensorboard: bool = key("Write TensorBoard events.")
    peak_tflops_per_device: str = key("Peak of a device in TFLOP/s, or auto.")
    profiler: str | None = key("Profiler to run.", choices=("xplane",))
    skip_first_n_steps_for_profiler: int = key("Steps before the trace.", minimum=0)
    profiler_steps: int = key("Steps in the trace.", minimum=1)
    dump_hlo: bool = key("Write the step's compiled program.")
    dump_jaxpr: bool = key("Write the step's jaxpr.")


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Prompts and sampling."""

    prompt: str = key("Text to go on from.")
    prompt_file: str | None = key("File of prompts, one a line.")
    prompt_ids: str | None = key("Token ids: 5,9,33 or 5,9;7,8,9.")
    max_new_tokens: int = key("At most this many new tokens.", minimum=0)
    decode_sampling_strategy: str = key(
        "How a token is drawn.", choices=("greedy", "weighted", "topk", "nucleus", "composite")
    )
    decode_sampling_temperature: float = key("Divides the logits; 0 = greedy.", minimum=0)
    decode_sampling_top_k: int = key("Keep the k likeliest tokens; 0 = no cut.", minimum=0)
    decode_sampling_nucleus_p: float = key("Keep the smallest set reaching p.", minimum=0, maximum=1)
    decode_sampling_min_p: float = key("Drop tokens below this share of the best.", minimum=0, maximum=1)
    decode_seed: int = key("Seed of all rows.", minimum=0, maximum=2**32 - 1)
    ignore_eos: bool = key("Go on past the end mark.")
    logits_path: str | None = key("File for the logits of the prompts.")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, resolved and frozen. `sources` says for each key where its value came from."""

    run: RunConfig
    model: ModelConfig
    compute: ComputeConfig
    parallel: ParallelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    decode: DecodeConfig
    sources: Mapping[str, str]

    def flat(self) -> dict[str, Any]:
        """Returns key -> value over all sections, in base.yml's order of sections."""
        return {k.name: getattr(getattr(self, k.section), k.name) for k in KEYS.values()}

    def was_given(self, name: str) -> bool:
        """Says whether a key was given to this very command, on its command line or in its environment."""
        return self.sources[name].startswith((COMMAND_LINE, ENVIRONMENT))


@dataclasses.dataclass(frozen=True)
class Key:
    """One key as declared: its section, its type without None, and its bounds."""

    name: str
    section: str
    type: Any
    optional: bool
    meaning: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    above: float | None


SECTIONS: dict[str, type] = {
    name: section for name, section in typing.get_type_hints(Config).items() if name != "sources"
}


def _declared_keys() -> Iterator[Key]:
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            arguments = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
            optional = type(None) in arguments
            inner = next(a for a in arguments if a is not type(None)) if optional else hint
            yield Key(field.name, section, inner, optional, **field.metadata)


def _index_keys() -> dict[str, Key]:
    index: dict[str, Key] = {}
    for declared in _declared_keys():
        assert declared.name not in index, f"{declared.name} is declared in two sections"
        index[declared.name] = declared
    return index


KEYS: dict[str, Key] = _index_keys()
