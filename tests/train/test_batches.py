"""Rows of several lengths: how batches of them lie on a mesh, and whole runs with buckets."""

import numpy as np
import pytest

from maxlite.data.batch import Batch
from maxlite.errors import ConfigError
from maxlite.metrics.flops import train_step_flops
from maxlite.train.setup import build_setup

BUCKETS = ("packing=false", "padding_buckets=16,32", "max_target_length=64")
TEXT = ("dataset_type=text", "vocab_size=264")


def test_each_length_has_its_own_order_on_the_mesh(tiny_config):
    keys = ("cpu_devices=4", "ici_context_parallelism=4", "padding_buckets=8,16", "packing=false")
    setup = build_setup(tiny_config(*keys, *TEXT, "per_device_batch_size=0.25"))
    assert setup.batches.lengths == (8, 16, 32)
    for length in setup.batches.lengths:
        row = np.arange(length, dtype=np.int32)[None]
        placed = setup.place(Batch(row, row, row.astype(np.float32), row, row))
        assert placed.source_ids is None
        found = [np.asarray(shard.data)[0] for shard in placed.inputs.addressable_shards]
        # Each device has a run from the front and its mirror image from the back of the row.
        assert sorted(np.concatenate(found).tolist()) == list(range(length))
        assert all(set(part.tolist()) == set((length - 1 - part).tolist()) for part in found)


def test_a_bucket_that_the_mesh_does_not_cut_is_refused_before_compiling(tiny_config):
    keys = ("cpu_devices=4", "ici_context_parallelism=4", "padding_buckets=12,16", "packing=false")
    with pytest.raises(ConfigError, match="length 12 of padding_buckets.*context=4.*8 equal parts"):
        build_setup(tiny_config(*keys, *TEXT))


def test_a_compiled_step_of_one_length_is_refused(tiny_config):
    with pytest.raises(ConfigError, match="compiled_trainstep_file=x.*padding_buckets=16,32"):
        build_setup(tiny_config("cpu_devices=1", *TEXT, *BUCKETS, "compiled_trainstep_file=x"))


def test_a_run_compiles_once_a_length_and_warns_of_none(train, corpus, capsys, logged):
    keys = ("cpu_devices=1", "per_device_batch_size=4", f"dataset_path={corpus}", "steps=14", "eval_interval=7")
    keys = (*keys, "eval_fraction=0.4", "packing=false", "padding_buckets=32", "max_target_length=64")
    result = train(*TEXT, *keys, "eval_steps=-1", "enable_checkpointing=false", "run_name=buckets")
    assert result.setup.train_step._cache_size() == result.setup.eval_step._cache_size() == 2
    output = capsys.readouterr().out
    assert "compiled again" not in output
    compiled = [line for line in output.splitlines() if line.startswith("compiled train_step of rows of ")]
    assert len(compiled) == result.setup.train_step._cache_size()
    flops = {train_step_flops(result.setup.model.config, 4, length).total / 1e12 for length in (32, 64)}
    assert set(logged(result, "perf/per_device_tflops").values()) <= flops
    # A corpus of short documents is no more than half padding in the rows that were counted.
    assert all(0 < share <= 1 for share in logged(result, "data/packing_efficiency").values())
