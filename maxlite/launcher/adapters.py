"""`maxlite convert-hf` of adapters: a folder of PEFT's becomes a run with its model; a run's become such a folder."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.config.load import load_config
from maxlite.config.schema import Config
from maxlite.errors import ConfigError, ConversionError
from maxlite.hf.convert import Adapters, import_folder, import_plan
from maxlite.hf.folder import is_model_folder, read_folder
from maxlite.hf.kernels import plain_model
from maxlite.hf.peft import Found, export_adapters, read_adapters
from maxlite.hf.peft_json import ADAPTER_CONFIG, AdapterConfig, is_adapter_folder, read_adapter_config
from maxlite.hf.run_files import run_of
from maxlite.hf.writer import check_new
from maxlite.launcher.convert import stored_dtype
from maxlite.launcher.resolve import folder_keys
from maxlite.model.build import build_model
from maxlite.parallel.devices import prepare_jax
from maxlite.processes.group import require_one_process

# What a training run that goes on from an imported one must be told, beside the model.
_OWN_KEYS = (
    "lora_rank",
    "lora_alpha",
    "lora_module_path",
    "weight_quantization",
    "weight_quant_tile_size",
    "weight_quant_module_path",
)


def convert_adapters(source: str, destination: str | None, overrides: list[str]) -> None:
    """Converts in the direction that follows from `source`.

    Raises:
        ConfigError, CheckpointError, ConversionError: one message; then there is no destination.
    """
    if destination is None:
        raise ConfigError("convert-hf needs a destination: maxlite convert-hf SRC DST.")
    check_new(Path(destination))
    if is_adapter_folder(source):
        _import(Path(source).expanduser(), destination, overrides)
    else:
        _export(Path(source), destination, overrides)


def _import(folder: Path, destination: str, overrides: list[str]) -> None:
    adapters = read_adapter_config(folder)
    base, overrides = _base_of(folder, adapters, overrides)
    dtype = stored_dtype(read_folder(base))

    def load(*keys: str) -> Config:
        def keys_of(path: str) -> Mapping[str, Any]:
            return {**folder_keys(path, expects_text=False), "weight_dtype": dtype}

        return load_config("base.yml", [f"load_hf={base}", *keys, *overrides], folder_reader=keys_of)

    config = load()
    prepare_jax(config)
    require_one_process("convert-hf")
    model = plain_model(build_model(config.model, config.compute))
    found = read_adapters(folder, adapters, import_plan(read_folder(base), config), model)
    config = load(
        f"lora_rank={adapters.rank}", f"lora_alpha={adapters.alpha:.17g}", f"lora_module_path={found.pattern}"
    )
    import_folder(read_folder(base), config, Path(destination), adapters=Adapters(folder, found.arrays))
    for line in _import_lines(config, found, destination):
        print(line)


def _import_lines(config: Config, found: Found, destination: str) -> list[str]:
    compute = config.compute
    values = {name: getattr(compute, name) for name in _OWN_KEYS if config.was_given(name)}
    given = " ".join(shlex.quote(f"{name}={value}") for name, value in values.items())
    lines = [f"Run: {destination}, with adapters of rank {compute.lora_rank}, alpha {compute.lora_alpha:g}"]
    dtypes = sorted({value.dtype.name for value in found.arrays.values()} - {compute.weight_dtype})
    if dtypes:
        lines.append(f"Adapters are {', '.join(dtypes)} in the folder and {compute.weight_dtype} here, as the weights")
    parameters = shlex.quote(f"load_parameters_path={destination}")
    return [
        *lines,
        f"Go on: maxlite decode {shlex.quote(destination)}",
        f"       maxlite train base.yml {shlex.quote(f'model={destination}/model.yml')} {parameters} {given}",
    ]


def _base_of(folder: Path, adapters: AdapterConfig, overrides: list[str]) -> tuple[str, list[str]]:
    """The folder of the model that the adapters are for, and the other keys."""
    given = [text for text in overrides if text.startswith("load_hf=")]
    others = [text for text in overrides if text not in given]
    base = given[-1].partition("=")[2] if given else adapters.base
    if base is None or not is_model_folder(base):
        said = f"its {ADAPTER_CONFIG} names {base!r}" if base and not given else f"load_hf={base}"
        raise ConversionError(
            f"{folder} holds adapters, and the model that they are for is no folder here ({said}): give load_hf=FOLDER."
        )
    return base, others


def _export(source: Path, destination: str, overrides: list[str]) -> None:
    run = run_of(source)
    if not (run / "config.yml").is_file():
        raise ConversionError(f"{source} is neither a run directory (no config.yml) nor a folder of adapters.")
    config = load_config(str(run), overrides)
    prepare_jax(config)
    require_one_process("convert-hf")
    written, layers = export_adapters(config, source, Path(destination))
    print(f"Adapters: {destination}, rank {written.rank}, alpha {written.alpha:g}; linear layers: {layers}")
    base = written.base or "BASE"
    print(f"Open: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {destination!r})")
