"""`maxlite ckpt plan`: which process will write which bytes of a checkpoint; no array is made, nothing compiled."""

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from maxlite.checkpoint.plan import LeafPlan, plan_writes, process_bytes
from maxlite.config.schema import Config
from maxlite.errors import ConfigError
from maxlite.estimate.compile import build_target
from maxlite.launcher.ckpt_shown import aligned, shape_text, size_text
from maxlite.train.setup import build_setup

PROCESSES = "processes="
# What a config of several processes must say of this one; nobody listens there, and nobody is asked.
_PLACE = ("process_id=0", "coordinator_address=localhost:1")


def take_processes(overrides: Sequence[str]) -> list[str]:
    """Returns `overrides` with `processes=K` written as the keys of one of K processes.

    Raises:
        ConfigError: K is not a whole number, at least 1.
    """
    keys: list[str] = []
    for text in overrides:
        count = text.removeprefix(PROCESSES)
        if not text.startswith(PROCESSES):
            keys.append(text)
        elif re.fullmatch("[1-9][0-9]{0,6}", count):
            keys += [f"num_processes={count}", *_PLACE]
        else:
            raise ConfigError(f"{text} is not a whole number, 1 or more.")
    return keys


def print_plan(config: Config, json_output: bool) -> None:
    """Prints who writes what of a training state on the mesh of `config`, as text or as one JSON object.

    The processes are not there: this one takes the devices of all, num_processes x cpu_devices fake ones, or those of
    compile_topology, whose hosts are the processes.

    Raises:
        ConfigError: the mesh does not fit the devices, or the processes do not divide them.
    """
    plan, num_processes = build_plan(config)
    written = process_bytes(plan, num_processes)
    if json_output:
        print(json.dumps(_as_json(plan, written)))
        return
    print(_headline(plan, written), _process_table(plan, written), _leaf_table(plan), sep="\n\n")


def build_plan(config: Config) -> tuple[dict[str, LeafPlan], int]:
    """Returns path -> who writes that leaf of the training state, and the number of processes; raises as print_plan."""
    alone = dataclasses.replace(
        config.distributed,
        num_processes=None,
        process_id=None,
        coordinator_address=None,
        skip_jax_distributed_system=True,
    )
    # Nothing is compiled, so no cache is needed.
    all_fake = dataclasses.replace(config.run, cpu_devices=config.fake_devices, jax_cache_dir=None)
    here = dataclasses.replace(config, run=all_fake, distributed=alone)
    target = build_target(here)
    owner, num_processes = _owners(list(target.devices), config, of_topology=target.topology is not None)
    return plan_writes(build_setup(here, devices=target.devices).abstract, owner), num_processes


def _owners(devices: list[jax.Device], config: Config, *, of_topology: bool) -> tuple[Callable[[jax.Device], int], int]:
    """Which process has a device, and how many processes there are; jax numbers devices process by process."""
    wanted = config.distributed.num_processes
    if of_topology:
        hosts = 1 + max(device.process_index for device in devices)
        if wanted not in (None, hosts):
            raise ConfigError(
                f"num_processes={wanted}, but compile_topology={config.compile.compile_topology} has {hosts} hosts, "
                "each of which is one process; leave one of the two keys away."
            )
        return lambda device: device.process_index, hosts
    count = wanted or 1
    each, rest = divmod(len(devices), count)
    if rest:
        raise ConfigError(
            f"num_processes={count} does not divide the {len(devices)} devices of this machine; plan for fake ones, "
            "cpu_devices=N of each process, or for compile_topology=..."
        )
    numbers = {device: number // each for number, device in enumerate(devices)}
    return numbers.__getitem__, count


def _as_json(plan: Mapping[str, LeafPlan], written: Sequence[int]) -> dict[str, Any]:
    leaves = {
        path: dataclasses.asdict(leaf) | {"pieces": [piece._asdict() for piece in leaf.pieces]}
        for path, leaf in plan.items()
    }
    return {
        "num_processes": len(written),
        "num_bytes": sum(written),
        "most_bytes": max(written),
        "least_bytes": min(written),
        "bytes_of_processes": list(written),
        "leaves": leaves,
    }


def _headline(plan: Mapping[str, LeafPlan], written: Sequence[int]) -> str:
    most, least = max(written), min(written)
    ratio = f", most/least {most / least:.3g}" if least else ""
    several = f"; the most {size_text(most)}, the least {size_text(least)}{ratio}" if len(written) > 1 else ""
    noun = "process" if len(written) == 1 else "processes"
    return f"{len(written)} {noun}: {len(plan)} arrays, {size_text(sum(written))}{several}"


def _process_table(plan: Mapping[str, LeafPlan], written: Sequence[int]) -> str:
    """Neighbours that write as much are one row."""
    counts = collections.Counter(process for leaf in plan.values() for process in leaf.bytes_of())
    rows = itertools.groupby(range(len(written)), key=lambda process: (written[process], counts[process]))
    cells = [
        (_ranges(processes), size_text(num_bytes), f"{num_bytes / (sum(written) or 1):.1%}", str(count))
        for (num_bytes, count), processes in rows
    ]
    return aligned(("process", "each", "share", "arrays"), cells, right=("each", "share", "arrays"))


def _leaf_table(plan: Mapping[str, LeafPlan]) -> str:
    titles = ("array", "shape", "dtype", "size", "pieces", "processes", "each")
    return aligned(titles, itertools.starmap(_leaf_cells, plan.items()), right=("size", "each"))


def _leaf_cells(path: str, leaf: LeafPlan) -> Sequence[str]:
    counted = leaf.bytes_of()
    each = dict.fromkeys(map(size_text, (min(counted.values()), max(counted.values()))))
    # All pieces of an array are alike.
    piece = shape_text([stop - start for start, stop in leaf.pieces[0].region])
    return (
        path,
        shape_text(leaf.shape),
        leaf.dtype,
        size_text(leaf.num_bytes),
        f"{len(leaf.pieces)} of {piece}",
        _ranges(sorted(counted)),
        " to ".join(each),
    )


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> 0-2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
