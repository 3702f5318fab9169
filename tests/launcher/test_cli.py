"""The command line as a user meets it: exit codes, one clear error, no traceback, nothing lost."""

import json

import pytest

SMALL = ("smoke=true", "steps=2", "peak_tflops_per_device=1", "log_period=1", "max_new_tokens=8")


def fails(finished, code: int, *words: str) -> None:
    assert finished.code == code, finished.stderr
    assert "Traceback" not in finished.stderr
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, finished.stderr
    for word in words:
        assert word in finished.stderr, finished.stderr


@pytest.fixture(scope="module")
def trained(fork_maxlite, tmp_path_factory):
    """A folder that holds a finished small run, runs/default, and its output."""
    folder = tmp_path_factory.mktemp("trained")
    finished = fork_maxlite(["train", "base.yml", *SMALL], cwd=folder)
    assert finished.code == 0, finished.stderr
    return folder, finished


def test_a_run_writes_its_directory_and_says_how_to_go_on(trained):
    folder, finished = trained
    run = folder / "runs" / "default"
    assert {path.name for path in run.iterdir()} >= {"config.yml", "checkpoints", "metrics", "tensorboard"}
    assert {path.name for path in (run / "checkpoints" / "2").iterdir()} >= {"items", "iter"}
    lines = finished.stdout.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("completed step: 0,")]
    assert first <= 25
    assert lines[0].startswith("Run: ") and any(line.startswith("Num_devices: 1") for line in lines)
    assert "maxlite decode runs/default" in finished.stdout and "Sample" in finished.stdout
    assert "Completed eval after train step 1" in finished.stdout
    assert finished.stderr == ""


def test_the_same_command_again_has_nothing_to_do(trained, run_maxlite):
    # In an interpreter that begins with nothing imported.
    folder, _ = trained
    again = run_maxlite(["train", "base.yml", *SMALL], cwd=folder)
    assert again.code == 0 and "step 2 is reached already" in again.stdout and "steps=4" in again.stdout


def test_decode_prints_json_only(trained, fork_maxlite):
    folder, _ = trained
    finished = fork_maxlite(
        ["decode", "runs/default", "--json", "prompt_ids=5,9;7,8,9", "max_new_tokens=4", "ignore_eos=true"], cwd=folder
    )
    assert finished.code == 0, finished.stderr
    rows = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [row["prompt_ids"] for row in rows] == [[5, 9], [7, 8, 9]]
    assert all(len(row["ids"]) == 4 and row["finish_reason"] == "length" for row in rows)
    assert "tokens/s" in finished.stderr


