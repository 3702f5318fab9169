"""adapter_config.json of a folder of adapters as the library PEFT keeps them. Imports no jax."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlite.data.json_files import read_json
from maxlite.errors import ConversionError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

# Keys that, unless they are empty, ask for more than two matrices beside a linear layer.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "loftq_config",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
# Beginnings that leave the weights of the model as they are; others take from them what the adapters begin with.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


class AdapterConfig(NamedTuple):
    """Adapters of a rank count alpha / rank times; base: the model that they are for, as the file has it."""

    rank: int
    alpha: float
    base: str | None


def is_adapter_folder(path: str | Path) -> bool:
    """Says whether `path` is a folder of adapters and no model: it has an adapter_config.json and no config.json."""
    folder = Path(path).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the file.

    Raises:
        ConversionError: it can't be read, or asks for what a kernel with two matrices beside it does not have.
    """
    file = folder / ADAPTER_CONFIG
    config = read_json(file, ConversionError)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConversionError(f"{file} has peft_type {kind!r}; LORA alone is supported.")
    unknown = [f"{name} {config[name]!r}" for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        unknown.append(f"bias {config['bias']!r}")
    if config.get("init_lora_weights", True) not in _BEGINNINGS:
        unknown.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if unknown:
        raise ConversionError(
            f"{file} asks for what is not supported: {', '.join(unknown)}. Merge these adapters with PEFT "
            "(merge_and_unload) and convert the model's folder."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise ConversionError(f"{file} needs r and lora_alpha, numbers above 0; it has {rank!r} and {alpha!r}.")
    # Rank-stabilized adapters (arXiv:2312.03732) count alpha / sqrt(rank) times.
    stabilized = math.sqrt(rank) if config.get("use_rslora") else 1.0
    return AdapterConfig(rank, float(alpha) * stabilized, config.get("base_model_name_or_path") or None)


def adapter_config(config: AdapterConfig, target_modules: Iterable[str]) -> Mapping[str, Any]:
    """Returns what adapter_config.json says of adapters beside these modules."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": sorted(target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
