"""Times how soon `maxlite` answers, and prints one JSON line.

usage: startup.py [--repeats 5]
Figures are the best of the repeats, in wall and CPU seconds of the whole process: `--help`, `config`, a config error,
and the first step of the default run with an empty and with a warm compile cache.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time


def timed(command: list[str], repeats: int) -> dict[str, float]:
    """Best wall and CPU seconds of a command."""
    figures = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        wall = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return {"wall_s": round(min(f[0] for f in figures), 2), "cpu_s": round(min(f[1] for f in figures), 2)}


def first_step(folder: str, run: str) -> float:
    """Wall seconds from the shell to the first step's log line of the default run."""
    command = ["maxlite", "train", "base.yml", f"base_output_directory={folder}", f"run_name={run}", "steps=1"]
    command += [f"jax_cache_dir={folder}/cache", "eval_interval=0", "enable_checkpointing=false"]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    seconds = next(time.monotonic() - began for line in process.stdout if line.startswith("completed step: 0"))
    process.communicate()
    return round(seconds, 2)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    folder = tempfile.mkdtemp(prefix="maxlite-bench-")
    figures = {
        "bench": "startup",
        "help": timed(["maxlite", "--help"], repeats),
        "config": timed(["maxlite", "config", "base.yml"], repeats),
        "config_error": timed(["maxlite", "train", "base.yml", "learning_rat=1"], repeats),
        "first_step_cold_s": first_step(folder, "cold"),
        "first_step_warm_s": first_step(folder, "warm"),
        "load": round(os.getloadavg()[0], 1),
    }
    shutil.rmtree(folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
