"""Peak memory of reading and writing, in a process of its own."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, resource, sys
from pathlib import Path
import jax, numpy as np
from maxlite.config.layers import LayerPlace
from maxlite.hf.plan import check_tensors, plan_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.rules import Rule, Table
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.transforms import kernel, same
from maxlite.hf.writer import new_folder, new_tensors, write_tensors

L, D, F, V = 14, 1024, 4096, 12000
parts = [f"mlp/{part}/kernel" for part in ("gate", "up", "down")]
rules = [Rule(f"layers.{{layer}}.{part}", part, kernel()) for part in parts]
rules += [Rule("embedding", "embedding/table", same()), Rule("head", "output/kernel", kernel())]
def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, np.float16)
mlp = {part: {"kernel": shape(L, F, D) if part == "down" else shape(L, D, F)} for part in ("gate", "up", "down")}
tree = {"embedding": {"table": shape(V, D)}, "output": {"kernel": shape(D, V)}}
tree["group_0"] = {"layers": {"block_0": {"mlp": mlp}}}
plan = plan_tensors(Table("large", tuple(rules)), tree, [LayerPlace(0, 0, layer) for layer in range(L)])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def fetch(path):
    # Made when asked for, as an array fetched from a device or a checkpoint is.
    return np.full(plan.parameters[path].shape, 0.5, np.float16)

folder = Path(sys.argv[1])
base = peak()
if not folder.exists():
    size = sum(tensor.nbytes for tensor in new_tensors(plan, None))
    with new_folder(folder) as unfinished:
        write_tensors(plan, fetch, unfinished, new_tensors(plan, None), lambda count: None, size // 20)
else:
    source = SafetensorsSource(folder)
    check_tensors(plan, source)
    size = num_bytes(plan, source)
    parameters = dict(read_parameters(plan, source, lambda count: None))
    assert all((value[..., -1] == 0.5).all() for value in parameters.values())
print(json.dumps({"size": size, "base": base, "peak": peak(), "largest": 2 * L * D * F}))
"""


@pytest.mark.slow
def test_peak_memory_of_400_megabytes_in_20_shards(tmp_path):
    def run() -> dict[str, int]:
        command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "model")]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    written, read = run(), run()
    assert 4.1e8 > written["size"] == read["size"] > 4e8
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 20
    # Reading holds the parameters and little else; writing one of them at a time.
    assert read["peak"] - read["base"] < 1.1 * read["size"]
    assert written["peak"] - written["base"] < 2.2 * written["largest"]
