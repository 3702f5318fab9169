"""Times warm decoding on bench-small, or of a Hugging Face folder, and prints one JSON object; compiling is left out.

usage: python scripts/bench/decode.py [--folder DIR] [--batch 1 8] [--prompt 128] [--new 128] [--repeats 3] [key=value]
CPU milliseconds count all threads of the process; the best of the repeats is given, since other load only adds. For one
thread, run it under `taskset -c 0`.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import time

import jax
import numpy as np

from maxlite.config.load import load_config
from maxlite.decode.generate import BatchShape, Generator, Programs, padded_length
from maxlite.decode.sampling import build_sampler
from maxlite.hf.load import load_parameters
from maxlite.launcher.resolve import resolve_config
from maxlite.model.build import build_model, resolve_dtype

BENCH_SMALL = (
    "vocab_size=32000",
    "emb_dim=512",
    "num_decoder_layers=8",
    "num_query_heads=8",
    "num_kv_heads=4",
    "head_dim=64",
    "mlp_dim=1536",
    "logits_via_embedding=false",
    "dtype=float32",
    "dataset_type=synthetic",
)


def measure(generator: Generator, prompts: list[list[int]], repeats: int) -> dict[str, float]:
    prefill, decode = [], []
    # The first run is not counted: it touches memory for the first time.
    for repeat in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        stream = generator.stream(prompts)
        next(stream)
        wall_between, cpu_between = time.perf_counter(), time.process_time()
        steps = sum(piece.shape[1] for piece in stream)
        if repeat:
            prefill.append((wall_between - wall, cpu_between - cpu))
            decode.append(((time.perf_counter() - wall_between) / steps, (time.process_time() - cpu_between) / steps))
    rows, tokens = len(prompts), sum(map(len, prompts))
    prefill_wall, prefill_cpu = min(wall for wall, _ in prefill), min(cpu for _, cpu in prefill)
    step_wall, step_cpu = min(wall for wall, _ in decode), min(cpu for _, cpu in decode)
    return {
        "prefill_tokens_per_second": round(tokens / prefill_wall, 1),
        "prefill_cpu_ms_per_token": round(prefill_cpu / tokens * 1e3, 3),
        "decode_tokens_per_second": round(rows / step_wall, 1),
        "decode_cpu_ms_per_token": round(step_cpu / rows * 1e3, 2),
        "decode_cpu_ms_per_step": round(step_cpu * 1e3, 2),
        "compile_seconds": round(generator.speed.compile_seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments, overrides = parser.parse_known_args()
    if arguments.folder is None:
        config = load_config("base.yml", [*BENCH_SMALL, *overrides])
    else:
        config = resolve_config(arguments.folder, ["dtype=float32", *overrides])
    dtype = resolve_dtype(config.compute.dtype)
    model = build_model(config.model, dataclasses.replace(config.compute, dtype=dtype, weight_dtype=dtype))
    if arguments.folder is None:
        params = jax.jit(model.init)(jax.random.key(0))
    else:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, model.abstract_params)
        params = load_parameters(arguments.folder, model, shardings, sys.stderr)
    params = model.take_apart(params)
    result = {
        "bench": "decode",
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "dtype": model.compute.dtype,
        "num_parameters": model.num_parameters,
        "prompt": arguments.prompt,
        "new": arguments.new,
    }
    random = np.random.default_rng(0)
    for batch in arguments.batch:
        prompts = random.integers(0, config.model.vocab_size, (batch, arguments.prompt)).tolist()
        shape = BatchShape(batch, padded_length(arguments.prompt), arguments.new)
        generator = Generator(Programs(model, build_sampler(config.decode), (), shape), params)
        result[f"batch_{batch}"] = measure(generator, prompts, arguments.repeats)
    result["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
