import pytest

from maxlite.config.check_remat import remat_tensors
from maxlite.config.layers import layer_specs
from maxlite.config.load import load_config, model_names
from maxlite.estimate.fixes import HOST_BANDWIDTH, Need, cheapest_fixes, kept_bytes, tensor_widths
from maxlite.train.setup import build_setup
from maxlite.train.state import device_bytes

# Far too little, so that every fix saves a share that counts.
NEED = Need(needed=10_000_000, available=9_500_000, temporaries=8_000_000, compute=1.0, gather=0.01)


@pytest.fixture
def fixes(tiny_config):
    def of(*overrides, need=NEED):
        config = tiny_config("peak_tflops_per_device=1", "cpu_devices=8", *overrides)
        setup = build_setup(config)
        return config, setup, {fix.keys.partition("=")[0]: fix for fix in cheapest_fixes(config, setup, need)}

    return of


def test_the_cheapest_come_first_and_three_are_enough(fixes):
    copied = ("remat_policy=minimal", "ici_data_parallelism=8", "ici_fsdp_parallelism=1")
    _, setup, found = fixes(*copied, need=NEED._replace(gather=1e-9))
    assert list(found)[:2] == ["mu_dtype", "shard_optimizer_over_data"] and len(found) == 3
    seconds = [fix.seconds for fix in found.values()]
    assert seconds == sorted(seconds)
    moments = device_bytes(setup.abstract.opt_state)
    assert found["mu_dtype"].saves == pytest.approx(moments / 4, rel=1e-3)
    assert found["shard_optimizer_over_data"].saves == pytest.approx(moments * 7 / 8)


def test_what_is_done_already_is_not_offered(fixes):
    _, _, found = fixes("mu_dtype=bfloat16", "optimizer_memory_host_offload=true", "remat_policy=full")
    assert not {"mu_dtype", "optimizer_memory_host_offload", "remat_policy", "shard_optimizer_over_data"} & set(found)


def test_offload_costs_the_way_to_the_host_and_back(fixes):
    _, setup, found = fixes("mu_dtype=bfloat16", "remat_policy=full")
    fix = found["optimizer_memory_host_offload"]
    assert fix.seconds == pytest.approx(2 * device_bytes(setup.abstract.opt_state) / HOST_BANDWIDTH)


def test_a_fix_that_saves_next_to_nothing_is_none(fixes):
    _, _, found = fixes(need=NEED._replace(needed=1e12))
    assert found == {}


def test_what_a_policy_keeps(fixes):
    config, setup, _ = fixes("remat_policy=save_qkv_proj", "per_device_batch_size=2")
    # Of each token and layer: 4 heads of queries, 2 of keys, 2 of values, of 16 numbers in float32; 2 rows of 32.
    assert kept_bytes(config, setup) == 2 * 32 * 2 * (4 + 2 + 2) * 16 * 4
    widths = tensor_widths(config.model, layer_specs(config.model)[0])
    assert widths["mlpwi_0"] == config.model.mlp_dim and widths["out_proj"] == config.model.emb_dim


@pytest.mark.parametrize("name", ["default", *model_names()])
def test_every_tensor_that_a_policy_can_keep_has_a_width(name):
    model = load_config("base.yml", [f"model={name}", "smoke=true"], {}).model
    widths = [tensor_widths(model, spec) for spec in layer_specs(model)]
    assert {key for row in widths for key in row} == set(remat_tensors(model))
    assert all(width > 0 for row in widths for width in row.values())


def test_widths_of_other_mixers_and_of_experts():
    model = load_config("base.yml", ["model=qwen3-next-80b-a3b"], {}).model
    delta, full = (next(s for s in layer_specs(model) if s.attention == kind) for kind in ("gated_delta_net", "full"))
    widths = tensor_widths(model, delta)
    assert (widths["query_proj"], widths["value_proj"], widths["gate_proj"]) == (16 * 128, 32 * 128, 32 * 128 + 2 * 32)
    assert tensor_widths(model, full)["gate_proj"] == 16 * 256
    assert (widths["mlpwi_0"], widths["moe_mlpwi_0"], widths["moe_mlpwo"]) == (512, 10 * 512, 10 * 2048)
    model = load_config("base.yml", ["model=deepseek3-671b"], {}).model
    widths = tensor_widths(model, layer_specs(model)[-1])
    assert (widths["query_wa_proj"], widths["kv_wa_proj"]) == (1536, 512 + 64)
    assert (widths["query_proj"], widths["context"]) == (128 * 192, 128 * 128)
