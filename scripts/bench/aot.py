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
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from maxlite.config.load import load_config
from maxlite.estimate.compile import build_target, compile_train_step

DEFAULTS = {
    "dtype": "bfloat16",
    "dataset_type": "synthetic",
    "max_target_length": "2048",
    "per_device_batch_size": "1",
}
BUFFER = re.compile(r"^\s*\S+\(\s*\d+%\);\s*(\S+);\s*\d+;\s*\d+; (.*)$")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, the CPU seconds of tracing and compiling it, and what the compiler wrote about its memory."""

    program: jax.stages.Compiled
    seconds: float
    report: str
    assignment: str


def compile_step(values: dict[str, str]) -> Compiled:
    """Compiles the step of this config."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{values.get('compile_xla_flags', '')} --xla_dump_to={folder}"
        overrides = [f"{name}={value}" for name, value in (values | {"compile_xla_flags": flags}).items()]
        config = load_config("base.yml", overrides)
        target, began = build_target(config), time.process_time()
        _, program = compile_train_step(config, target)
        seconds = time.process_time() - began
        if program.compiled is None:
            sys.exit(program.refusal)
        # Small programs that try out the flags are dumped too.
        (report,) = pathlib.Path(folder).glob("*train_step*memory-usage-report.txt")
        (assignment,) = pathlib.Path(folder).glob("*train_step*after_optimizations-buffer-assignment.txt")
        return Compiled(program.compiled, seconds, report.read_text(), assignment.read_text())


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
    values |= {"model": arguments.model, "remat_policy": arguments.remat_policy, "compile_topology": arguments.topology}
    compiled = compile_step(values)
    memory: Any = compiled.program.memory_analysis()
    block = max(int(size) for size in re.findall(r"size (\d+), preallocated-temp", compiled.assignment))
    figures = {
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temp_gb": memory.temp_size_in_bytes / 1e9,
        "needed_gb": block / 1e9,
        "peak_gb": memory.peak_memory_in_bytes / 1e9,
        "host_arguments_gb": memory.host_argument_size_in_bytes / 1e9,
        "host_temp_gb": memory.host_temp_size_in_bytes / 1e9,
        "compile_cpu_s": compiled.seconds,
    }
    print(json.dumps({"config": values, **{name: round(value, 2) for name, value in figures.items()}}))
    for line in largest_buffers(compiled.report, arguments.buffers):
        print(line)


if __name__ == "__main__":
    main()
