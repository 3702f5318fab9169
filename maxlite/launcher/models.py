"""`maxlite models`: the model YAMLs and their exact sizes. No array is made, and no device is asked for."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from maxlite.config.load import load_config, model_names
from maxlite.config.schema import Config
from maxlite.errors import ConfigError
from maxlite.model.build import build_model

# Title, and what stands below it.
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], object]], ...] = (
    ("model", lambda row: row["model"]),
    ("parameters", lambda row: f"{row['num_parameters']:,}"),
    ("active", lambda row: f"{row['num_active_parameters']:,}"),
    ("layers", lambda row: row["num_decoder_layers"]),
    ("emb_dim", lambda row: row["emb_dim"]),
    ("heads", lambda row: f"{row['num_query_heads']}/{row['num_kv_heads']}"),
    ("head_dim", lambda row: row["head_dim"]),
    ("mlp_dim", lambda row: row["mlp_dim"] if _has_dense_layers(row) else ""),
    ("experts", lambda row: f"{row['num_experts_per_tok']}/{row['num_experts']}" if row["num_experts"] else ""),
    ("width", lambda row: row["moe_mlp_dim"] or ""),
    ("vocab", lambda row: row["vocab_size"]),
    ("tied", lambda row: "yes" if row["logits_via_embedding"] else "no"),
)
# Shown of every model. Of the other keys those that were given: what a family does not have, base.yml leaves off.
_ALWAYS = (
    "vocab_size",
    "emb_dim",
    "num_decoder_layers",
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "mlp_activation",
    "attention_pattern",
    "mlp_pattern",
    "normalization_layer_epsilon",
    "logits_via_embedding",
    "rope_type",
    "rope_max_timescale",
    "max_position_embeddings",
)


def print_models(json_output: bool) -> None:
    """Prints one row a model."""
    rows = [_description(name, _load(name, [])) for name in model_names()]
    if json_output:
        print(json.dumps(rows))
        return
    cells = [[title for title, _ in _COLUMNS]]
    cells += [[str(shown(row)) for _, shown in _COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    for first, *others in cells:
        print(" ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


def print_model(action: str, name: str | None, overrides: list[str], json_output: bool) -> None:
    """Prints the architecture keys that one model sets, and its parameter counts; as JSON all of its keys."""
    if action != "show" or name is None:
        raise ConfigError("write `maxlite models` for the list, or `maxlite models show NAME`")
    config = _load(name, overrides)
    row = _description(name, config)
    if json_output:
        print(json.dumps(row))
        return
    for key, value in row.items():
        if key not in config.sources or key in _ALWAYS or _was_set(config, key):
            print(f"{key}: {f'{value:,}' if key.endswith('_parameters') else json.dumps(value)}")


def _load(name: str, overrides: list[str]) -> Config:
    # A count needs no data; and a dtype that is named does not depend on a device, so none has to be found.
    given = [f"model={name}", "dataset_type=synthetic", "max_target_length=1", "dtype=float32"]
    return load_config("base.yml", [*given, *overrides], environment={})


def _description(name: str, config: Config) -> dict[str, Any]:
    model = build_model(config.model, config.compute)
    counts = {"num_parameters": model.num_parameters, "num_active_parameters": model.num_active_parameters}
    return {"model": name, **counts, **dataclasses.asdict(config.model)}


def _has_dense_layers(row: dict[str, Any]) -> bool:
    return set(row["mlp_pattern"]) != {"moe"} or row["num_dense_layers"] > 0


def _was_set(config: Config, key: str) -> bool:
    return not config.sources[key].startswith("base.yml")
