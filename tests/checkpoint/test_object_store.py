"""Checkpoints in a bucket: the protocol of Google Cloud Storage, spoken by an emulator on this machine."""

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxlite.checkpoint.place import file_sizes, is_bucket, place_of
from maxlite.errors import CheckpointError
from tests.checkpoint.attempts import COUNT_EVENTS, Attempts, Chain, kills, serving
from tests.checkpoint.gcs_emulator import BUCKET

EMULATOR = Path(__file__).with_name("gcs_emulator.py")
COMMIT_MARK = "commit_success.txt"


@pytest.fixture(scope="module")
def bucket_environment(process_environment) -> Iterator[dict[str, str]]:
    """What a process needs to take the emulator for the storage of Google Cloud."""
    command = [sys.executable, "-P", str(EMULATOR)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=process_environment, stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as emulator:
        assert emulator.stdout is not None
        url = f"http://127.0.0.1:{int(emulator.stdout.readline())}"
        yield {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "none",
        }
        emulator.kill()


class BucketAttempts(Attempts):
    """Attempts at a run whose checkpoints lie in the bucket."""

    def listing(self) -> list[str]:
        objects = list_objects(self.environment["STORAGE_EMULATOR_HOST"], self.run.removeprefix(f"gs://{BUCKET}/"))
        steps = {name.split("/")[2] for name in objects if name.split("/")[1] == "checkpoints"}
        whole = {step for step in steps if f"run/checkpoints/{step}/{COMMIT_MARK}" in objects}
        return sorted(step if step in whole else f"{step}.uncommitted" for step in steps)


def list_objects(url: str, prefix: str) -> list[str]:
    """The names of the objects below a prefix, as the server itself has them."""
    query = urllib.parse.urlencode({"prefix": f"{prefix}/", "maxResults": 10_000})
    with urllib.request.urlopen(f"{url}/storage/v1/b/{BUCKET}/o?{query}") as answer:
        return [entry["name"] for entry in json.load(answer).get("items", [])]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_killed_saves_to_a_bucket_lose_nothing(process_environment, bucket_environment, tmp_path):
    with serving(process_environment) as server:
        place = f"gs://{BUCKET}"
        chain = Chain(BucketAttempts(server, place, outputs=tmp_path, environment=bucket_environment))  # type: ignore
        assert chain.attempt(1).codes == [0]
        whole = chain.attempt(3, **COUNT_EVENTS)
        assert whole.codes == [0], whole
        for kill in kills(whole, 12, 1, seed=3):
            # Reads and writes go to the server, and are no operations on files here.
            kill.pop("at_event", None)
            chain.attempt(3, **{"at_second": 0.5, "after": '{"saving"'} | kill)
        assert chain.attempt(2).codes == [0]
    assert chain.attempts.listing() == sorted([str(chain.durable - 1), str(chain.durable)])
    assert chain.kills >= 9 and chain.skips >= 3, (chain.kills, chain.skips)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_run_keeps_its_checkpoints_in_a_bucket(run_maxlite, bucket_environment, tmp_path):
    sizes = ["smoke=true", "dataset_type=synthetic", "eval_interval=0", "peak_tflops_per_device=1", "cpu_devices=2"]
    train = ["train", "base.yml", *sizes, "checkpoint_period=2", "max_num_checkpoints_to_keep=2"]
    train += [f"base_output_directory={tmp_path}", "run_name=kept"]
    in_bucket = f"checkpoint_directory=gs://{BUCKET}/runs"

    def done(*arguments: str) -> str:
        ended = run_maxlite(arguments, tmp_path, bucket_environment)
        assert ended.code == 0, ended
        return ended.stdout

    def steps() -> set[str]:
        objects = list_objects(bucket_environment["STORAGE_EMULATOR_HOST"], "runs/kept")
        found = {name.split("/")[3] for name in objects}
        files = {f"runs/kept/checkpoints/{step}/{name}" for step in found for name in (COMMIT_MARK, "files.json")}
        assert files <= {*objects}, "there is a step that is not whole"
        return found

    done(*train, in_bucket, "steps=4")
    assert not (tmp_path / "kept" / "checkpoints").exists()
    assert steps() == {"2", "4"}
    assert "Resumed at step 4" in done(*train, in_bucket, "steps=6")
    assert steps() == {"4", "6"}
    # Its parameters are found by the run's folder, which says where they lie, and by their URL.
    for place in (tmp_path / "kept", f"gs://{BUCKET}/runs/kept/checkpoints/4"):
        other = ["train", "base.yml", *sizes, "steps=1", "enable_checkpointing=false", f"load_parameters_path={place}"]
        done(*other, f"base_output_directory={tmp_path}/other")
    for place in (str(tmp_path / "kept"), f"gs://{BUCKET}/runs/kept"):
        listed = json.loads(done("ckpt", "ls", place, "--json"))
        assert [entry["step"] for entry in listed] == [4, 6]
        assert {entry["atomicity"] for entry in listed} == {"commit_file"}
        assert all(entry["num_bytes"] > 100_000 for entry in listed)
        assert done("ckpt", "verify", place).count(": sound, ") == 2
    # A run does not begin again because it looks elsewhere.
    ended = run_maxlite([*train, "steps=8"], tmp_path, bucket_environment)
    assert ended.code == CheckpointError.exit_code and f"gs://{BUCKET}/runs/kept/checkpoints" in ended.stderr


def test_a_bucket_that_is_not_there_is_said(fork_maxlite, bucket_environment, tmp_path):
    arguments = ["ckpt", "show", "gs://no-such-bucket/run"]
    ended = fork_maxlite(arguments, tmp_path, bucket_environment)
    assert ended.code == CheckpointError.exit_code, ended
    assert "gs://no-such-bucket/run" in ended.stderr and "Traceback" not in ended.stderr


def test_other_urls_are_refused():
    with pytest.raises(CheckpointError, match="s3://bucket/run.*gs://"):
        place_of("s3://bucket/run")


def test_a_folder_is_a_plain_path(tmp_path):
    place = place_of(str(tmp_path))
    assert place == tmp_path and not is_bucket(place)
    assert file_sizes(tmp_path / "nothing") == {}
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("four")
    assert file_sizes(tmp_path / "a") == {"b/c": 4}
