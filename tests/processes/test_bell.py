import pytest

# What a process does that has met the others; `act` is up to the test. Each would live for a minute.
CODE = """
import os, signal, sys, time
from maxlite.errors import CheckpointError, DistributedError
from maxlite.processes.bell import hang_bell, is_hung, leave, leave_for
from maxlite.processes.roll_call import Place, call_roll
port, count, number = map(int, sys.argv[1:])
assert not is_hung()
hang_bell(number, call_roll(Place(f"127.0.0.1:{port}", count, number, 20), {}))
assert is_hung()
print("begun")
def act():
    ACT
act()
time.sleep(60)
"""


@pytest.mark.parametrize("who", [0, 1])
def test_the_others_end_with_the_code_of_the_one_that_leaves(run_processes, who):
    ended = run_processes(CODE.replace("ACT", f"if number == {who}: leave(6, 'no such file')"), 3)
    for number, (code, _, err) in enumerate(ended):
        assert code == 6
        assert err == ("error: no such file\n" if number == who else f"error: process {who} failed: no such file\n")


@pytest.mark.parametrize("who", [(0,), (1,), (1, 2)])
def test_who_is_killed_is_named(run_processes, who):
    ended = run_processes(CODE.replace("ACT", f"if number in {who}: os.kill(os.getpid(), signal.SIGKILL)"), 4)
    for number, (code, _, err) in enumerate(ended):
        if number in who:
            assert code == -9
        else:
            assert code == 8
            words = {(0,): "process 0 lost", (1,): "process 1 lost", (1, 2): "processes 1, 2 lost"}[who]
            assert err.startswith(f"error: {words}: killed, or the machine is gone")
            assert err.count("\n") == 1


def test_who_has_done_its_work_may_go(run_processes):
    # Process 0 goes first, then 1, and 2 still has a second's work.
    act = "time.sleep([0, 0.3, 1.3][number]); print('done'); sys.exit(0)"
    assert run_processes(CODE.replace("ACT", act), 3) == [(0, "begun\ndone\n", "")] * 3


@pytest.mark.parametrize(
    "error, code, line, trace",
    [
        ("CheckpointError('no space')", 6, "no space", False),
        ("KeyboardInterrupt()", 130, "interrupted", False),
        ("ZeroDivisionError('by 0')", 1, "ZeroDivisionError: by 0", True),
    ],
)
def test_what_nothing_caught(run_processes, error, code, line, trace):
    act = f"""if number == 1:
        try: raise {error}
        except BaseException as error: leave_for(error)"""
    first, second = run_processes(CODE.replace("ACT", act), 2)
    assert (first[0], second[0]) == (code, code)
    assert first[2] == f"error: process 1 failed: {line}\n"
    assert second[2].endswith(f"error: {line}\n")
    assert ("Traceback" in second[2]) == trace


def test_a_lost_process_is_named_rather_than_what_comes_of_it(run_processes):
    act = """if number == 1:
        time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    try: raise RuntimeError('connection closed by peer')
    except RuntimeError as error: leave_for(error)"""
    first, _ = run_processes(CODE.replace("ACT", act), 2)
    assert first[0] == 8
    assert first[2].startswith("error: process 1 lost") and "Traceback" not in first[2]


def test_one_process_just_ends(run_processes):
    code = "from maxlite.processes.bell import leave\nprint('begun')\nleave(9, 'no step')"
    assert run_processes(code, 1) == [(9, "begun\n", "error: no step\n")]
