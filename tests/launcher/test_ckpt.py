"""What `maxlite ckpt` prints of a run's checkpoints, and what `prune` leaves; their contents are tested elsewhere."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.load import dump_config
from maxlite.errors import CheckpointError, ConfigError
from maxlite.launcher import ckpt

LOSSES = {2: 1.5, 4: 0.5, 6: float("nan"), 8: 2.5}


@pytest.fixture(scope="module")
def run_once(tmp_path_factory, tiny_config):
    """A run of 4 steps whose config keeps the newest two."""
    path = tmp_path_factory.mktemp("saved") / "run"
    config = tiny_config("max_num_checkpoints_to_keep=9", "cpu_devices=8", "ici_fsdp_parallelism=-1")
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    checkpointer = Checkpointer(path, config.checkpoint)
    for step, loss in LOSSES.items():
        w = jax.device_put(jnp.full((256, 64), float(step)), NamedSharding(mesh, PartitionSpec("fsdp")))
        same = jax.device_put(jnp.ones(3, jnp.bfloat16), NamedSharding(mesh, PartitionSpec()))
        checkpointer.save(step, {"params": {"w": w, "same": same}}, {"row": step}, {"eval/avg_loss": loss})
    checkpointer.close()
    # As of a run on other machines: nothing but the keep keys matters here.
    text = dump_config(config).replace("max_num_checkpoints_to_keep: 9", "max_num_checkpoints_to_keep: 2")
    (path / "config.yml").write_text(re.sub("ici_fsdp_parallelism: .*", "ici_fsdp_parallelism: 64", text))
    return path


@pytest.fixture
def run(run_once, tmp_path):
    """A copy of that run, for one test alone."""
    return shutil.copytree(run_once, tmp_path / "run")


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def printed(capsys, command, *arguments, **keywords):
    command(*arguments, **keywords)
    return capsys.readouterr().out


def test_ls(run, capsys):
    shutil.copytree(run / "checkpoints" / "8", run / "checkpoints" / "10.orbax-checkpoint-tmp")
    (run / "checkpoints" / "2" / "iter" / "metadata").unlink()
    before = files_below(run)
    title, *lines = printed(capsys, ckpt.print_list, str(run), False).splitlines()
    assert files_below(run) == before
    assert re.split(r" {2,}", title) == [
        "step", "saved", "size", "eval/avg_loss", "processes", "complete by", "state", "kept",
    ]  # fmt: skip
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == ["2", "4", "6", "8", "10.orbax-checkpoint-tmp"]
    assert rows["2"].endswith("iter/metadata is missing")
    assert rows["10.orbax-checkpoint-tmp"].endswith("not finished")
    assert re.search(r"kB +0\.5 +1 +rename +complete +no, goes with the next save$", rows["4"])
    assert rows["6"].endswith("newest 2") and rows["8"].endswith("newest 2")


def test_ls_as_json(run, capsys):
    rows = json.loads(printed(capsys, ckpt.print_list, str(run), True), parse_constant=pytest.fail)
    assert [row["step"] for row in rows] == list(LOSSES)
    assert [row["metrics"]["eval/avg_loss"] for row in rows] == [1.5, 0.5, None, 2.5]
    assert [row["kept"] for row in rows] == [None, None, "newest 2", "newest 2"]
    for row in rows:
        assert row["complete"] and row["problem"] is None and row["num_bytes"] > 0
        assert (row["atomicity"], row["num_processes"], row["mesh"]) == ("rename", 1, {"data": 2, "fsdp": 4})
        assert row["folder"] == str(run / "checkpoints" / str(row["step"])) and row["time"] > 1.7e9


def test_steps_that_a_file_makes_complete(tmp_path, tiny_config, capsys):
    config = tiny_config("checkpoint_atomicity=commit_file").checkpoint
    checkpointer = Checkpointer(tmp_path, config)
    for step in (1, 2):
        checkpointer.save(step, {"params": {"w": jnp.ones(4)}}, {})
    checkpointer.close()
    (tmp_path / "checkpoints" / "2" / "commit_success.txt").unlink()
    rows = json.loads(printed(capsys, ckpt.print_list, str(tmp_path), True))
    assert [(row["step"], row["complete"], row.get("atomicity")) for row in rows] == [
        (1, True, "commit_file"),
        (None, False, None),
    ]
    assert "complete by commit_file" in printed(capsys, ckpt.print_step, str(tmp_path), False)
    assert printed(capsys, ckpt.verify, str(tmp_path), False).startswith("1: sound")


def test_ls_of_what_has_none(run, tmp_path, capsys):
    shutil.rmtree(run / "checkpoints")
    assert printed(capsys, ckpt.print_list, str(run), False) == f"{run} has no checkpoints\n"
    with pytest.raises(CheckpointError, match="there is no such folder"):
        ckpt.print_list(str(tmp_path / "nowhere"), False)
    with pytest.raises(CheckpointError, match="has no folder 'checkpoints'"):
        ckpt.print_list(str(tmp_path), False)


def test_show(run, capsys):
    before = files_below(run)
    text = printed(capsys, ckpt.print_step, str(run), False)
    assert files_below(run) == before
    assert text.startswith(f"{run / 'checkpoints' / '8'}: 2 arrays, 65.54 kB in memory, ")
    assert "by 1 process on data=2 fsdp=4, complete by rename" in text
    assert 'data position: {"row": 8}' in text and "jax " in text and "eval/avg_loss 2.5" in text
    assert re.search(r"^params/w +\[256, 64\] +float32 +65.54 kB +\[fsdp\]$", text, re.M)
    assert re.search(r"^params/same +\[3\] +bfloat16 +6 B +copied$", text, re.M)
    shown = json.loads(printed(capsys, ckpt.print_step, str(run / "checkpoints" / "4"), True))
    assert shown["data_state"] == {"row": 4} and shown["mesh"] == {"data": 2, "fsdp": 4}
    assert shown["arrays"]["params/w"]["sharding"] == [["fsdp"]] and shown["arrays"]["params/same"]["num_bytes"] == 6
    assert shown["arrays"]["params/w"]["shape"] == [256, 64] and shown["arrays"]["params/w"]["checksum"] > 0


def test_diff(run, capsys):
    first, second = (str(run / "checkpoints" / step) for step in ("2", "8"))
    before = files_below(run)
    assert printed(capsys, ckpt.print_diff, first, second, False).splitlines() == [
        "params/w: 16,384 of 16,384 values differ, by at most 6",
        "1 of 2 arrays of one shape have equal values",
        'data position: {"row": 2} -> {"row": 8}',
    ]
    assert files_below(run) == before
    shown = json.loads(printed(capsys, ckpt.print_diff, first, second, True))
    assert shown["values"] == [{"path": "params/w", "count": 16384, "total": 16384, "largest": 6.0, "not_finite": 0}]
    assert shown["equal"] == 1 and shown["data_state"] == [{"row": 2}, {"row": 8}] and shown["shapes"] == {}


def test_diff_of_other_arrays(run, tmp_path, capsys, tiny_config):
    other = tmp_path / "other"
    checkpointer = Checkpointer(other, tiny_config().checkpoint)
    params = {"w": jnp.zeros((4, 4)), "same": jnp.ones(3), "more": jnp.zeros(2, jnp.int8)}
    checkpointer.save(1, {"params": params}, {"row": 8})
    checkpointer.close()
    assert printed(capsys, ckpt.print_diff, str(run), str(other), False).splitlines() == [
        f"params/more: only in {other}, [2] int8",
        "params/w: shape [256, 64] -> [4, 4]",
        "params/same: dtype bfloat16 -> float32",
        "1 of 1 arrays of one shape have equal values",
    ]
    shown = json.loads(printed(capsys, ckpt.print_diff, str(other), str(run), True))
    assert shown["only_first"].keys() == {"params/more"} and shown["only_second"] == {}
    assert [leaf["shape"] for leaf in shown["shapes"]["params/w"]] == [[4, 4], [256, 64]]


def damage(folder, value):
    """Flips a bit of the values of params/w, which are all `value`."""
    raw = jnp.full(64, value, jnp.float32).tobytes()
    (path, content) = next((path, path.read_bytes()) for path in folder.rglob("d/*") if raw in path.read_bytes())
    changed = bytearray(content)
    changed[content.index(raw) + 2] ^= 8
    path.write_bytes(changed)


def test_verify(run, capsys):
    lines = printed(capsys, ckpt.verify, str(run), False).splitlines()
    assert [re.fullmatch(r"(\d): sound, 2 arrays, 65\.54 kB in \d+\.\d s", line)[1] for line in lines] == list("2468")
    rows = json.loads(printed(capsys, ckpt.verify, str(run / "checkpoints" / "6"), True))
    assert [row["problems"] for row in rows] == [[]] and rows[0]["folder"] == str(run / "checkpoints" / "6")


def test_verify_names_what_is_damaged_in_all_steps_and_exits_with_6(run, fork_maxlite):
    damage(run / "checkpoints" / "4", 4.0)
    (run / "checkpoints" / "6" / "iter" / "metadata").unlink()
    finished = fork_maxlite(["ckpt", "verify", str(run)])
    assert finished.code == 6, finished
    assert re.search(r"^4: not as it was saved", finished.stdout, re.M)
    assert re.search(r"^  params/w: (its values are not those that were saved|it can't be read)", finished.stdout, re.M)
    assert "iter/metadata is missing" in finished.stdout and "params/same" not in finished.stdout
    assert re.search(r"^8: sound", finished.stdout, re.M)
    assert "of 4 checkpoints" in finished.stderr and "not as they were saved: 4, 6." in finished.stderr
    with_json = fork_maxlite(["ckpt", "verify", str(run), "--json"])
    assert with_json.code == 6
    assert [bool(row["problems"]) for row in json.loads(with_json.stdout)] == [False, True, True, False]


def test_prune_by_the_keys_of_the_run_and_by_others(run, capsys):
    before = files_below(run)
    keys = ["max_num_checkpoints_to_keep=1", "checkpoint_keep_best=1"]
    text = printed(capsys, ckpt.prune, str(run), keys, dry_run=True, json_output=False)
    assert files_below(run) == before
    assert text.splitlines()[:2] == ["kept 4: best 1 by eval/avg_loss", "kept 8: newest"]
    assert re.search(r"^would remove 2, 6 \([\d.]+ kB\)$", text, re.M)
    shown = json.loads(printed(capsys, ckpt.prune, str(run), [], dry_run=False, json_output=True))
    assert shown["removed"] == [2, 4] and shown["kept"].keys() == {"6", "8"} and not shown["dry_run"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "8"]
    assert printed(capsys, ckpt.prune, str(run), [], dry_run=False, json_output=False).endswith("removed nothing\n")


def test_prune_leaves_alone_what_is_not_complete(run, capsys):
    (run / "checkpoints" / "2" / "iter" / "metadata").unlink()
    shutil.copytree(run / "checkpoints" / "8", run / "checkpoints" / "10.orbax-checkpoint-tmp")
    ckpt.prune(str(run), ["max_num_checkpoints_to_keep=1"], dry_run=False, json_output=False)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {"2", "8", "10.orbax-checkpoint-tmp"}


def test_prune_refuses_while_the_run_trains_and_keys_of_other_things(run):
    with pytest.raises(ConfigError, match="steps=4 says nothing of what is kept; the keys that do: max_num_"):
        ckpt.prune(str(run), ["steps=4"], dry_run=True, json_output=False)
    with pytest.raises(ConfigError, match="max_num_checkpoints_to_keep=0"):
        ckpt.prune(str(run), ["max_num_checkpoints_to_keep=0"], dry_run=True, json_output=False)
    with ckpt.RunDirectory(run.parent, run.name).lock(), pytest.raises(CheckpointError, match="is training in"):
        ckpt.prune(str(run), [], dry_run=False, json_output=False)
    assert len(list((run / "checkpoints").iterdir())) == 4
