"""SIGKILL at random points of restoring, saving, merging and committing: a run goes on from its newest whole step."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxlite.errors import CheckpointError
from tests.checkpoint.attempts import COUNT_EVENTS, KEPT, Attempts, Chain, Ended, kills, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 12
RUN = tuple(
    "run_name=run checkpoint_period=1 async_checkpointing=true dataset_type=text vocab_size=264 emb_dim=32 mlp_dim=32 "
    "num_decoder_layers=1 num_query_heads=2 num_kv_heads=2 head_dim=16 dtype=float32 max_target_length=32 "
    "per_device_batch_size=1 log_period=1 eval_interval=0 peak_tflops_per_device=1 enable_tensorboard=false".split()
)


@pytest.fixture(scope="module")
def server(process_environment) -> Iterator[subprocess.Popen[str]]:
    with serving(process_environment) as process:
        yield process


@pytest.fixture
def small_disk(process_environment, tmp_path) -> Iterator[Attempts]:
    """Attempts at a run on a file system of 32 MB, of their own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=32m tmpfs "$0" && exec "$@"']
    if subprocess.run([*mount, str(folder), "true"], check=False, capture_output=True).returncode:
        pytest.skip("a program may not mount a file system here")
    with serving(process_environment, *mount, str(folder)) as server:
        yield Attempts(server, folder, outputs=tmp_path / "outputs")


@pytest.mark.parametrize(("processes", "count"), [(1, 20), (2, 10)])
def test_killed_saves_lose_nothing(server, tmp_path, processes, count):
    chain = Chain(Attempts(server, tmp_path, processes))
    assert chain.attempt(1).codes == [0] * processes
    whole = chain.attempt(3, **COUNT_EVENTS)
    assert whole.codes == [0] * processes, whole
    for kill in kills(whole, count, processes, seed=1):
        last = chain.announced + 3
        ended = chain.attempt(3, **kill)
        # The others of a killed process end by themselves, and as if all were well only if all was: one process may
        # be killed on its way out, when the last step is on disk and the other has gone.
        assert ended.lingered == [], ended
        assert 0 not in ended.codes or str(last) in chain.attempts.listing(), ended
    ended = chain.attempt(2)
    assert ended.codes == [0] * processes, ended
    assert chain.attempts.listing() == [str(chain.durable - 1), str(chain.durable)]
    # The kills did fall into attempts, and some into saves.
    assert chain.kills >= 0.8 * count and chain.skips >= 0.2 * count, (chain.kills, chain.skips)


@pytest.mark.parametrize(("processes", "count"), [(1, 3), (2, 2)])
def test_a_killed_run_ends_as_one_that_was_not(server, tmp_path, processes, count):
    """Losses, parameters, optimizer state and data position are those of the run that was left alone, bit for bit."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(64):
        (texts / f"{number:02}.txt").write_text(f"<{number:02}> " + "ab cd ef " * (1 + number % 5))
    fixed = [*RUN, f"steps={STEPS}", f"max_num_checkpoints_to_keep={KEPT}", f"cpu_devices={4 // processes}"]
    fixed.append(f"dataset_path={texts}")

    def train(attempts: Attempts, **kill: Any) -> Ended:
        overrides = [*fixed, f"base_output_directory={attempts.folder}"]
        return attempts.start("command", {"arguments": ["train", "base.yml", *overrides]}, **kill)

    alone, killed = (Attempts(server, tmp_path / name, processes) for name in ("alone", "killed"))
    whole = train(alone)
    assert whole.codes == [0] * processes, whole
    choose = random.Random(2)
    for number in range(count):
        left = killed.listing()
        after = f"completed step: {(number + 1) * STEPS // (count + 1)}" if number else "Num_devices"
        ended = train(killed, killed=choose.randrange(processes), after=after, at_second=choose.uniform(0, 0.4))
        assert ended.lingered == [] and 0 not in ended.codes, ended
        _check_start(left, ended)
    left = killed.listing()
    ended = train(killed)
    assert ended.codes == [0] * processes, ended
    _check_start(left, ended)
    assert killed.listing() == alone.listing() == [str(STEPS - 1), str(STEPS)]
    assert _losses(killed) == _losses(alone) and len(_losses(alone)) == STEPS
    ours, theirs = (_read_step(Path(attempts.run, "checkpoints", str(STEPS))) for attempts in (killed, alone))
    assert ours == theirs


@pytest.mark.parametrize(
    ("hazard", "mend", "reason"),
    [
        ("full", ["rm", "ballast"], "No space left on device"),
        ("read_only", ["mount", "-o", "remount,rw", "."], "Read-only file system"),
    ],
)
def test_a_save_that_fails_is_an_error_and_loses_nothing(small_disk, hazard, mend, reason):
    chain = Chain(small_disk)
    assert chain.attempt(2).codes == [0]
    ended = chain.attempt(1, hazard=hazard)
    assert ended.codes == [CheckpointError.exit_code], ended
    (message,) = ended.all("error")
    assert reason in message and small_disk.run in message and "step 3" in message, message
    assert "the newest complete checkpoint is 2" in message
    # Reading needs no room, and a save that can't be made is said again.
    again = chain.attempt(0)
    assert again.codes == [CheckpointError.exit_code] and again.all("restored") == [2], again
    mended = small_disk.start("execute", {"command": ["env", "-C", str(small_disk.folder), *mend]})
    assert mended.codes == [0], mended
    assert chain.attempt(1).codes == [0]
    assert small_disk.listing() == ["3", "4"]


def _check_start(left: list[str], ended: Ended) -> None:
    """The newest whole step is the start, and what lies beside it is named."""
    detail = f"{left}\n{ended}"
    steps = [int(name) for name in left if name.isdecimal()]
    if steps and "completed step:" in ended.outputs[0]:
        assert f"Resumed at step {max(steps)}\n" in ended.outputs[0], detail
        for name in left:
            assert name.isdecimal() or f"Skipped an incomplete checkpoint: {name}" in ended.outputs[0], detail


def _losses(attempts: Attempts) -> dict[int, float]:
    rows = [json.loads(line) for line in Path(attempts.run, "metrics", "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["learning/loss"] for row in rows}
    assert len(losses) == len(rows), "a step has two rows"
    return losses


def _read_step(folder: Path) -> dict[str, Any]:
    """The bytes of each array, and the data position, by orbax alone."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(folder / "items").item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(folder / "items", args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    named = {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}
    return named | {"data": json.loads((folder / "iter" / "metadata").read_text())}
