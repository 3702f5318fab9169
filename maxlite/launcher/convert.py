"""`maxlite convert-hf`: a Hugging Face folder becomes a run, a run becomes a Hugging Face folder."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from maxlite.config.load import load_config
from maxlite.config.schema import Config
from maxlite.errors import ConfigError, ConversionError
from maxlite.hf.convert import export_plan, export_run, import_folder, import_plan
from maxlite.hf.folder import ModelFolder, is_model_folder, read_folder
from maxlite.hf.logit_check import compare_with_transformers
from maxlite.hf.plan import Plan, explain
from maxlite.hf.quantization_json import quantization_method
from maxlite.hf.run_files import run_of
from maxlite.hf.writer import check_new
from maxlite.launcher.resolve import folder_keys
from maxlite.parallel.devices import prepare_jax
from maxlite.processes.group import require_one_process

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DTYPES = ("float32", "bfloat16")


def convert(
    source: str, destination: str | None, overrides: list[str], max_shard_size: str, flags: Mapping[str, bool]
) -> None:
    """Converts in the direction that follows from `source`; flags: explain, check.

    Raises:
        ConfigError, CheckpointError, ConversionError: one message; then there is no destination.
    """
    max_shard_bytes = parse_size(max_shard_size)
    if destination is None and not flags["explain"]:
        raise ConfigError("convert-hf needs a destination: maxlite convert-hf SRC DST (or --explain to look only).")
    if destination is not None:
        check_new(Path(destination))
    if is_model_folder(source):
        _import(read_folder(source), destination, overrides, flags)
    else:
        _export(Path(source), destination, overrides, max_shard_bytes, flags)


def parse_size(text: str) -> int:
    """Returns bytes for 5GB, 40KB, 1000000.

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size={text}: it takes a size above 0, such as 5GB, 400MB or 40KB.")
    return size


def _import(folder: ModelFolder, destination: str | None, overrides: list[str], flags: Mapping[str, bool]) -> None:
    dtype = stored_dtype(folder)

    def keys(path: str) -> Mapping[str, Any]:
        return {**folder_keys(path, expects_text=False), "weight_dtype": dtype}

    config = load_config("base.yml", [f"load_hf={folder.path}", *_with_weight_dtype(overrides)], folder_reader=keys)
    prepare_jax(config)
    require_one_process("convert-hf")
    if flags["explain"]:
        print_plan(import_plan(folder, config))
    if destination is None:
        return
    model = import_folder(folder, config, Path(destination))
    count, dtype = f"{model.num_parameters:,} parameters", config.compute.weight_dtype
    print(f"Run: {destination}, {folder.family.model_type}, {count}, {dtype}")
    if flags["check"]:
        _check(config, Path(destination), folder.path, destination)
    run = Path(destination)
    parameters = shlex.quote(f"load_parameters_path={run}")
    print(f"Go on: maxlite decode {shlex.quote(str(run))}")
    print(f"       maxlite train base.yml {shlex.quote(f'model={run}/model.yml')} {parameters}")


def _export(
    source: Path, destination: str | None, overrides: list[str], max_shard_bytes: int, flags: Mapping[str, bool]
) -> None:
    run = run_of(source)
    if not (run / "config.yml").is_file():
        raise ConversionError(
            f"{source} is neither a Hugging Face folder (it has no config.json), nor a GGUF file, nor a run directory "
            "(no config.yml)."
        )
    config = load_config(str(run), _with_weight_dtype(overrides))
    prepare_jax(config)
    require_one_process("convert-hf")
    if flags["explain"]:
        print_plan(export_plan(config, source))
        if config.compute.weight_quantization is not None and not config.compute.lora_rank:
            print(
                "A kernel that is stored in few bits is written as its codes and scales: NAME_packed, NAME_scale, ..."
            )
    if destination is None:
        return
    model = export_run(config, source, Path(destination), max_shard_bytes)
    print(f"Hugging Face folder: {destination}, {model.num_parameters:,} parameters, {config.compute.weight_dtype}")
    if flags["check"]:
        _check(config, source, Path(destination), destination)


def stored_dtype(folder: ModelFolder) -> str:
    """Returns the dtype that holds every tensor of a folder exactly; of a quantized one, what config.json asks for."""
    if quantization_method(folder.config) is not None:
        asked = folder.config.get("dtype", folder.config.get("torch_dtype"))
        return "float32" if asked == "float32" else "bfloat16"
    always_float32 = [
        re.escape(rule.tensor).replace(r"\{layer\}", r"\d+") for rule in folder.family.table.rules if rule.float32
    ]
    names = {
        tensor.dtype.name
        for name, tensor in folder.open_tensors().tensors.items()
        if not any(re.fullmatch(pattern, name) for pattern in always_float32)
    }
    return "bfloat16" if names == {"bfloat16"} else "float32"


def print_plan(plan: Plan) -> None:
    """Prints every tensor of the files, its shape, what is done to it, and our parameter with its shape."""
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "shape", "transform", "parameter", "shape"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for row in explain(plan):
        shapes = ["x".join(map(str, shape)) or "scalar" for shape in (row.tensor_shape, row.parameter_shape)]
        table.add_row(row.tensor, shapes[0], row.transform, row.parameter, shapes[1])
    # A width that any row fits in: lines are for grep as well as for eyes.
    Console(width=400, highlight=False, markup=False, soft_wrap=True).print(table)


def _check(config: Config, source: Path, folder: Path, made: str) -> None:
    """made: the destination, which is there by now."""
    try:
        difference = compare_with_transformers(config, source, folder)
    except ConversionError as error:
        raise ConversionError(f"{error}\n{made} was written all the same.") from error
    within = f"at most {difference.largest:.2g} (standard deviation {difference.deviation:.3g})"
    print(f"Check: {difference.positions} positions, the logits of transformers differ by {within}")


def _with_weight_dtype(overrides: list[str]) -> list[str]:
    """`dtype=` here is that of the files, since nothing is computed."""
    given = {name: value for name, _, value in (text.partition("=") for text in overrides)}
    if "dtype" not in given:
        return overrides
    if given.get("weight_dtype", given["dtype"]) != given["dtype"]:
        raise ConfigError(f"dtype={given['dtype']} and weight_dtype={given['weight_dtype']} differ; give weight_dtype.")
    if given["dtype"] not in _DTYPES:
        raise ConfigError(f"dtype={given['dtype']}: the files' dtype may be {' or '.join(_DTYPES)}.")
    kept = [text for text in overrides if text.partition("=")[0] not in ("dtype", "weight_dtype")]
    return [*kept, f"weight_dtype={given['dtype']}"]
