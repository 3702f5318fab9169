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

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.data_schema import DataConfig
from maxlite.config.key import key
from maxlite.config.model_schema import ModelConfig
from maxlite.config.quant_schema import QUANTIZE_METHODS

XLA_FLAG_PRESETS = ("async_collectives", "sync_collectives", "no_collective_matmul", "sparse_core_collectives")

# Mesh axes, outermost first, and the two levels of each.
MESH_AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")
LEVELS = ("dcn", "ici")
# The axis of pipeline stages has another word in its keys.
DEGREE_WORDS = {axis: "pipeline" if axis == "stage" else axis for axis in MESH_AXES}
# The names that weights and activations give their dimensions.
LOGICAL_AXES = (
    "batch",
    "length",
    "norm_length",
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
# What one process is told at its start: no part of a run's saved config.
PROCESS_KEYS = ("num_processes", "process_id", "coordinator_address")
COMMAND_LINE = "command line"
ENVIRONMENT = "environment "

LogicalAxisRules = tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Which model, where its output goes, on which devices."""

    model: str = key("Name of a model YAML, or a path to one. A label: no code asks which model it is.")
    run_name: str | None = key("Folder of the run; the model's name if not set.")
    base_output_directory: str = key("Folder that holds the runs.")
    smoke: bool = key("Shrink the model to seconds on a CPU.")
    cpu_devices: int = key("Fake CPU devices of each process; 0 uses what there is.", minimum=0, maximum=4096)
    init_weights_seed: int = key("Seed of the initial weights.", minimum=0, maximum=2**32 - 1)
    jax_cache_dir: str | None = key("Folder of compiled programs.")

    @property
    def directory(self) -> Path:
        """Folder of the run: base_output_directory, then run_name or the model's name."""
        # Not Path.stem, which takes "llama3.1-8b" for a file called llama3.
        name = self.run_name or Path(self.model).name.removesuffix(".yml").removesuffix(".yaml")
        return Path(self.base_output_directory).expanduser() / name


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run that has several. Where a cluster says all this itself, nothing need be given."""

    num_processes: int | None = key("Processes of the run.", minimum=1)
    process_id: int | None = key("Number of this one, from 0.", minimum=0)
    coordinator_address: str | None = key("host:port of process 0.")
    skip_jax_distributed_system: bool = key("Run alone, whatever the environment says of a cluster.")
    jax_distributed_initialization_timeout: int = key("Seconds to wait for all processes.", minimum=1)


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the mesh axes, and which logical axis of a tensor lies along which of them."""

    mesh: str | None = key("Name of a mesh preset, or a path to one.")
    dcn_data_parallelism: int = key("Data degree between slices.", minimum=-1)
    dcn_pipeline_parallelism: int = key("Pipeline stages between slices.", minimum=-1)
    dcn_fsdp_parallelism: int = key("Fully sharded degree between slices.", minimum=-1)
    dcn_context_parallelism: int = key("Context degree between slices.", minimum=-1)
    dcn_expert_parallelism: int = key("Expert degree between slices.", minimum=-1)
    dcn_tensor_parallelism: int = key("Tensor degree between slices.", minimum=-1)
    ici_data_parallelism: int = key("Data degree within a slice.", minimum=-1)
    ici_pipeline_parallelism: int = key("Pipeline stages within a slice.", minimum=-1)
    ici_fsdp_parallelism: int = key("Fully sharded degree within a slice.", minimum=-1)
    ici_context_parallelism: int = key("Context degree within a slice.", minimum=-1)
    ici_expert_parallelism: int = key("Expert degree within a slice.", minimum=-1)
    ici_tensor_parallelism: int = key("Tensor degree within a slice.", minimum=-1)
    shard_optimizer_over_data: bool = key("Moments are split over the data axis too (ZeRO-1).")
    context_parallel_strategy: str = key("How queries reach the keys of other shards.", choices=("all_gather", "ring"))
    context_parallel_load_balance: bool = key("Each shard has an early and a late part of a row.")
    num_pipeline_microbatches: int | None = key("Parts of a batch that follow one another.", minimum=1)
    num_layers_per_pipeline_stage: int | None = key("Repeats of the layer pattern a stage and round.", minimum=1)
    logical_axis_rules: LogicalAxisRules = key("Rows of [logical axis, [mesh axes]].")

    def degrees(self, level: str) -> dict[str, int]:
        """Returns key -> degree of each of MESH_AXES at `level`, "dcn" or "ici"."""
        names = [f"{level}_{DEGREE_WORDS[axis]}_parallelism" for axis in MESH_AXES]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """Compiling a step ahead of time, and with which flags."""

    compile_topology: str | None = key("Slice that `estimate` and `compile` compile for.")
    compile_topology_num_slices: int = key("Number of such slices.", minimum=1)
    compiled_trainstep_file: str | None = key("File of the compiled step: written by compile, read by train.")
    compile_xla_flags: str | None = key("XLA flags of the step, separated by spaces.")
    xla_flags_preset: str | None = key("Named set of XLA flags.", choices=XLA_FLAG_PRESETS)


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
    optimizer_memory_host_offload: bool = key("Moments wait in the host's memory.")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = key("The run ends when this many steps are done.", minimum=1)
    gradient_accumulation_steps: int = key("Micro-batches a step.", minimum=1)
    z_loss_multiplier: float = key("Weight of logsumexp(logits)^2.", minimum=0)
    load_balance_loss_weight: float = key("Weight of the experts' load-balance loss.", minimum=0)
    routed_bias_update_rate: float = key("Step of the routers' selection bias.", minimum=0)
    eval_interval: int = key("Steps between evaluations; 0 = never.", minimum=0)
    eval_steps: int = key("Batches an evaluation; -1 = all.", minimum=-1)
    abort_on_nan_loss: bool = key("Stop when the loss is NaN.")
    abort_on_inf_loss: bool = key("Stop when the loss is infinite.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what is loaded first."""

    enable_checkpointing: bool = key("Save and resume.")
    async_checkpointing: bool = key("Write in the background.")
    checkpoint_directory: str | None = key("Folder or gs:// URL of the checkpoints, instead of the run's own folder.")
    checkpoint_atomicity: str = key("How a step is made complete.", choices=("auto", "rename", "commit_file"))
    checkpoint_period: int = key("Steps between saves; 0 = not by steps.", minimum=0)
    checkpoint_period_minutes: float | None = key("Minutes between saves.", above=0)
    max_num_checkpoints_to_keep: int = key("Newest checkpoints kept.", minimum=1)
    checkpoint_keep_period: int | None = key("Multiples of this step are kept too.", minimum=1)
    checkpoint_keep_minutes: float | None = key("One is kept too for each so many minutes.", above=0)
    checkpoint_keep_best: int = key("So many of the best are kept too.", minimum=0)
    checkpoint_best_metric: str = key("Tag by which checkpoints are the best.")
    checkpoint_best_mode: str = key("Whether low or high is good.", choices=("min", "max"))
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
    enable_goodput_recording: bool = key("Log what the run's time went to.")
    watchdog_factor: float = key("Times the median step without one, after which a run ends; 0 = never.", minimum=0)
    watchdog_min_seconds: float = key("Never before so many seconds.", above=0)
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
class QuantizeConfig:
    """The command `quantize`."""

    method: str = key("How weights are rounded.", choices=QUANTIZE_METHODS)
    calibration_steps: int = key("Batches of text that gptq and awq look at.", minimum=1)
    worst_layers: int = key("Layers that the report lists.", minimum=1)


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, resolved and frozen. `sources` says for each key where its value came from."""

    run: RunConfig
    distributed: DistributedConfig
    model: ModelConfig
    compute: ComputeConfig
    parallel: ParallelConfig
    compile: CompileConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    decode: DecodeConfig
    quantize: QuantizeConfig
    sources: Mapping[str, str]

    def flat(self) -> dict[str, Any]:
        """Returns key -> value over all sections, in base.yml's order of sections."""
        return {k.name: getattr(getattr(self, k.section), k.name) for k in KEYS.values()}

    @property
    def fake_devices(self) -> int:
        """Fake CPU devices of all processes; 0 where the machine's are used."""
        return self.run.cpu_devices * (self.distributed.num_processes or 1)

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
