"""One of several processes with two devices each, that saves and restores as its arguments say.

Arguments: coordinator, number of processes, number of this one, a run directory, then actions in their order. Prints
one JSON object for each action.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.restore import restore_parameters
from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.load import load_config
from maxlite.errors import MaxliteError

SHAPES = {
    "step": ((), "int32"),
    "params/a": ((256, 64), "float32"),
    "params/b": ((64, 128), "bfloat16"),
    "params/whole": ((64, 8), "float32"),
    "opt_state/mu": ((256, 64), "float32"),
    "opt_state/whole": ((4096,), "float32"),
}


def values(step: int) -> dict[str, np.ndarray]:
    """What the state of a step is, on any number of processes."""
    random = np.random.default_rng(step)
    return {
        path: np.asarray(random.normal(size=shape) * 100).astype(jnp.dtype(dtype))
        for path, (shape, dtype) in SHAPES.items()
    }


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Matrices over the mesh's axes in order; the rest, and what says so, copied."""
    return {
        path: NamedSharding(
            mesh, PartitionSpec(*mesh.axis_names) if len(shape) == 2 and "whole" not in path else PartitionSpec()
        )
        for path, (shape, _) in SHAPES.items()
    }


def tree_of(leaves: dict) -> dict:
    """Nested dicts as of a state."""
    tree: dict = {"params": {}, "opt_state": {}}
    for path, leaf in leaves.items():
        root, _, name = path.partition("/")
        if name:
            tree[root][name] = leaf
        else:
            tree[root] = leaf
    return tree


def mesh_of(*sizes: int) -> Mesh:
    """A mesh of all devices; its axes are x and y."""
    devices = np.array(jax.devices()).reshape(sizes)
    return Mesh(devices, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def state_of(step: int, mesh: Mesh) -> dict:
    """The state of a step, on a mesh."""
    placed = shardings(mesh)
    return tree_of(
        {
            path: jax.make_array_from_callback(value.shape, placed[path], value.__getitem__)
            for path, value in values(step).items()
        }
    )


def abstract_of(mesh: Mesh, dtypes: dict[str, str] | None = None) -> dict:
    """What a restore onto a mesh asks for."""
    placed, dtypes = shardings(mesh), dtypes or {}
    return tree_of(
        {
            path: jax.ShapeDtypeStruct(shape, dtypes.get(path, dtype), sharding=placed[path])
            for path, (shape, dtype) in SHAPES.items()
        }
    )


def assert_restored(step: int, tree: dict, wanted: dict) -> None:
    """All that this process holds of a tree is what the state of a step is, in the shardings that were wanted."""
    expected, asked = values(step), leaf_paths(wanted)
    for path, array in leaf_paths(tree).items():
        assert array.sharding == asked[path].sharding and array.dtype == asked[path].dtype, path
        for shard in array.addressable_shards:
            part = expected[path][shard.index].astype(array.dtype)
            assert np.asarray(shard.data).tobytes() == part.tobytes(), (path, shard.index)


def config_of(**others: object):
    """The section of base.yml, with other values."""
    overrides = [f"{key}={value}" for key, value in others.items()]
    return load_config("base.yml", overrides, {}).checkpoint


def act(action: str, run: Path, process: int) -> dict:
    """Does one action; what it returns is printed."""
    name, _, argument = action.partition(":")
    if name == "save":
        checkpointer = Checkpointer(run, config_of(max_num_checkpoints_to_keep=2))
        mesh = mesh_of(2, jax.device_count() // 2)
        for step in map(int, argument.split(",")):
            checkpointer.save(step, state_of(step, mesh), {"position": step}, {"eval/avg_loss": 1 / step})
        checkpointer.close()
        return {"latest": checkpointer.latest_step(), "skipped": checkpointer.skipped_steps}
    if name == "restore":
        checkpointer, reports = Checkpointer(run, config_of()), []
        mesh = mesh_of(jax.device_count() // 2, 2)
        step = checkpointer.latest_step()
        wanted = abstract_of(mesh, {"params/a": "bfloat16"})
        tree, position = checkpointer.restore(step, wanted, reports.append)
        assert_restored(step, tree, wanted)
        params = restore_parameters(run, wanted["params"])
        assert_restored(step, {"params": params}, wanted)
        return {"step": step, "position": position, "report": dataclasses.asdict(reports[0]) | {"seconds": 0}}
    if name == "fail":
        # The process whose number is given can't write more than a little to a file.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        checkpointer = Checkpointer(run, config_of())
        state = state_of(9, mesh_of(jax.device_count()))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if process == int(argument):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        checkpointer.save(9, state, {})
        failure = None
        deadline = time.monotonic() + 60
        while failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
            failure = checkpointer.failed()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert checkpointer.failed() is None
        checkpointer.close()
        return {"failure": str(failure), "latest": checkpointer.latest_step()}
    raise AssertionError(action)


def main() -> None:
    coordinator, count, process, run, *actions = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    if int(count) > 1:
        jax.distributed.initialize(coordinator, int(count), int(process))
    for action in actions:
        try:
            answer = act(action, Path(run), int(process))
        except MaxliteError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ.pop("XLA_FLAGS", None)
    main()
