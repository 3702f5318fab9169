"""A run in which nothing moves any more ends by itself, and says where it stood."""

import subprocess
import sys

import pytest

from maxlite.errors import HangError
from tests.conftest import ROOT, TINY

# The data stop coming: the fifth batch is waited for, for ever.
_PROGRAM = """
import sys, time
from maxlite.data.iterators import TrainIterator
from maxlite.launcher import cli

take, asked = TrainIterator.__next__, []

def never_comes():
    time.sleep(1000)

def next_batch(self):
    asked.append(None)
    return take(self) if len(asked) < 5 else never_comes()

TrainIterator.__next__ = next_batch
sys.argv = ["maxlite", *sys.argv[1:]]
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_a_run_that_hangs_ends_with_the_stacks_of_its_threads(tmp_path, process_environment):
    keys = [*TINY, "cpu_devices=1", "steps=100", "watchdog_factor=2", "watchdog_min_seconds=1", "run_name=hung"]
    keys += [f"base_output_directory={tmp_path}", "log_period=1", "checkpoint_period=2", "eval_interval=0"]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "train", str(ROOT / "base.yml"), *keys],
        env=process_environment, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == HangError.exit_code, done
    assert "No step ended for" in done.stderr and "Traceback" not in done.stderr
    stacks = tmp_path / "hung" / "metrics" / "stacks_process_0.txt"
    assert str(stacks) in done.stderr
    assert "never_comes" in stacks.read_text()
    # What was saved before is what the next start goes on from.
    assert (tmp_path / "hung" / "checkpoints" / "4").is_dir()
