"""The decode command: prompts and a trained model in, text or JSON out."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from maxlite.config.schema import Config
from maxlite.data.model_folder import model_end_ids
from maxlite.data.tokenizer import Tokenizer, build_tokenizer
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.decode.generate import NOTHING, BatchShape, Generator, Programs, Speed, padded_length
from maxlite.decode.logits import check_writable, write_logits
from maxlite.decode.model import build_decode_model, describe_cache, rules_for_rows, without_drops
from maxlite.decode.output import Continuation, JsonWriter, TextWriter, printable
from maxlite.decode.prompts import Prompt, read_prompts
from maxlite.decode.sampling import build_sampler
from maxlite.errors import ConfigError, OutOfMemoryError
from maxlite.hf.load import load_parameters
from maxlite.hf.run_files import run_of
from maxlite.metrics.out_of_memory import is_out_of_memory
from maxlite.model.build import Model, Params, build_model
from maxlite.model.equip import describe_equipment
from maxlite.parallel.devices import prepare_jax, run_devices
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import use_mesh

EOS, LENGTH = "eos", "length"


def run_decode(config: Config, source: str, *, json_output: bool) -> None:
    """Continues the prompts of `config` with the parameters of `source` and prints what comes.

    source: a run directory, a Hugging Face folder, or the YAML file of a config that says where parameters are.

    Raises:
        ConfigError, DataError: a key or a prompt that can't be used, before anything is compiled.
        CheckpointError, ConversionError: there are no parameters, or they are another model's.
        OutOfMemoryError: what to make smaller.
    """
    prompts = config_prompts(config)
    path = parameters_path(config, source)
    prepare_jax(config)
    with _memory_errors():
        mesh = build_mesh(config.parallel, run_devices(config.run))
        model = build_decode_model(config)
        for line in describe_equipment(model.products):
            print(line, file=sys.stderr)
        notes = sys.stderr if json_output else sys.stdout
        rules = rules_for_rows(config, mesh, 1)
        shardings = model.shardings(mesh, rules)
        params = model.take_apart(load_parameters(path, model, shardings, sys.stderr))
        if config.decode.logits_path is not None:
            with use_mesh(mesh, rules, config.compute.matmul_precision):
                write_logits(config.decode.logits_path, model, params, prompts)
            print(f"Logits of {len(prompts)} prompts: {config.decode.logits_path}", file=notes)
        writer = (JsonWriter if json_output else TextWriter)(sys.stdout, build_tokenizer(config.data))
        _, speed = continue_prompts(config, mesh, model, params, prompts, writer.update)
        if speed is not None:
            if model.compute.quantize_kvcache:
                shape = _batch_shape(config, mesh, prompts)
                print(describe_cache(model, shape.rows, shape.prompt_length + shape.max_new_tokens), file=notes)
            print(describe_speed(speed), file=notes)


def sample_text(config: Config, mesh: Mesh, model: Model, params: Params) -> str | None:
    """Returns the config's first prompt with its continuation by a model in memory, printable.

    It takes fewer than max_new_tokens where the model's longest sequence asks for it, and is None without a
    tokenizer or without room. Here max_target_length is the row of training, not a cache.

    params: as training holds them, stacked.
    Raises: as read_prompts.
    """
    tokenizer = build_tokenizer(config.data)
    if tokenizer is None:
        return None
    prompt = _read_prompts(config)[0]
    room = config.model.max_position_embeddings - len(prompt.ids)
    if room < 1:
        return None
    decode = dataclasses.replace(config.decode, max_new_tokens=min(config.decode.max_new_tokens, room))
    fitting = dataclasses.replace(config, decode=decode)
    unstacked = jax.jit(model.unstack)(params)
    model = build_model(model.config, without_drops(model.compute))
    rows, _ = continue_prompts(fitting, mesh, model, unstacked, [prompt], lambda rows: None)
    return printable(f"{prompt.text}{rows[0].text(tokenizer)}")


def config_prompts(config: Config) -> list[Prompt]:
    """Returns the prompts of `config`, each of which fits with its new tokens.

    Raises:
        ConfigError, DataError: as read_prompts, or a prompt does not fit: with all the numbers.
    """
    if config.decode.logits_path is not None:
        check_writable(config.decode.logits_path)
    prompts = _read_prompts(config)
    # max_target_length is the row of training, and only who gives it to decode means the cache.
    given = config.was_given("max_target_length")
    name = "max_target_length" if given else "max_position_embeddings"
    limit = config.data.max_target_length if given else config.model.max_position_embeddings
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    length, new = len(prompts[longest].ids), config.decode.max_new_tokens
    if length + new > limit:
        which = f"prompt {longest + 1}" if len(prompts) > 1 else "the prompt"
        room = f"max_new_tokens={limit - length}" if length <= limit else f"a prompt of at most {limit} tokens"
        larger = f" or {name}={length + new}" if given else ""
        raise ConfigError(
            f"{which} does not fit: {length} tokens and max_new_tokens={new} make {length + new}, but {name}={limit}; "
            f"give {room}{larger}."
        )
    return prompts


def parameters_path(config: Config, source: str) -> str:
    """Returns where the parameters are: what was given to this command, else the run or the folder itself.

    Raises:
        ConfigError: the source is a YAML file without load_parameters_path or load_hf.
    """
    path = config.checkpoint.start
    # In a run's saved config these keys say what training began from, not what it became.
    if not (config.was_given("load_parameters_path") or config.was_given("load_hf")):
        if Path(source).is_dir():
            return source
        if Path(source).name == "config.yml" and (Path(source).parent / "checkpoints").is_dir():
            return str(Path(source).parent)
    if path is None:
        raise ConfigError(
            f"{source} is a config without parameters; give a run directory or a Hugging Face folder instead, or "
            "load_parameters_path=RUN."
        )
    return path


def continue_prompts(
    config: Config,
    mesh: Mesh,
    model: Model,
    params: Params,
    prompts: Sequence[Prompt],
    show: Callable[[Sequence[Continuation]], None],
) -> tuple[list[Continuation], Speed | None]:
    """Draws the new tokens of all prompts, per_device_batch_size rows a device at a time.

    params: unstacked. show: called with all continuations whenever some have grown.
    Returns: the continuations, and the speed unless max_new_tokens=0.
    """
    rows = [Continuation(prompt) for prompt in prompts]
    if config.decode.max_new_tokens == 0:
        rows = [dataclasses.replace(row, finish_reason=LENGTH) for row in rows]
        show(rows)
        return rows, None
    end_ids = () if config.decode.ignore_eos else _end_ids(config, build_tokenizer(config.data))
    shape = _batch_shape(config, mesh, prompts)
    with use_mesh(mesh, rules_for_rows(config, mesh, shape.rows), config.compute.matmul_precision):
        generator = Generator(Programs(model, build_sampler(config.decode), end_ids, shape), params)
        for first in range(0, len(rows), shape.rows):
            batch = rows[first : first + shape.rows]
            for drawn in generator.stream([row.prompt.ids for row in batch], first):
                _grow(batch, drawn, config.decode.max_new_tokens)
                show(rows)
    return rows, generator.speed


def describe_speed(speed: Speed) -> str:
    """Returns one line: tokens per second of prefill and decode over all rows, and what compiling took."""
    prefill = f"prefill: {speed.prefill_tokens} tokens, {speed.prefill_tokens / speed.prefill_seconds:,.0f} tokens/s"
    decode = f"decode: {speed.decode_tokens} tokens"
    if speed.decode_tokens:
        decode += f", {speed.decode_tokens / speed.decode_seconds:,.1f} tokens/s"
    return f"{prefill}; {decode}; compiling: {speed.compile_seconds:.1f} s"


def _batch_shape(config: Config, mesh: Mesh, prompts: Sequence[Prompt]) -> BatchShape:
    """Returns the rows that run at once, and room for the longest prompt and its new tokens."""
    rows = min(len(prompts), max(1, math.ceil(config.data.per_device_batch_size * mesh.size)))
    return BatchShape(rows, padded_length(max(len(prompt.ids) for prompt in prompts)), config.decode.max_new_tokens)


def _end_ids(config: Config, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokenizer's and those of the model's own files, which mean nothing to a model of bytes."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.end_ids
    ids = () if tokenizer is None else tokenizer.end_ids
    return tuple(sorted({*ids, *model_end_ids(_model_folder(config))}))


def _model_folder(config: Config) -> Path:
    """Returns the folder that the parameters come from: what was given to this command, else the run itself."""
    for name in ("load_parameters_path", "load_hf"):
        path = getattr(config.checkpoint, name)
        if path is not None and config.was_given(name):
            return run_of(Path(path))
    return config.run.directory


def _read_prompts(config: Config) -> list[Prompt]:
    tokenizer = build_tokenizer(config.data)
    return read_prompts(config.decode, tokenizer, add_bos=config.data.add_bos, vocab_size=config.model.vocab_size)


def _grow(batch: Sequence[Continuation], drawn: np.ndarray, max_new_tokens: int) -> None:
    for row, tokens in zip(batch, drawn, strict=False):
        if row.finish_reason is None:
            row.ids.extend(tokens[tokens != NOTHING].tolist())
            if (tokens == NOTHING).any():
                row.finish_reason = EOS
            elif len(row.ids) == max_new_tokens:
                row.finish_reason = LENGTH


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(str(error))):
            raise
        reason = (str(error).strip() or "the host's memory").splitlines()[0][:300]
        raise OutOfMemoryError(
            f"out of memory: {reason}\nWhat helps: fewer rows at once (per_device_batch_size=1), a smaller "
            "max_new_tokens, dtype=bfloat16, or more devices (ici_fsdp_parallelism=-1, ici_tensor_parallelism=)."
        ) from error