def test_a_prompt_longer_than_the_cache_is_refused_with_both_numbers(trained, fork_maxlite):
    folder, _ = trained
    finished = fork_maxlite(
        ["decode", "runs/default", "prompt_ids=1,2,3,4,5,6,7,8,9", "max_target_length=8", "max_new_tokens=0"],
        cwd=folder,
    )
    fails(finished, 2, "9", "max_target_length=8")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "base.yml", "learning_rat=1"], 2, ["did you mean learning_rate?"]),
        (["train", "base.yml", "--steps=5"], 2, ["write steps=5, without dashes"]),
        (["train", "nowhere.yml"], 2, ["nowhere.yml", "no such YAML file"]),
        (["train", "base.yml", "model=llama3-8"], 2, ["no model YAML llama3-8", "llama3-8b"]),
        (["train", "base.yml", "ici_fsdp_parallelism=3", "cpu_devices=8"], 2, ["3", "8 devices", "smoke=true"]),
        (
            ["train", "base.yml", "model=llama3-8b", "ici_fsdp_parallelism=8"],
            2,
            ["ici_fsdp_parallelism=8", "1 devices", "smoke=true", "cpu_devices=8"],
        ),
        (["train", "base.yml", "model=llama3.1-405b"], 4, ["GiB", "smoke=true", "cpu_devices"]),
        (["train", "base.yml", "emb_dim=60", "cpu_devices=8"], 2, ["embed", "60", "fsdp=8"]),
        (["train", "base.yml", "num_kv_heads=4", "cpu_devices=8", "ici_tensor_parallelism=8"], 2, ["num_kv_heads"]),
        (["train", "base.yml", "dataset_path=nowhere"], 3, ["nowhere"]),
        (["decode", "base.yml"], 2, ["load_parameters_path"]),
        (["decode", "nowhere"], 2, ["nowhere"]),
        (["models", "show", "llama9"], 2, ["no model YAML llama9"]),
        (["config", "diff", "base.yml"], 2, ["config diff"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value else str(value),
)
def test_bad_input_is_one_clear_error(fork_maxlite, tmp_path, arguments, code, words):
    fails(fork_maxlite(arguments, cwd=tmp_path), code, *words)
    assert not list(tmp_path.glob("runs/*/checkpoints"))


def test_a_folder_without_text_is_a_data_error(fork_maxlite, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.bin").write_bytes(b"\0\1\2" * 100)
    fails(fork_maxlite(["train", "base.yml", "dataset_path=folder"], cwd=tmp_path), 3, "folder")


def test_a_yaml_from_a_stranger_runs_nothing(fork_maxlite, tmp_path):
    (tmp_path / "evil.yml").write_text("run_name: !!python/object/apply:os.system ['touch touched']\n")
    fails(fork_maxlite(["train", "evil.yml"], cwd=tmp_path), 2, "evil.yml:1", "tag")
    assert not (tmp_path / "touched").exists()


def test_a_damaged_checkpoint_names_its_file_and_the_way_on(trained, fork_maxlite, tmp_path):
    import shutil

    folder, _ = trained
    shutil.copytree(folder / "runs", tmp_path / "runs")
    step = tmp_path / "runs" / "default" / "checkpoints" / "2"
    largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    longer = [text for text in SMALL if text != "steps=2"]
    fails(fork_maxlite(["train", "base.yml", *longer, "steps=3"], cwd=tmp_path), 6, largest.name, "2")
    fails(fork_maxlite(["decode", "runs/default"], cwd=tmp_path), 6, largest.name)


def test_a_run_directory_of_another_model_is_refused(trained, fork_maxlite):
    folder, _ = trained
    fails(fork_maxlite(["train", "base.yml", *SMALL, "mlp_dim=256"], cwd=folder), 6, "mlp_dim: 128 in the run, 256 now")


def test_help_is_complete_and_imports_nothing_heavy(run_maxlite, process_environment):
    import subprocess
    import sys

    finished = run_maxlite(["--help"])
    assert finished.code == 0 and all(name in finished.stdout for name in ("train", "decode", "config", "models"))
    program = (
        "import sys; sys.argv = ['maxlite', '--help']\n"
        "from maxlite.launcher.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('jax', 'numpy', 'omegaconf', 'flax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=process_environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_models_lists_every_yaml_with_its_count(fork_maxlite):
    rows = json.loads(fork_maxlite(["models", "--json"]).stdout)
    counts = {row["model"]: row["num_parameters"] for row in rows}
    assert counts["llama3-8b"] == 8_030_261_248 and counts["llama3.2-1b"] == 1_235_814_400
    shown = fork_maxlite(["models", "show", "llama2-7b"]).stdout
    assert "num_parameters: 6,738,415,616" in shown and "num_active_parameters: 6,738,415,616" in shown


def test_config_shows_values_and_sources(fork_maxlite):
    rows = json.loads(
        fork_maxlite(
            ["config", "base.yml", "model=llama3-8b", "steps=7", "cpu_devices=8", "--json"],
            env={"MAXLITE_LOG_PERIOD": "3"},
        ).stdout
    )
    assert rows["steps"] == {"value": 7, "source": "command line"}
    assert rows["log_period"] == {"value": 3, "source": "environment MAXLITE_LOG_PERIOD"}
    assert rows["emb_dim"]["value"] == 4096 and rows["emb_dim"]["source"].startswith("models/llama3-8b.yml:")
    assert rows["ici_fsdp_parallelism"]["value"] == 8
    assert rows["run_name"]["value"] is None


def test_config_diff_names_what_differs(fork_maxlite, tmp_path):
    (tmp_path / "mine.yml").write_text("steps: 5\n")
    finished = fork_maxlite(["config", "diff", "base.yml", "mine.yml"], cwd=tmp_path)
    assert finished.stdout.strip().endswith("-> 5") and finished.stdout.startswith("steps: ")
    assert fork_maxlite(["config", "diff", "base.yml", "base.yml"], cwd=tmp_path).stdout.strip() == "no difference"
