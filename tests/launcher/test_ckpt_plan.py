"""The plan of a config: a state that training would have, on processes that are not there."""

import json
import re

import jax
import pytest

from maxlite.errors import ConfigError
from maxlite.launcher import ckpt_plan
from maxlite.train.setup import build_setup

MESH = ("cpu_devices=4", "ici_data_parallelism=2", "ici_fsdp_parallelism=4", "jax_cache_dir=null")


@pytest.fixture
def plan(tiny_config):
    return lambda *keys: tiny_config(*ckpt_plan.take_processes(keys))


def test_json_has_every_piece_of_every_array_of_the_state(plan, tiny_config, capsys):
    ckpt_plan.print_plan(plan(*MESH, "processes=2"), True)
    shown = json.loads(capsys.readouterr().out)
    one_process = tiny_config(*MESH[1:], "cpu_devices=8")
    state = build_setup(one_process, devices=jax.devices()).abstract
    leaves = jax.tree.leaves(state)
    assert len(shown["leaves"]) == len(leaves)
    assert shown["num_bytes"] == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    by_process = [0, 0]
    for leaf in shown["leaves"].values():
        assert sum(piece["num_bytes"] for piece in leaf["pieces"]) == leaf["num_bytes"]
        for piece in leaf["pieces"]:
            by_process[piece["process"]] += piece["num_bytes"]
    assert shown["num_processes"] == 2 and shown["bytes_of_processes"] == by_process
    assert (shown["most_bytes"], shown["least_bytes"]) == (max(by_process), min(by_process))
    # Copies on the data axis share the work, and the data axis is what separates the two.
    assert shown["most_bytes"] < 1.01 * shown["least_bytes"]
    assert shown["leaves"]["step"]["pieces"] == [{"process": 0, "region": [], "num_bytes": 4}]


def test_the_table_for_people(plan, capsys):
    ckpt_plan.print_plan(plan(*MESH, "processes=2"), False)
    head, processes, arrays = capsys.readouterr().out.split("\n\n")
    assert re.fullmatch(r"2 processes: \d+ arrays, .* kB; the most .*, the least .*, most/least 1", head)
    assert [line.split()[0] for line in processes.splitlines()] == ["process", "0", "1"]
    assert re.search(r"^params/embedding/table +\[64, 64\] +float32 +16.38 kB +8 of \[\d+, \d+\] +0-1 ", arrays, re.M)
    assert re.search(r"^step +\[\] +int32 +4 B +1 of \[\] +0 +4 B$", arrays, re.M)


def test_one_process_without_the_key(plan, capsys):
    ckpt_plan.print_plan(plan("cpu_devices=8", "jax_cache_dir=null"), False)
    assert re.match(r"1 process: \d+ arrays, [\d.]+ kB$", capsys.readouterr().out.splitlines()[0])


def test_processes_that_do_not_divide_the_devices(plan):
    with pytest.raises(ConfigError, match="num_processes=3 does not divide the 8 devices"):
        ckpt_plan.build_plan(plan("processes=3", "jax_cache_dir=null"))
    for text in ("processes=0", "processes=two", "processes=-1", "processes="):
        with pytest.raises(ConfigError, match=f"^{text} is not a whole number, 1 or more"):
            plan(text)


@pytest.mark.tpu
def test_hosts_of_a_topology_are_processes(plan):
    keys = ("compile_topology=v5e-16", "ici_fsdp_parallelism=16")
    leaves, num_processes = ckpt_plan.build_plan(plan(*keys))
    assert num_processes == 4
    assert all(sorted(leaf.bytes_of()) in ([0], [0, 1, 2, 3]) for leaf in leaves.values())
    with pytest.raises(ConfigError, match="num_processes=2, but compile_topology=v5e-16 has 4 hosts"):
        ckpt_plan.build_plan(plan(*keys, "processes=2"))
