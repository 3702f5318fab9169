"""Compiles the training step for TPUs that are not there; prints bytes a device, compile seconds, the largest buffers.

usage: aot.py MODEL TOPOLOGY REMAT_POLICY [--buffers 12] [key=value]
    aot.py llama3-8b v5p-16 full
One row of 2,048 tokens a device, AdamW, float32 weights and moments, bfloat16 activations, fsdp over all devices.
Arguments and temporaries are what the compiler reports (memory_analysis); needed is the size of its one block of
temporaries. A buffer that holds several tensors one after the other is listed once, with the largest of them.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator

import jax

from maxlite.config.load import load_config
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.topology import build_topology, without_compile_cache
from maxlite.train.setup import build_setup

DEFAULTS = {
    "dtype": "bfloat16",
    "dataset_type": "synthetic",
    "max_target_length": "2048",
    "per_device_batch_size": "1",
}
BUFFER = re.compile(r"^\s*\S+\(\s*\d+%\);\s*(\S+);\s*\d+;\s*\d+; (.*)$")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, what the compiler wrote about its memory, and the CPU seconds of tracing and compiling."""

    program: jax.stages.Compiled
    report: str
    assignment: str
    trace_seconds: float
    compile_seconds: float


def compile_step(overrides: list[str], topology: str) -> Compiled:
    """Compiles the step of this config for a slice."""
    devices = build_topology(topology, 1).devices
    setup = build_setup(load_config("base.yml", overrides), devices)
    with (
        tempfile.TemporaryDirectory() as folder,
        use_mesh(setup.mesh, setup.rules, execution=setup.execution),
        without_compile_cache(),
    ):
        start = time.process_time()
        lowered = setup.train_step.lower(setup.abstract, setup.abstract_batch)
        traced = time.process_time()
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": "train_step"}
        program = lowered.compile(compiler_options=options)
        done = time.process_time()
        (report,) = pathlib.Path(folder).glob("*memory-usage-report.txt")
        (assignment,) = pathlib.Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        return Compiled(program, report.read_text(), assignment.read_text(), traced - start, done - traced)


def largest_buffers(report: str, count: int) -> Iterator[str]:
    """Yields size and tensors of the largest buffers in the device's main memory, arguments left out."""
    temporaries = report.split("\n\n")[0].splitlines()
    for line in temporaries:
        found = BUFFER.match(line)
        if found and count:
            count -= 1
            yield f"{found[1]:>10} {found[2][:100]}"


def main() -> None:
    """Compiles one step and prints a JSON line and the largest buffers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("topology")
    parser.add_argument("remat_policy")
    parser.add_argument("--buffers", type=int, default=12)
    arguments, keys = parser.parse_known_args()
    values = DEFAULTS | dict(text.split("=", 1) for text in keys)
    values |= {"model": arguments.model, "remat_policy": arguments.remat_policy}
    compiled = compile_step([f"{name}={value}" for name, value in values.items()], arguments.topology)
    memory = compiled.program.memory_analysis()
    block = max(int(size) for size in re.findall(r"size (\d+), preallocated-temp", compiled.assignment))
    figures = {
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temp_gb": memory.temp_size_in_bytes / 1e9,
        "needed_gb": block / 1e9,
        "peak_gb": memory.peak_memory_in_bytes / 1e9,
        "host_arguments_gb": memory.host_argument_size_in_bytes / 1e9,
        "host_temp_gb": memory.host_temp_size_in_bytes / 1e9,
        "trace_cpu_s": compiled.trace_seconds,
        "compile_cpu_s": compiled.compile_seconds,
    }
    print(json.dumps({"config": values, **{name: round(value, 2) for name, value in figures.items()}}))
    for line in largest_buffers(compiled.report, arguments.buffers):
        print(line)


if __name__ == "__main__":
    main()
