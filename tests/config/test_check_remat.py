"""remat_policy=custom names tensors that the model has."""

import pytest

from maxlite.config.load import load_config
from maxlite.errors import ConfigError


def loaded(*overrides: str):
    return load_config("base.yml", ["smoke=true", *overrides], {})


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("llama3-8b", "moe_mlpwi_0"),
        ("llama3-8b", "gate_proj"),
        ("llama3-8b", "kv_wa_proj"),
        ("mixtral-8x7b", "mlpwi_0"),
        ("deepseek2-lite-16b", "query_wa_proj"),
    ],
)
@pytest.mark.parametrize("place", ["device", "offload"])
def test_a_tensor_that_the_model_lacks_is_refused(model: str, tensor: str, place: str):
    with pytest.raises(ConfigError, match=f"{tensor}={place}: no layer of this model .*query_proj.*{tensor}=remat"):
        loaded(f"model={model}", "remat_policy=custom", f"{tensor}={place}")


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("llama3-8b", "context"),
        ("mixtral-8x7b", "moe_mlpwi_0"),
        ("deepseek2-lite-16b", "mlpwi_0"),
        ("deepseek3-671b", "query_wa_proj"),
        ("qwen3-next-80b-a3b", "gate_proj"),
    ],
)
def test_a_tensor_that_it_has_is_not(model: str, tensor: str):
    config = loaded(f"model={model}", "remat_policy=custom", f"{tensor}=offload", "decoder_layer_input=offload")
    assert getattr(config.compute, tensor) == "offload"


def test_other_policies_ask_nothing():
    assert loaded("model=llama3-8b", "remat_policy=minimal", "moe_mlpwi_0=device").compute.remat_policy == "minimal"
