"""Real processes that save and restore together, and on another number of processes."""

import json
import socket
from pathlib import Path

import pytest

from tests import forks

WORKER = Path(__file__).with_name("two_processes.py")


@pytest.fixture
def together(process_environment):
    """together(run, *actions, count): what each process printed for each action."""

    def start(run, *actions, count=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = [[coordinator, str(count), str(process), str(run), *actions] for process in range(count)]
        ended = forks.run_programs(WORKER.read_text(), arguments, process_environment, timeout=150)
        assert [process.code for process in ended] == [0] * count, "\n".join(process.stderr for process in ended)
        # Other lines are of gloo.
        printed = [[line for line in stdout.splitlines() if line.startswith("{")] for _, stdout, _ in ended]
        return [[json.loads(line) for line in lines] for lines in printed]

    return start


def test_two_processes_save_and_any_number_restore(together, run):
    first, second = together(run, "save:1,2,3", "restore")
    assert first == second
    saved, restored = first
    assert saved == {"latest": 3, "skipped": []}
    assert restored["position"] == {"position": 3}
    assert restored["report"]["cast"] == {"params/a": ["float32", "bfloat16"]}
    assert len(restored["report"]["restored"]) == 6 and restored["report"]["not_used"] == []
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["2", "3"]
    # One manifest, of the parts that both wrote; what is copied is written once, half by each.
    items = run / "checkpoints" / "3" / "items"
    assert (items / "manifest.ocdbt").is_file()
    sizes = [sum(path.stat().st_size for path in items.glob(f"ocdbt.process_{k}/d/*")) for k in range(2)]
    assert max(sizes) < 1.2 * min(sizes)

    ((alone,),) = together(run, "restore", count=1)
    assert alone["step"] == 3


@pytest.mark.slow
def test_two_processes_restore_what_one_saved(together, run):
    together(run, "save:5", count=1)
    first, second = together(run, "restore")
    assert first == second and first[0]["step"] == 5


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_processes_fail_together_and_earlier_steps_stay(together, run, failing):
    first, second = together(run, "save:3", f"fail:{failing}", "restore")
    assert first[1:] == second[1:]
    assert "saving step 9" in first[1]["failure"] and "newest complete checkpoint is 3" in first[1]["failure"]
    assert "File too large" in first[1]["failure"] or "OUT_OF_RANGE" in first[1]["failure"]
    assert first[1]["latest"] == first[2]["step"] == 3


@pytest.mark.slow
def test_damage_is_an_error_on_all(together, run):
    together(run, "save:3", count=1)
    chunks = max((run / "checkpoints").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(chunks.read_bytes())
    content[len(content) // 2] ^= 1
    chunks.write_bytes(content)
    first, second = together(run, "restore")
    assert first == second
    assert "step 3 can't be read: the values of " in first[0]["error"]
