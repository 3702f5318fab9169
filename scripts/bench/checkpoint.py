"""Times saving and restoring a state beside a plain copy of the same bytes, and steps during a save; prints JSON.

usage: checkpoint.py [--megabytes 500] [--devices 4] [--repeats 3] [--folder DIR] [--no-train] [key=value ...]
All turns are in one process: orbax and plain copy take turns, each figure is the best of the repeats, and a
save or a copy has ended when its bytes are on disk (fsync). Then `maxlite train` runs bench-small (key=value are for
it) and saves in the background: its steps during a save, over the median of the others.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.load import load_config
from maxlite.config.schema import CheckpointConfig

LEAVES = 16
BENCH_SMALL = (
    "vocab_size=32000 emb_dim=512 num_decoder_layers=8 num_query_heads=8 num_kv_heads=4 head_dim=64 mlp_dim=1536 "
    "logits_via_embedding=false max_target_length=512 per_device_batch_size=4 dataset_type=synthetic dtype=float32 "
    "enable_tensorboard=false eval_interval=0 log_period=1 learning_rate=3e-5 remat_policy=minimal_with_context "
    "steps=17 save_checkpoint_on_completion=false"
).split()
PERIOD = 6
STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")


def build_state(megabytes: int) -> dict[str, dict[str, jax.Array]]:
    """Normal numbers in float32, split over all devices; weights compress as little."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    rows = megabytes * 1_000_000 // LEAVES // 4 // 1024 // jax.device_count() * jax.device_count()
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    draw = jax.jit(lambda key: jax.random.normal(key, (rows, 1024), jnp.float32), out_shardings=sharding)
    arrays = {f"leaf_{number}": draw(jax.random.key(number)) for number in range(LEAVES)}
    return {"params": arrays, "opt_state": {}}


def plain_copy(arrays: dict[str, jax.Array], folder: pathlib.Path) -> tuple[float, float]:
    """Seconds to write each array as one file, and to read them back onto the devices."""
    began = time.perf_counter()
    for name, array in arrays.items():
        with open(folder / name, "wb", buffering=0) as file:
            np.asarray(array).tofile(file)
            os.fsync(file.fileno())
    written = time.perf_counter()
    for name, array in arrays.items():
        read = np.fromfile(folder / name, array.dtype).reshape(array.shape)
        jax.device_put(read, array.sharding).block_until_ready()
    return written - began, time.perf_counter() - written


def save_and_restore(state: dict, config: CheckpointConfig, folder: pathlib.Path) -> tuple[float, float, float]:
    """Seconds that save() held the caller, until all was on disk, and to restore it into the same shardings."""
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    checkpointer = Checkpointer(folder, config)
    began = time.perf_counter()
    checkpointer.save(1, state, {})
    held = time.perf_counter()
    checkpointer.wait()
    saved = time.perf_counter()
    restored, _ = checkpointer.restore(1, abstract)
    jax.block_until_ready(restored)
    ended = time.perf_counter()
    checkpointer.close()
    return held - began, saved - began, ended - saved


def steps_during_saves(folder: pathlib.Path, overrides: list[str]) -> dict[str, float]:
    """Runs bench-small; a step is during a save if it comes after one was begun, or ended before one was whole."""
    given = {text.partition("=")[0] for text in overrides}
    fixed = [text for text in BENCH_SMALL if text.partition("=")[0] not in given]
    places = [f"base_output_directory={folder}", "run_name=run", f"jax_cache_dir={folder}/cache"]
    places.append(f"checkpoint_period={PERIOD}")
    command = ["maxlite", "train", "base.yml", *fixed, *places, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    during, others = [], []
    for line in process.stdout:
        match = STEP.match(line)
        if match and (step := int(match.group(1))) > 1:
            saving = step % PERIOD == 0 or is_saving(folder / "run" / "checkpoints")
            (during if saving else others).append(float(match.group(2)))
    if process.wait() or not during or not others:
        sys.exit(f"maxlite exited with {process.returncode} after {len(during)} steps with a save and {len(others)}")
    median = statistics.median(others)
    return {
        "step_s_median": round(median, 3),
        "steps_during_saves": len(during),
        "step_s_during_saves": round(statistics.mean(during), 3),
        "ratio_mean": round(statistics.mean(during) / median, 3),
        "ratio_max": round(max(during) / median, 3),
    }


def is_saving(checkpoints: pathlib.Path) -> bool:
    return checkpoints.is_dir() and any(not entry.name.isdecimal() for entry in checkpoints.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the files go; a temporary folder otherwise")
    parser.add_argument("--no-train", action="store_true", help="leave the training run out")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    config = dataclasses.replace(load_config("base.yml", [], {}).checkpoint, async_checkpointing=True)
    state = jax.block_until_ready(build_state(arguments.megabytes))
    gigabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    copies, saves = [], []
    for _ in range(arguments.repeats):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="maxlite-bench-", dir=arguments.folder))
        copies.append(plain_copy(state["params"], folder))
        saves.append(save_and_restore(state, config, folder / "run"))
        files = (path for path in (folder / "run").rglob("*") if path.is_file())
        on_disk = sum(path.stat().st_size for path in files) / 1e9
        shutil.rmtree(folder)
    write, read = (min(times) for times in zip(*copies, strict=True))
    held, save, restore = (min(times) for times in zip(*saves, strict=True))
    figures = {
        "bench": "checkpoint",
        "gigabytes": round(gigabytes, 3),
        "gigabytes_on_disk": round(on_disk, 3),
        "copy_write_gb_s": round(gigabytes / write, 2),
        "save_gb_s": round(gigabytes / save, 2),
        "ratio_save": round(save / write, 2),
        "copy_read_gb_s": round(gigabytes / read, 2),
        "restore_gb_s": round(gigabytes / restore, 2),
        "ratio_restore": round(restore / read, 2),
        "save_held_s": round(held, 3),
    }
    if not arguments.no_train:
        del state
        with tempfile.TemporaryDirectory(prefix="maxlite-bench-", dir=arguments.folder) as folder:
            figures["train"] = steps_during_saves(pathlib.Path(folder), arguments.overrides)
    print(json.dumps(figures | {"load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
