"""Times flash (blockwise) attention against dot_product, forward and backward, on one device; prints one JSON line.

usage: attention.py [--length 4096] [--batch 1] [--repeats 5] [--dtype float32]

8 query heads and 4 key heads of 64 features. The two take turns, since other load only adds: seconds are the best of
the repeats, wall and of the process's CPU time, all threads. Temporaries are those of the compiled program.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ops.attention import self_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
KERNELS = {"dot_product": "dot_product", "flash": "blockwise"}


def program(kernel: str, arrays: tuple[jax.Array, ...]) -> jax.stages.Compiled:
    """Gradients of query, key and value for a gradient of the output."""
    positions = jnp.broadcast_to(jnp.arange(arrays[0].shape[1], dtype=jnp.int32), arrays[0].shape[:2])

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, output_gradient: jax.Array) -> tuple:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            segment_ids = jnp.ones_like(positions)
            scale = HEAD_DIM**-0.5
            return self_attention(
                query, key, value, positions=positions, segment_ids=segment_ids, scale=scale, kernel=kernel
            )

        out, backward = jax.vjp(attend, query, key, value)
        return out, backward(output_gradient)

    return jax.jit(gradients).lower(*arrays).compile()


def run(compiled: jax.stages.Compiled, arrays: tuple[jax.Array, ...]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(compiled(*arrays))
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Compiles both, lets them take turns, prints the figures and the ratios flash / dot_product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    generator = np.random.default_rng(0)
    arrays = tuple(
        jnp.asarray(generator.normal(size=(given.batch, given.length, heads, HEAD_DIM)), given.dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    programs = {name: program(kernel, arrays) for name, kernel in KERNELS.items()}
    for compiled in programs.values():
        run(compiled, arrays)
    times = {name: [] for name in programs}
    for _ in range(given.repeats):
        for name, compiled in programs.items():
            times[name].append(run(compiled, arrays))
    figures = {}
    for name, compiled in programs.items():
        walls, cpus = zip(*times[name], strict=True)
        memory = compiled.memory_analysis()
        assert memory is not None
        figures[name] = {"wall_s": min(walls), "cpu_s": min(cpus), "temporary_mb": memory.temp_size_in_bytes / 1e6}
    ratios = {name: figures["flash"][name] / figures["dot_product"][name] for name in figures["flash"]}
    figures = {"length": given.length, "batch": given.batch, **figures, "flash / dot_product": ratios}
    print(json.dumps(figures, default=float))


if __name__ == "__main__":
    main()
