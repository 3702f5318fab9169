"""The step of routers' selection biases, which no gradient reaches (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from typing import Any

import jax

from maxlite.ops.router import updated_bias

BIAS = "selection_bias"


def with_updated_biases(params: Any, loads: dict[str, dict[str, jax.Array]], rate: float) -> Any:
    """Returns `params` with each routed layer's bias moved by `rate` towards experts that got less than the mean.

    loads: group -> block -> [R, E], the choices that each expert got in this step.
    """
    params = dict(params)
    for group, blocks in loads.items():
        layers = dict(params[group]["layers"])
        for block, load in blocks.items():
            layers[block] = layers[block] | {"mlp": _updated(layers[block]["mlp"], load, rate)}
        params[group] = params[group] | {"layers": layers}
    return params


def _updated(mlp: dict[str, Any], load: jax.Array, rate: float) -> dict[str, Any]:
    if BIAS in mlp:
        return mlp | {BIAS: updated_bias(mlp[BIAS], load, rate)}
    # Beside a dense MLP, the experts have a name of their own.
    return mlp | {"moe": _updated(mlp["moe"], load, rate)}
