"""A family with every kind of rule, and a model of it small enough to check by hand."""

from collections.abc import Iterator

import jax
import numpy as np

from maxlite.config.layers import LayerPlace
from maxlite.hf.boxes import whole
from maxlite.hf.chunks import Progress
from maxlite.hf.plan import Plan, plan_tensors
from maxlite.hf.reader import read_parameters
from maxlite.hf.rules import Ignored, Rule, Table
from maxlite.hf.source import Source
from maxlite.hf.transforms import by_head, flat, grouped, interleaved, joined, kernel, same

V, D, N, K, H, F, E = 10, 6, 4, 2, 3, 5, 3
# Two layers of one kind, with a mixture of experts, then one dense layer.
PLACES = (LayerPlace(0, 0, 0), LayerPlace(0, 0, 1), LayerPlace(1, 0, 0))
LAYER = "model.layers.{layer}."

TABLE = Table(
    "tiny",
    rules=(
        Rule("model.embed_tokens.weight", "embedding/table", same()),
        Rule("model.norm.weight", "final_norm/scale", same()),
        Rule("lm_head.weight", "output/kernel", kernel()),
        Rule(LAYER + "self_attn.q_proj.weight", "attention/query/kernel", kernel(), where=("mlp/router/kernel",)),
        Rule(
            LAYER + "self_attn.q_proj.weight",
            ("attention/query/kernel", "attention/gate/kernel"),
            grouped(by_head()),
            where=("mlp/up/kernel",),
        ),
        Rule(LAYER + "self_attn.q_proj.bias", "attention/query/bias", flat()),
        Rule(LAYER + "self_attn.kv.weight", ("attention/key/kernel", "attention/value/kernel"), joined(kernel(), 0)),
        Rule(LAYER + "self_attn.o_proj.weight", "attention/out/kernel", kernel(2)),
        Rule(LAYER + "mlp.up_proj.weight", "mlp/up/kernel", kernel()),
        Rule(LAYER + "mlp.gate.weight", "mlp/router/kernel", kernel()),
        Rule(LAYER + "mlp.gate.bias", "mlp/selection_bias", same(), float32=True),
        Rule(
            LAYER + "mlp.experts.gate_up_proj",
            ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
            interleaved(same(), -1),
        ),
        Rule(LAYER + "mlp.experts.{expert}.down_proj.weight", "mlp/experts/down/kernel", kernel()),
    ),
    ignored=(Ignored(r".*\.inv_freq", "computed from the config"),),
    copies=(("lm_head.weight", "model.embed_tokens.weight"),),
    spellings=((r"^language_model\.", ""),),
)


def abstract_params(dtype=np.float32, tied: bool = False) -> dict:
    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, np.dtype(dtype))

    def block(repeats: int, mlp: dict, **others: dict) -> dict:
        attention = {
            "query": {"kernel": shape(repeats, D, N, H), "bias": shape(repeats, N, H)},
            "key": {"kernel": shape(repeats, D, K, H)},
            "value": {"kernel": shape(repeats, D, K, H)},
            "out": {"kernel": shape(repeats, N, H, D)},
            **others,
        }
        return {"layers": {"block_0": {"attention": attention, "mlp": mlp}}}

    experts = {
        "gate": {"kernel": shape(2, E, D, F)},
        "up": {"kernel": shape(2, E, D, F)},
        "down": {"kernel": shape(2, E, F, D)},
    }
    moe = {
        "router": {"kernel": shape(2, D, E)},
        "selection_bias": shape(2, E, dtype=np.float32),
        "experts": experts,
    }
    tree = {
        "embedding": {"table": shape(V, D)},
        "final_norm": {"scale": shape(D)},
        "group_0": block(2, moe),
        "group_1": block(1, {"up": {"kernel": shape(1, D, F)}}, gate={"kernel": shape(1, D, N, H)}),
    }
    return tree if tied else {**tree, "output": {"kernel": shape(D, V)}}


def tiny_plan(dtype=np.float32, tied: bool = False) -> Plan:
    return plan_tensors(TABLE, abstract_params(dtype, tied), PLACES)


def random_params(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=leaf.shape).astype(leaf.dtype) for path, leaf in plan.parameters.items()}


def whole_boxes(plan: Plan) -> dict[str, list]:
    return {path: [whole(leaf.shape)] for path, leaf in plan.parameters.items()}


def read_whole(plan: Plan, source: Source, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """Path and value of every parameter."""
    for path, arrays in read_parameters(plan, source, whole_boxes(plan), progress):
        yield path, arrays.pop(whole(plan.parameters[path].shape))


def by_hand(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the files that hold these parameters, written out without the table."""
    tensors = {
        "model.embed_tokens.weight": params["embedding/table"],
        "model.norm.weight": params["final_norm/scale"],
    }
    if "output/kernel" in params:
        tensors["lm_head.weight"] = params["output/kernel"].T
    for layer, (block, repeat) in enumerate((("group_0", 0), ("group_0", 1), ("group_1", 0))):
        own = {
            path.removeprefix(f"{block}/layers/block_0/"): value[repeat]
            for path, value in params.items()
            if path.startswith(block)
        }
        name = f"model.layers.{layer}."
        tensors[name + "self_attn.q_proj.weight"] = own["attention/query/kernel"].reshape(D, N * H).T
        tensors[name + "self_attn.q_proj.bias"] = own["attention/query/bias"].reshape(N * H)
        keys_values = [own[f"attention/{part}/kernel"].reshape(D, K * H).T for part in ("key", "value")]
        tensors[name + "self_attn.kv.weight"] = np.concatenate(keys_values)
        tensors[name + "self_attn.o_proj.weight"] = own["attention/out/kernel"].reshape(N * H, D).T
        if block == "group_1":
            tensors[name + "mlp.up_proj.weight"] = own["mlp/up/kernel"].T
            heads = [own[f"attention/{part}/kernel"][:, n] for n in range(N) for part in ("query", "gate")]
            tensors[name + "self_attn.q_proj.weight"] = np.concatenate(heads, axis=1).T
            continue
        tensors[name + "mlp.gate.weight"] = own["mlp/router/kernel"].T
        tensors[name + "mlp.gate.bias"] = own["mlp/selection_bias"]
        gate_up = np.empty((E, D, 2 * F), own["mlp/experts/gate/kernel"].dtype)
        gate_up[..., 0::2], gate_up[..., 1::2] = own["mlp/experts/gate/kernel"], own["mlp/experts/up/kernel"]
        tensors[name + "mlp.experts.gate_up_proj"] = gate_up
        for expert in range(E):
            down = own["mlp/experts/down/kernel"][expert].T
            tensors[name + f"mlp.experts.{expert}.down_proj.weight"] = down
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
