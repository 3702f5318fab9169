import json

import jax
import numpy as np
import pytest

from maxlite.errors import CheckpointError, ConfigError
from maxlite.processes import group

# Each process prints, on standard error, a line of JSON of what it saw.
CODE = """
import json, os, sys
import jax, numpy
from maxlite.config.load import load_config
from maxlite.errors import CheckpointError, DataError, DistributedError
from maxlite.parallel.devices import host_value, prepare_jax, run_devices
from maxlite.processes import group
port, count, number = map(int, sys.argv[1:])
keys = [f"num_processes={count}", f"process_id={number}", f"coordinator_address=127.0.0.1:{port}"]
config = load_config("base.yml", [*keys, "cpu_devices=2", "jax_cache_dir=null"], {})
prepare_jax(config)
prepare_jax(config)

def caught(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def fail(error):
    raise error

def differ():
    return fail(CheckpointError(f"of {number}")) if number else number

agreement, other = group.Agreement("loop"), group.Agreement("loop")
seen = {
    "place": [group.process_index(), group.num_processes(), group.is_primary(), group.is_joined()],
    "devices": [device.process_index for device in run_devices(config.run)],
    "primary": [group.on_primary("a", lambda: {"number": number, "pair": (1, 2)}) for _ in range(2)],
    "primary fails": caught(lambda: group.on_primary("a", lambda: fail(DataError("no rows")))),
    "primary breaks": caught(lambda: group.on_primary("a", lambda: fail(KeyError("k")))),
    "together": group.together("b", lambda: number),
    "together fails": caught(lambda: group.together("b", differ)),
    "together breaks": caught(lambda: group.together("b", lambda: fail(KeyError("k")) if number else 0)),
    "exchange": group.exchange("c", f"text {number}"),
    "before": agreement.step_of("stop"),
}
group.wait_for_all("d")
if number == 1:
    agreement.announce("stop", 7)
group.wait_for_all("d")
if number == 0:
    agreement.announce("stop", 9)
group.wait_for_all("d")
seen["agreed"] = [agreement.step_of("stop"), agreement.step_of("save"), other.step_of("stop")]
mesh = jax.sharding.Mesh(run_devices(config.run), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
array = jax.make_array_from_callback((8,), sharding, lambda at: numpy.arange(8)[at])
seen["value"] = host_value(array).tolist()
seen["sum"] = host_value(jax.jit(lambda x: x.sum())(array)).tolist()
print(f"out of {number}")
print(json.dumps(seen), file=sys.stderr)
"""


def test_two_processes(run_processes):
    ended = run_processes(CODE, 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    # Only process 0 has an output, and gloo's lines are not in it.
    assert [out for _, out, _ in ended] == ["out of 0\n", ""]
    for number, (_, _, err) in enumerate(ended):
        place, line = err.splitlines()
        assert place.startswith(f"Process {number} of 2 (keys), coordinator 127.0.0.1:")
        assert place.endswith(", 2 of 4 cpu devices")
        seen = json.loads(line)
        assert seen == {
            "place": [number, 2, number == 0, True],
            "devices": [0, 0, 1, 1],
            "primary": [{"number": 0, "pair": [1, 2]}] * 2,
            "primary fails": "DataError: no rows",
            "primary breaks": "DistributedError: process 0 failed at a: KeyError: 'k'" if number else "KeyError: 'k'",
            "together": number,
            "together fails": "CheckpointError: of 1",
            "together breaks": "KeyError: 'k'" if number else "DistributedError: process 1 failed at b: KeyError: 'k'",
            "exchange": ["text 0", "text 1"],
            "before": None,
            "agreed": [7, None, None],
            "value": list(range(8)),
            "sum": 28,
        }


def test_one_process_just_calls():
    assert (group.process_index(), group.num_processes(), group.is_primary(), group.is_joined()) == (0, 1, True, False)
    assert group.on_primary("a", lambda: {"pair": (1, 2)}) == {"pair": [1, 2]}
    array = np.arange(3)
    assert group.together("a", lambda: array) is array
    assert group.exchange("a", "text") == ["text"]
    group.wait_for_all("a")
    for call in (group.on_primary, group.together):
        with pytest.raises(CheckpointError, match="mine"):
            call("a", lambda: _fail(CheckpointError("mine")))


def test_one_process_agrees_with_itself():
    agreement = group.Agreement("loop")
    assert agreement.step_of("stop") is None
    agreement.announce("stop", 5)
    agreement.announce("stop", 6)
    assert (agreement.step_of("stop"), agreement.step_of("save")) == (5, None)
    assert group.Agreement("loop").step_of("stop") is None


def test_what_is_no_json_is_refused_on_one_process_too():
    with pytest.raises(TypeError):
        group.on_primary("a", lambda: jax.numpy.zeros(1))


def _fail(error):
    raise error


def test_a_command_of_one_process_is_refused_in_several(monkeypatch):
    group.require_one_process("convert-hf")
    monkeypatch.setattr(group, "num_processes", lambda: 2)
    with pytest.raises(ConfigError, match="convert-hf runs in one process, and 2 were started"):
        group.require_one_process("convert-hf")
