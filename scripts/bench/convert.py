"""Times folder -> run -> folder against transformers' load and save of the same folder; prints JSON with ratios.

usage: python scripts/bench/convert.py HF_DIR [--transformers PYTHON] [--repeats 3]
Each measurement is a process of its own, the two tools take turns, and imports are left out. `transformers` takes the
path of a Python that has torch and transformers; without it only maxlite is timed. Wall seconds are the best of the
repeats, since other load only adds.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

OURS = """
import contextlib, io, json, pathlib, resource, sys, time
from maxlite.launcher.convert import convert
from maxlite.parallel.devices import prepare_jax
import jax; jax.devices()
source, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
flags, times = {"explain": False, "check": False}, [(time.perf_counter(), time.process_time())]
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with contextlib.redirect_stdout(io.StringIO()):
    convert(source, str(scratch / "run"), [], "5GB", flags)
    times.append((time.perf_counter(), time.process_time()))
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(str(scratch / "run"), str(scratch / "out"), [], "5GB", flags)
times.append((time.perf_counter(), time.process_time()))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"read_s": times[1][0] - times[0][0], "write_s": times[2][0] - times[1][0],
                  "cpu_s": times[2][1] - times[0][1], "base_mb": base // 1024, "import_peak_mb": imported // 1024,
                  "peak_mb": peak // 1024}))
"""
THEIRS = """
import json, pathlib, resource, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
times = [(time.perf_counter(), time.process_time())]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
times.append((time.perf_counter(), time.process_time()))
model.save_pretrained(scratch / "out")
tokenizer.save_pretrained(scratch / "out")
times.append((time.perf_counter(), time.process_time()))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"read_s": times[1][0] - times[0][0], "write_s": times[2][0] - times[1][0],
                  "cpu_s": times[2][1] - times[0][1], "base_mb": base // 1024, "peak_mb": peak // 1024}))
"""


def run(python: str, code: str, folder: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [python, "-c", code, folder, scratch], capture_output=True, text=True, env=environment, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(min(run[name] for run in runs), 3) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ours, theirs = [], []
    for _ in range(arguments.repeats):
        ours.append(run(sys.executable, OURS, arguments.folder))
        if arguments.transformers:
            theirs.append(run(arguments.transformers, THEIRS, arguments.folder))
    files = pathlib.Path(arguments.folder).glob("*.safetensors")
    result = {
        "bench": "convert",
        "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "maxlite": best(ours),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if theirs:
        result["transformers"] = best(theirs)
        for name in ("read_s", "write_s", "cpu_s"):
            result[f"ratio_{name}"] = round(result["maxlite"][name] / result["transformers"][name], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
