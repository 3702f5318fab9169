"""Whole runs: the same losses on any mesh, exact resume, and what stops a run."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.load import load_config
from maxlite.errors import CheckpointError, ConfigError, NonFiniteLossError, OutOfMemoryError
from maxlite.train.run import run_train
from maxlite.train.setup import build_setup
from tests.conftest import TINY
from tests.train.conftest import config_in

SPLITS = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4)]
QUICK = {(2, 2, 2)}
GLOBAL_BATCH = (
    "steps=10",
    "eval_interval=0",
    "enable_checkpointing=false",
    "learning_rate=0.01",
    "learning_rate_schedule_steps=10",
    "attention=autoselected",
    "remat_policy=full",
)


def degrees(data: int, fsdp: int, tensor: int) -> tuple[str, ...]:
    names = ("ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism")
    return tuple(f"{name}={degree}" for name, degree in zip(names, (data, fsdp, tensor), strict=True))


@pytest.fixture(scope="module")
def one_device_losses(tiny_config, tmp_path_factory, logged, divisible):
    folder = tmp_path_factory.mktemp("one")
    overrides = (*divisible, *GLOBAL_BATCH, f"base_output_directory={folder}", "peak_tflops_per_device=1")
    return logged(run_train(tiny_config(*overrides, "cpu_devices=1", "per_device_batch_size=8")))


@pytest.mark.parametrize(
    "split", [pytest.param(s, marks=[] if s in QUICK else [pytest.mark.slow]) for s in SPLITS], ids=str
)
def test_every_split_of_eight_devices_gives_the_losses_of_one(train, one_device_losses, split, logged):
    losses = logged(train(*GLOBAL_BATCH, "cpu_devices=8", *degrees(*split)))
    assert losses.keys() == one_device_losses.keys()
    assert len(set(losses.values())) == 10
    for step, loss in losses.items():
        assert abs(loss - one_device_losses[step]) < 1e-5


def test_accumulation_on_a_mesh_gives_the_losses_of_one_device(train, one_device_losses, logged):
    losses = logged(train(*GLOBAL_BATCH, "cpu_devices=8", "gradient_accumulation_steps=2", *degrees(2, 2, 2)))
    assert losses.keys() == one_device_losses.keys()
    assert all(abs(loss - one_device_losses[step]) < 1e-5 for step, loss in losses.items())


def resumable(corpus) -> tuple[str, ...]:
    return (
        "dataset_type=text",
        f"dataset_path={corpus}",
        "vocab_size=264",
        "max_target_length=64",
        "eval_interval=3",
        "eval_steps=1",
        "log_period=1",
        "learning_rate=0.01",
        "learning_rate_schedule_steps=6",
        "warmup_steps_fraction=0.34",
        "per_device_batch_size=1",
        "cpu_devices=8",
        *degrees(1, 8, 1),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """Six steps on eight devices without a stop."""
    return run_train(config_in(tmp_path_factory.mktemp("whole"), "run_name=whole", "steps=6", *resumable(corpus)))


@pytest.fixture(scope="module")
def half(tmp_path_factory, corpus):
    """The first three of them."""
    return run_train(config_in(tmp_path_factory.mktemp("half"), "run_name=half", "steps=3", *resumable(corpus)))


@pytest.fixture
def copied(half, tmp_path):
    """copied(name): a copy of the run of three steps, to go on from."""
    return lambda name: shutil.copytree(half.run_directory, tmp_path / name)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(train, whole, copied, corpus, logged):
    copied("parts")
    parts = train("run_name=parts", "steps=6", *resumable(corpus))
    for tag in ("learning/loss", "learning/current_learning_rate", "learning/total_weights", "eval/avg_loss"):
        assert logged(whole, tag) == logged(parts, tag)
    assert list(logged(parts)) == [0, 1, 2, 3, 4, 5]
    for left, right in zip(_leaves(whole.params), _leaves(parts.params), strict=True):
        assert np.array_equal(left, right)


def test_a_run_resumes_on_other_meshes(train, whole, copied, corpus, logged):
    wanted = logged(whole)
    for name, mesh in (
        ("one", ("cpu_devices=1", "per_device_batch_size=8", *degrees(1, 1, 1))),
        ("mixed", ("cpu_devices=4", "per_device_batch_size=2", *degrees(1, 2, 2))),
    ):
        overrides = {text.partition("=")[0]: text for text in (*resumable(corpus), *mesh)}
        copied(name)
        result = train(f"run_name={name}", "steps=6", *overrides.values())
        losses = logged(result)
        assert all(abs(losses[step] - wanted[step]) < 1e-5 for step in wanted)
        (kernel,) = {leaf.sharding.mesh.size for leaf in _arrays(result.params)}
        assert kernel == int(overrides["cpu_devices"].partition("=")[2])


def test_a_finished_run_says_so_and_leaves_its_checkpoint_alone(train, copied, corpus, capsys):
    files = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in copied("done").rglob("*") if p.is_file()}
    again = train("run_name=done", "steps=3", *resumable(corpus))
    assert again.steps_done == 3
    assert "step 3 is reached already" in capsys.readouterr().out
    assert any("checkpoints" in path.parts for path in files)
    for path, (changed, content) in files.items():
        if "checkpoints" in path.parts:
            assert (path.stat().st_mtime_ns, path.read_bytes()) == (changed, content)


def test_load_parameters_path_starts_at_step_0_with_fresh_optimizer_and_data(train, half):
    keys = ("vocab_size=264", "eval_interval=0", "cpu_devices=8", f"load_parameters_path={half.run_directory}")
    second = train("run_name=second", "steps=1", *keys, "learning_rate=0")
    assert second.steps_done == 1
    for left, right in zip(_leaves(half.params), _leaves(second.params), strict=True):
        assert np.array_equal(left, right)
    with pytest.raises(CheckpointError, match="emb_dim|embedding/table"):
        train("run_name=third", "steps=1", *keys, "emb_dim=32")


def test_a_run_directory_of_another_model_is_refused(train, copied, corpus):
    copied("a")
    with pytest.raises(CheckpointError, match="(?s)mlp_dim: 64 in the run, 96 now.*run_name"):
        train("run_name=a", "steps=4", *resumable(corpus), "mlp_dim=96")


def test_what_is_not_finite_stops_the_run_and_is_never_saved(train, tmp_path, logged):
    overrides = ("opt_type=sgd", "learning_rate=1e38", "gradient_clipping_threshold=0", "warmup_steps_fraction=0")
    with pytest.raises(NonFiniteLossError, match=r"of step \d is (nan|inf)"):
        train("run_name=nan", "steps=5", "eval_interval=0", "checkpoint_period=1", *overrides)
    config = config_in(tmp_path, "opt_type=sgd")
    abstract = build_setup(config).abstract
    last = max(logged(tmp_path / "nan"))
    steps = [int(folder.name) for folder in (tmp_path / "nan" / "checkpoints").glob("*")]
    # A checkpoint after n steps comes after step n - 1 was found sound.
    assert all(step <= last for step in steps)
    for step in steps:
        state, _ = Checkpointer(tmp_path / "nan", config.checkpoint).restore(step, abstract)
        assert all(np.isfinite(leaf).all() for leaf in _leaves(state.params))


def test_too_little_memory_is_said_with_numbers_before_anything_is_made(train):
    with pytest.raises(OutOfMemoryError, match=r"GiB on each of 1 cpu.*smoke=true.*cpu_devices"):
        train("cpu_devices=1", "emb_dim=65536", "mlp_dim=262144", "num_decoder_layers=64")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("per_device_batch_size=0.3",), "is 2.4 rows"),
        (
            (
                "per_device_batch_size=0.75",
                "ici_data_parallelism=4",
                "ici_fsdp_parallelism=1",
                "ici_tensor_parallelism=2",
            ),
            "batch of 6 rows",
        ),
        (("gradient_accumulation_steps=2",), "gradient_accumulation_steps=2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_numbers(train, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train("cpu_devices=8", *overrides)


def test_the_data_may_end_before_the_steps_do(train, corpus, capsys):
    result = train(
        "run_name=short",
        "steps=500",
        "num_epoch=1",
        "eval_interval=0",
        "dataset_type=text",
        f"dataset_path={corpus}",
        "vocab_size=264",
        "cpu_devices=8",
    )
    assert 1 < result.steps_done < 500
    assert f"The data ended after 1 passes, at step {result.steps_done}" in capsys.readouterr().out


def test_a_save_and_the_last_evaluation_may_fall_on_the_same_step(train, corpus, logged, tmp_path):
    text = ("dataset_type=text", f"dataset_path={corpus}", "vocab_size=264", "cpu_devices=8", "eval_steps=1")
    result = train("run_name=even", "steps=4", "eval_interval=3", "checkpoint_period=2", *text)
    assert list(logged(result, "eval/avg_loss")) == [2, 3] and list(logged(result)) == [0, 1, 2, 3]
    ended = train("run_name=ended", "steps=500", "num_epoch=1", "eval_interval=400", "checkpoint_period=1", *text)
    lines = (ended.run_directory / "metrics" / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line)["step"] for line in lines if "eval/avg_loss" in line]
    assert evaluated == [ended.steps_done - 1]


def test_step_and_evaluation_compile_once(train, corpus):
    from jax import monitoring

    compiled = []

    def listen(event: str, seconds: float, **kwargs: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name", ""))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        # Seven held-out rows in batches of eight: the last batch of an evaluation is partial.
        train(
            "run_name=once",
            "steps=6",
            "dataset_type=text",
            f"dataset_path={corpus}",
            "vocab_size=264",
            "eval_interval=2",
            "eval_steps=-1",
            "cpu_devices=8",
            "eval_fraction=0.2",
            "emb_dim=72",
        )
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert sum("train_step" in name for name in compiled) == 1
    assert sum("eval_step" in name for name in compiled) == 1


def stopped_at(line_start: str, folder, environment) -> tuple[int, str]:
    """Starts an endless run, sends SIGTERM when it prints such a line, returns its exit code and standard error."""
    arguments = ["train", "base.yml", *TINY, "cpu_devices=1", "steps=100000", "log_period=1"]
    arguments += ["checkpoint_period=100000", f"base_output_directory={folder}", "run_name=stopped", "eval_interval=0"]
    entry = "import sys; from maxlite.launcher.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", entry, *arguments, "peak_tflops_per_device=1"],
        # The flags with which the tests' programs compile fast.
        env=environment | {"XLA_FLAGS": os.environ["XLA_FLAGS"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(line_start):
            process.send_signal(signal.SIGTERM)
            break
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, err


def test_a_stop_signal_saves_and_exits_with_75(tmp_path, process_environment, logged):
    code, err = stopped_at("completed step: 3", tmp_path, process_environment)
    assert code == 75 and "SIGTERM: saved step" in err
    (step,) = [int(folder.name) for folder in (tmp_path / "stopped" / "checkpoints").iterdir()]
    assert list(logged(tmp_path / "stopped")) == list(range(step))


def test_a_stop_signal_before_the_first_step_is_exit_75_too(tmp_path, process_environment):
    code, err = stopped_at("Run: ", tmp_path, process_environment)
    assert code == 75 and "SIGTERM" in err


def test_mfu_is_measured_on_fake_devices_too(train, corpus, logged):
    result = train(*resumable(corpus), "run_name=mfu", "steps=3", "eval_interval=0", "peak_tflops_per_device=auto")
    assert all(0 < mfu < 2 for mfu in logged(result, "perf/mfu").values())
    assert len(logged(result, "perf/mfu")) == 2


def test_a_run_with_checkpoints_does_not_begin_again_without_them(train, copied, corpus):
    copied("kept")
    with pytest.raises(CheckpointError, match="enable_checkpointing=false"):
        train("run_name=kept", "steps=4", *resumable(corpus), "enable_checkpointing=false")


def test_a_moved_run_directory_goes_on_where_it_is(copied, logged):
    moved = copied("elsewhere/there")
    result = run_train(load_config(str(moved), ["steps=4"], {}))
    assert result.run_directory == moved and list(logged(moved)) == [0, 1, 2, 3]


def test_programs_are_written_and_hold_no_full_logits(train):
    result = train(
        "run_name=dump",
        "steps=1",
        "eval_interval=0",
        "dump_hlo=true",
        "dump_jaxpr=true",
        "vocab_size=512",
        "num_vocab_tiling=4",
        "cpu_devices=1",
        "per_device_batch_size=2",
    )
    hlo = (result.run_directory / "hlo" / "train_step.txt").read_text()
    jaxpr = (result.run_directory / "jaxpr" / "train_step.txt").read_text()
    assert "HloModule" in hlo and "scan" in jaxpr
    assert "f32[2,32,512]" not in hlo.replace("{2,1,0}", "") and "f32[2,8,512]" in hlo
    assert "f32[2,32,512]" not in jaxpr and "f32[2,8,512]" in jaxpr


def test_the_saved_config_runs_again(half, tmp_path, logged):
    config = load_config(str(half.run_directory), [f"base_output_directory={tmp_path / 'again'}"], {})
    assert logged(run_train(config)) == logged(half)


def _arrays(params):
    import jax

    return jax.tree.leaves(params)


def _leaves(params):
    return [np.asarray(leaf) for leaf in _arrays(params)]
