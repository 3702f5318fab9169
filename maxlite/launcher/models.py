"""`maxlite models`: the model YAMLs and their exact sizes. No array is made."""

import dataclasses
import json
from typing import Any

from maxlite.config.load import load_config, model_names
from maxlite.errors import ConfigError
from maxlite.model.build import build_model

_ROW = "{:<16} {:>15} {:>6} {:>7} {:>7} {:>8} {:>7} {:>7} {:>4}"


def print_models(json_output: bool) -> None:
    """Prints one row a model."""
    rows = [_description(name, []) for name in model_names()]
    if json_output:
        print(json.dumps(rows))
        return
    print(_ROW.format("model", "parameters", "layers", "emb_dim", "heads", "head_dim", "mlp_dim", "vocab", "tied"))
    for row in rows:
        print(
            _ROW.format(
                row["model"],
                f"{row['num_parameters']:,}",
                row["num_decoder_layers"],
                row["emb_dim"],
                f"{row['num_query_heads']}/{row['num_kv_heads']}",
                row["head_dim"],
                row["mlp_dim"],
                row["vocab_size"],
                "yes" if row["logits_via_embedding"] else "no",
            )
        )


def print_model(action: str, name: str | None, overrides: list[str], json_output: bool) -> None:
    """Prints every architecture key of one model and its parameter counts."""
    if action != "show" or name is None:
        raise ConfigError("write `maxlite models` for the list, or `maxlite models show NAME`")
    row = _description(name, overrides)
    if json_output:
        print(json.dumps(row))
        return
    for key, value in row.items():
        print(f"{key}: {f'{value:,}' if key.endswith('_parameters') else json.dumps(value)}")


def _description(name: str, overrides: list[str]) -> dict[str, Any]:
    config = load_config(
        "base.yml", [f"model={name}", "dataset_type=synthetic", "max_target_length=1", *overrides], environment={}
    )
    num_parameters = build_model(config.model, config.compute).num_parameters
    # Every parameter of a dense model acts on every token.
    counts = {"num_parameters": num_parameters, "num_active_parameters": num_parameters}
    return {"model": name, **counts, **dataclasses.asdict(config.model)}
