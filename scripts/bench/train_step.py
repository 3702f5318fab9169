"""Times the training step of bench-small through the `maxlite` command and prints one JSON line.

bench-small: llama-style, 8 layers, emb 512, 8/4 heads x 64, mlp 1536, vocab 32000 untied, sequence 512, batch 4,
AdamW, clip 1.0, float32 weights, synthetic tokens: 57.9 M parameters, 0.536 TFLOP a step.

usage: train_step.py [--steps 8] [--last 5] [key=value ...]
Step times are those that the program logs; CPU seconds are the process's, all threads, between those lines.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

BENCH_SMALL = (
    "vocab_size=32000 emb_dim=512 num_decoder_layers=8 num_query_heads=8 num_kv_heads=4 head_dim=64 mlp_dim=1536 "
    "logits_via_embedding=false max_target_length=512 per_device_batch_size=4 dataset_type=synthetic dtype=float32 "
    "enable_checkpointing=false enable_tensorboard=false eval_interval=0 log_period=1 learning_rate=3e-5 "
    "remat_policy=minimal_with_context"
).split()
STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")


def cpu_seconds(pid: int) -> float:
    """User and system time so far of a running process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Runs maxlite, reads its lines as they come, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--last", type=int, default=5, help="steps that the medians are over")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="maxlite-bench-")
    given = {text.partition("=")[0] for text in arguments.overrides}
    fixed = [text for text in BENCH_SMALL if text.partition("=")[0] not in given]
    places = [f"base_output_directory={folder}", f"jax_cache_dir={folder}/cache", f"steps={arguments.steps}"]
    command = ["maxlite", "train", "base.yml", *fixed, *places, *arguments.overrides]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    steps, lines_before = [], 0
    for line in process.stdout:
        match = STEP.match(line)
        if match:
            steps.append((time.monotonic() - began, cpu_seconds(process.pid), float(match.group(2))))
        elif not steps:
            lines_before += 1
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(folder)
    last = arguments.last
    if process.returncode or len(steps) <= last:
        sys.exit(f"maxlite exited with {process.returncode} after {len(steps)} steps")
    print(
        json.dumps(
            {
                "bench": "train_step",
                "step_s_median": round(statistics.median(step[2] for step in steps[-last:]), 3),
                "step_s_min": round(min(step[2] for step in steps[-last:]), 3),
                "cpu_s_per_step": round((steps[-1][1] - steps[-1 - last][1]) / last, 3),
                "peak_rss_mb": round(usage.ru_maxrss / 1024),
                "first_step_done_s": round(steps[0][0], 2),
                "lines_before_step_0": lines_before,
                "load": round(os.getloadavg()[0], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
