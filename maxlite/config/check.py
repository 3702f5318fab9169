"""Rules between keys. Each takes a Config and returns messages: what was given, what is allowed, what to change."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from maxlite.config.check_data import DATA_CHECKS
from maxlite.config.check_model import MODEL_CHECKS
from maxlite.config.check_parallel import PARALLEL_CHECKS
from maxlite.config.check_quant import QUANT_CHECKS
from maxlite.config.check_remat import check_remat
from maxlite.config.degrees import fake_degrees
from maxlite.config.schema import LEVELS, LOGICAL_AXES, MESH_AXES, PROCESS_KEYS, Config
from maxlite.errors import ConfigError

# Dimensions of one tensor that may not share a mesh axis.
APART = (
    ("batch", "length"),
    ("batch", "activation_heads"),
    ("length", "activation_heads"),
    ("vocab", "embed"),
    ("mlp", "embed"),
    ("mlp", "exp"),
)


def check_lengths(config: Config) -> Iterator[str]:
    """Rows fit the model, and tiles fit rows."""
    length = config.data.max_target_length
    if length > config.model.max_position_embeddings:
        yield (
            f"max_target_length={length} is above max_position_embeddings={config.model.max_position_embeddings}, "
            "the longest sequence that this model may be asked for."
        )
    if config.compute.num_vocab_tiling > length:
        yield f"num_vocab_tiling={config.compute.num_vocab_tiling} is above max_target_length={length}."


def check_degrees(config: Config) -> Iterator[str]:
    """Each level has at most one -1 and no zero; with fake devices their number is known already."""
    sound = True
    for level in LEVELS:
        degrees = config.parallel.degrees(level)
        free = [name for name, degree in degrees.items() if degree == -1]
        zeros = [name for name, degree in degrees.items() if degree == 0]
        if len(free) > 1:
            given = ", ".join(f"{name} ({config.sources[name]})" for name in free)
            yield f"Only one {level} degree may be -1, but these are: {given}; give the others a number."
        for name in zeros:
            yield f"{name}=0: a degree is at least 1, or -1 for the devices left over."
        sound = sound and len(free) <= 1 and not zeros
    if config.fake_devices and sound:
        try:
            fake_degrees(config.parallel, config.fake_devices)
        except ConfigError as error:
            yield str(error)


def check_processes(config: Config) -> Iterator[str]:
    """A process is told all of its place or none of it."""
    keys = config.distributed
    given = {name: getattr(keys, name) for name in PROCESS_KEYS}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        yield f"{shown}, but not {' and '.join(missing)}: give a process all three, or leave them to the cluster."
    if keys.process_id is not None and keys.num_processes is not None and keys.process_id >= keys.num_processes:
        yield f"process_id={keys.process_id} is not below num_processes={keys.num_processes}; they count from 0."
    if keys.coordinator_address is not None and not keys.coordinator_address.rpartition(":")[2].isdecimal():
        yield f"coordinator_address={keys.coordinator_address} has no port; it is host:port of process 0."


def check_axis_rules(config: Config) -> Iterator[str]:
    """Rules name mesh axes that exist, and no row uses one twice."""
    for logical, axes in config.parallel.logical_axis_rules:
        if logical not in LOGICAL_AXES:
            yield f"logical_axis_rules: no tensor has an axis {logical}; there are {', '.join(LOGICAL_AXES)}."
        for axis in axes:
            if axis not in MESH_AXES:
                yield f"logical_axis_rules: {logical} names {axis}; the mesh axes are {', '.join(MESH_AXES)}."
        if len(set(axes)) < len(axes):
            yield f"logical_axis_rules: {logical} names a mesh axis twice."
    # What devices do with these pairs is written down for dimensions that lie along different axes.
    rules = {logical: axes for logical, axes in reversed(config.parallel.logical_axis_rules)}
    for one, other in APART:
        shared = sorted(set(rules.get(one, ())) & set(rules.get(other, ())))
        if shared:
            axes = ", ".join(shared)
            yield f"logical_axis_rules: {one} and {other} both name {axes}, but must lie apart; change one."


def check_schedule(config: Config) -> Iterator[str]:
    """Warm-up and decay fit into the schedule."""
    optimizer = config.optimizer
    if optimizer.lr_schedule_type == "wsd":
        total = optimizer.warmup_steps_fraction + optimizer.wsd_decay_steps_fraction
        if total > 1:
            yield (
                f"warmup_steps_fraction + wsd_decay_steps_fraction = {total:g}; "
                "together they may take at most the whole schedule (1)."
            )


def check_moments(config: Config) -> Iterator[str]:
    """A moment that never decays has no bias correction."""
    for name in ("adam_b1", "adam_b2"):
        if getattr(config.optimizer, name) == 1:
            yield f"{name}=1 would keep the moment at its first value and divide by zero; make it below 1."


def check_run_name(config: Config) -> Iterator[str]:
    """The run is one folder below base_output_directory."""
    name = config.run.run_name
    if name is not None and (name in ("", ".", "..") or Path(name).name != name):
        yield f"run_name={name!r} must be one folder name, without slashes; base_output_directory says where."


def check_places(config: Config) -> Iterator[str]:
    """Only checkpoints may lie in a bucket: the rest of a run is appended to and locked."""
    output, place = config.run.base_output_directory, config.checkpoint.checkpoint_directory
    if "://" in output:
        yield f"base_output_directory={output} is no folder; gs:// URLs are for checkpoint_directory."
    if place is not None and "://" in place and not place.startswith("gs://"):
        yield f"checkpoint_directory={place}: it takes a folder (perhaps a mounted bucket) or a gs:// URL."
    if place is not None and place.startswith("gs://") and config.checkpoint.checkpoint_atomicity == "rename":
        yield (
            f"checkpoint_atomicity=rename, but nothing in {place} can be renamed at once; it takes auto or commit_file."
        )


def check_best(config: Config) -> Iterator[str]:
    """Checkpoints are compared by a tag that there is."""
    checkpoint, tag = config.checkpoint, config.checkpoint.checkpoint_best_metric
    if not tag.startswith(("eval/", "learning/")):
        yield f"checkpoint_best_metric={tag}: it is a tag of metrics.jsonl, as eval/avg_loss or learning/loss."
    elif checkpoint.checkpoint_keep_best and tag.startswith("eval/") and config.train.eval_interval == 0:
        yield (
            f"checkpoint_keep_best={checkpoint.checkpoint_keep_best} compares by {tag}, and eval_interval=0 never "
            "evaluates; give eval_interval, or checkpoint_best_metric=learning/loss."
        )


def check_peak(config: Config) -> Iterator[str]:
    """The peak is a number or auto."""
    given = config.metrics.peak_tflops_per_device
    if given != "auto":
        try:
            valid = 0 < float(given) < math.inf
        except ValueError:
            valid = False
        if not valid:
            yield f"peak_tflops_per_device={given}: it takes auto or a number above 0."


def check_sampling(config: Config) -> Iterator[str]:
    """A cut is given to a strategy that makes it."""
    decode = config.decode
    strategy = decode.decode_sampling_strategy
    cuts = (
        ("decode_sampling_top_k", 0, ("topk", "composite")),
        ("decode_sampling_nucleus_p", 1, ("nucleus", "composite")),
        ("decode_sampling_min_p", 0, ("composite",)),
    )
    for name, off, users in cuts:
        if getattr(decode, name) != off and strategy not in users:
            yield (
                f"{name}={getattr(decode, name):g} has no effect with decode_sampling_strategy={strategy}; "
                f"set decode_sampling_strategy={' or '.join(users)}, or {name}={off}."
            )
    if strategy == "greedy" and decode.decode_sampling_temperature not in (0, 1):
        yield (
            f"decode_sampling_temperature={decode.decode_sampling_temperature:g} has no effect with "
            "decode_sampling_strategy=greedy; set decode_sampling_strategy=weighted."
        )


def check_prompts(config: Config) -> Iterator[str]:
    """Prompts come from one place."""
    decode = config.decode
    if (decode.prompt_file or decode.prompt_ids) and config.was_given("prompt"):
        yield "prompt is given, but prompt_file or prompt_ids is set and would win; set that one to null."
    if decode.prompt_file is not None and decode.prompt_ids is not None:
        yield "prompt_file and prompt_ids are both set; give one."


def check_start(config: Config) -> Iterator[str]:
    """The first parameters come from one place."""
    checkpoint = config.checkpoint
    if checkpoint.load_hf is not None and checkpoint.load_parameters_path is not None:
        yield (
            f"load_hf={checkpoint.load_hf} and load_parameters_path={checkpoint.load_parameters_path} are both set; "
            "the start is one of them, so set the other to null."
        )


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    *MODEL_CHECKS,
    check_lengths,
    check_degrees,
    check_processes,
    check_axis_rules,
    *PARALLEL_CHECKS,
    check_remat,
    *QUANT_CHECKS,
    check_schedule,
    check_moments,
    *DATA_CHECKS,
    check_run_name,
    check_places,
    check_best,
    check_peak,
    check_sampling,
    check_prompts,
    check_start,
)
