"""`maxlite models`: the model YAMLs and their exact sizes. No array is made."""

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from maxlite.config.load import load_config, model_names
from maxlite.errors import ConfigError
from maxlite.model.build import build_model


def print_models(json_output: bool) -> None:
    """Prints one row a model."""
    rows = [_description(name, []) for name in model_names()]
    if json_output:
        print(json.dumps(rows))
        return
    table = Table("model", "parameters", "layers", "emb_dim", "heads", "head_dim", "mlp_dim", "vocab", "tied", box=None)
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['num_parameters']:,}",
            str(row["num_decoder_layers"]),
            str(row["emb_dim"]),
            f"{row['num_query_heads']}/{row['num_kv_heads']}",
            str(row["head_dim"]),
            str(row["mlp_dim"]),
            str(row["vocab_size"]),
            "yes" if row["logits_via_embedding"] else "no",
        )
    Console(soft_wrap=True).print(table)


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
    config = load_config("base.yml", [f"model={name}", *overrides], environment={})
    num_parameters = build_model(config.model, config.compute).num_parameters
    # Every parameter of a dense model acts on every token.
    counts = {"num_parameters": num_parameters, "num_active_parameters": num_parameters}
    return {"model": name, **counts, **dataclasses.asdict(config.model)}
