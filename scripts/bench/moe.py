"""Times a MoE layer against a dense MLP of the same active FLOPs, in turn, and prints one JSON object.

usage: python scripts/bench/moe.py [--tokens 2048 1 8] [--repeats 10] [key=value ...]
The layer is bench-moe's: width 512, 8 experts of hidden width 768, top 2, float32. For each number of tokens:
forward, and (with 64 tokens or more) forward and backward, a step. Wall milliseconds are the best of the repeats, since
other load only adds; CPU milliseconds count all threads of the process, and are the median. A ratio is MoE / dense in
CPU time. The dense MLP reads as many weights as one token's experts do; several tokens may make the layer read more.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.load import load_config
from maxlite.nn.mlp import GatedMLP
from maxlite.nn.moe import MoE

BENCH_MOE = (
    "mlp_pattern=moe",
    "emb_dim=512",
    "num_experts=8",
    "num_experts_per_tok=2",
    "moe_mlp_dim=768",
    "dtype=float32",
    "dataset_type=synthetic",
)
LEAST_TOKENS_TO_TRAIN = 64


def programs(layer: nnx.Module, x: jax.Array) -> dict[str, Callable[[], jax.Array]]:
    """Compiled calls without arguments: the forward pass and, for many tokens, the gradient."""
    graphdef, params = nnx.split(layer)

    def run(params: nnx.State, x: jax.Array) -> jax.Array:
        merged = nnx.merge(graphdef, params)
        return merged(x, None)[0] if isinstance(merged, MoE) else merged(x)

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(run(params, x)))

    forward = jax.jit(run).lower(params, x).compile()
    compiled = {"forward": lambda: forward(params, x)}
    if x.shape[1] >= LEAST_TOKENS_TO_TRAIN:
        gradient = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
        compiled["step"] = lambda: gradient(params, x)
    return compiled


def measure(calls: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, tuple[float, float]]:
    """(least wall seconds, median CPU seconds) of each call, taken in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            # The first run is not counted: it touches memory for the first time.
            if repeat:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (min(wall for wall, _ in row), statistics.median(cpu for _, cpu in row)) for name, row in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 1, 8])
    parser.add_argument("--repeats", type=int, default=10)
    arguments, overrides = parser.parse_known_args()
    given = {text.partition("=")[0] for text in overrides}
    fixed = [text for text in BENCH_MOE if text.partition("=")[0] not in given]
    config = load_config("base.yml", [*fixed, *overrides])
    model, active = config.model, config.model.num_experts_per_tok * (config.model.moe_mlp_dim or 0)
    moe = MoE(model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    dense = GatedMLP(model, config.compute, active, rngs=nnx.Rngs(params=jax.random.key(0)))
    result = {"bench": "moe", "jax": jax.__version__, "backend": jax.default_backend(), "dtype": config.compute.dtype}
    for tokens in arguments.tokens:
        x = jax.random.normal(jax.random.key(1), (1, tokens, model.emb_dim), config.compute.dtype)
        ours, theirs = programs(moe, x), programs(dense, x)
        calls = {f"moe_{name}": call for name, call in ours.items()}
        calls |= {f"dense_{name}": call for name, call in theirs.items()}
        times = measure(calls, arguments.repeats if tokens >= LEAST_TOKENS_TO_TRAIN else 20 * arguments.repeats)
        row = {f"{name}_ms": round(wall * 1e3, 3) for name, (wall, _) in times.items()}
        row |= {f"{name}_cpu_ms": round(cpu * 1e3, 3) for name, (_, cpu) in times.items()}
        for name in ours:
            row[f"{name}_ratio"] = round(times[f"moe_{name}"][1] / times[f"dense_{name}"][1], 2)
        result[f"tokens_{tokens}"] = row
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
