import dataclasses
from pathlib import Path

import numpy as np
import pytest

from maxlite.errors import ConversionError
from maxlite.hf.plan import Row, Skipped, check_tensors, explain, natural_order, plan_tensors
from maxlite.hf.rules import Rule
from maxlite.hf.source import StoredTensor
from maxlite.hf.transforms import same
from tests.hf.tiny_tree import PLACES, TABLE, abstract_params, by_hand, random_params, tiny_plan


class Arrays:
    """A source in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.place, self._arrays = Path("folder"), arrays
        file = Path("folder/model.safetensors")
        self.tensors = {
            name: StoredTensor(array.shape, array.dtype, array.nbytes, file) for name, array in arrays.items()
        }

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


def tensors(tied: bool = False) -> dict[str, np.ndarray]:
    return by_hand(random_params(tiny_plan(tied=tied)))


def refusal(arrays: dict[str, np.ndarray], tied: bool = False) -> str:
    with pytest.raises(ConversionError) as error:
        check_tensors(tiny_plan(tied=tied), Arrays(arrays))
    return str(error.value)


def test_every_tensor_and_its_shape():
    plan = tiny_plan()
    assert {piece.tensor: piece.shape for piece in plan.pieces} == {
        name: array.shape for name, array in tensors().items()
    }
    assert check_tensors(plan, Arrays(tensors())) == []


def test_explain():
    rows = explain(tiny_plan())
    up = Row(
        "model.layers.2.mlp.up_proj.weight", (5, 6), "transposed", "group_1/layers/block_0/mlp/up/kernel[0]", (6, 5)
    )
    assert up in rows
    experts = [row for row in rows if row.tensor == "model.layers.1.mlp.experts.gate_up_proj"]
    path = "group_0/layers/block_0/mlp/experts"
    assert [row.parameter for row in experts] == [f"{path}/gate/kernel[1]", f"{path}/up/kernel[1]"]
    assert experts[0].transform == "as it is, interleaved along axis -1"
    down = [row.parameter for row in rows if row.tensor == "model.layers.0.mlp.experts.2.down_proj.weight"]
    assert down == [f"{path}/down/kernel[0][2]"]
    assert [row.tensor for row in rows] == sorted((row.tensor for row in rows), key=natural_order)


def test_layers_come_by_number():
    names = ["model.layers.10.a", "model.layers.2.b", "lm_head.weight", "model.layers.2.a"]
    assert sorted(names, key=natural_order) == [names[2], names[3], names[1], names[0]]


def test_a_parameter_without_a_rule():
    params = abstract_params()
    params["group_1"]["layers"]["block_0"]["attention"]["sinks"] = params["final_norm"]["scale"]
    with pytest.raises(ConversionError, match=r"tiny models have no tensor .*\n  group_1/.*attention/sinks \[6\]"):
        plan_tensors(TABLE, params, PLACES)


def test_two_rules_for_a_parameter():
    table = dataclasses.replace(TABLE, rules=(*TABLE.rules, Rule("norm.weight", "final_norm/scale", same())))
    with pytest.raises(AssertionError, match="both hold final_norm/scale"):
        plan_tensors(table, abstract_params(), PLACES)


def test_all_that_does_not_fit_is_one_error():
    arrays = tensors()
    del arrays["model.norm.weight"], arrays["model.layers.1.mlp.experts.2.down_proj.weight"]
    arrays["model.layers.2.mlp.up_proj.weight"] = np.zeros((5, 7), np.float32)
    arrays["model.layers.2.mlp.down_proj.weight"] = np.zeros((2, 2), np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(12, np.int8)
    message = refusal(arrays)
    assert "folder are not those of this tiny model" in message
    assert "model.norm.weight [6] is missing" in message
    assert "model.layers.1.mlp.experts.2.down_proj.weight [6, 5] is missing" in message
    assert "mlp.up_proj.weight in model.safetensors is [5, 7], this model's is [5, 6]" in message
    assert "q_proj.bias in model.safetensors is int8: allowed are float64, float32, float16, bfloat16" in message
    assert "model.layers.2.mlp.down_proj.weight [2, 2] in model.safetensors is not part of this model" in message


def test_a_long_list_is_cut():
    message = refusal({})
    assert message.count("is missing") == 5
    assert f"and {len(tensors()) - 5} more" in message


def test_ignored_tensors_are_reported():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    arrays = {**tensors(), name: np.zeros(4, np.float32)}
    assert check_tensors(tiny_plan(), Arrays(arrays)) == [Skipped(name, "computed from the config")]


def test_a_head_that_repeats_the_embedding():
    arrays = tensors(tied=True)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    skipped = check_tensors(tiny_plan(tied=True), Arrays(arrays))
    assert skipped == [Skipped("lm_head.weight", "it repeats model.embed_tokens.weight")]


def test_a_head_that_differs_from_the_tied_embedding():
    arrays = tensors(tied=True)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["lm_head.weight"][-1, -1] += 1
    assert "lm_head.weight in model.safetensors differs from model.embed_tokens.weight" in refusal(arrays, tied=True)
    arrays["lm_head.weight"] = arrays["lm_head.weight"][:-1]
    assert "differs from model.embed_tokens.weight" in refusal(arrays, tied=True)


def test_an_untied_model_without_its_head():
    arrays = tensors()
    del arrays["lm_head.weight"]
    assert "lm_head.weight [10, 6] is missing" in refusal(arrays)
