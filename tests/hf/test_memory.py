"""Peak memory of reading and writing, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.hf.folders import read_tensors
from tests.reference import STORIES

_PROGRAM = """
import json, resource, sys
from pathlib import Path
import jax, numpy as np
from maxlite.config.layers import LayerPlace
from maxlite.hf.boxes import whole
from maxlite.hf.plan import check_tensors, plan_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.rules import Rule, Table
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.shards import make_shards
from maxlite.hf.transforms import kernel, same
from maxlite.hf.writer import fill_tensors, new_folder, new_tensors

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
        tensors = new_tensors(plan, None)
        fill_tensors(plan, fetch, make_shards(unfinished, tensors, size // 20), tensors, lambda count: None)
else:
    source = SafetensorsSource(folder)
    check_tensors(plan, source)
    boxes = {path: [whole(leaf.shape)] for path, leaf in plan.parameters.items()}
    size = num_bytes(plan, source, boxes)
    parameters = dict(read_parameters(plan, source, boxes, lambda count: None))
    assert all((value[..., -1] == 0.5).all() for arrays in parameters.values() for value in arrays.values())
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


# A Llama of 400 MB in bfloat16, in 20 files of nearly equal size.
_MAKE = """
import json, sys
from pathlib import Path
import ml_dtypes, numpy as np
from safetensors.numpy import save_file

D, F, L, V, H = 1024, 4096, 12, 4000, 64
folder = Path(sys.argv[1])
folder.mkdir()
random = np.random.default_rng(0)
def weight(*shape):
    return (random.standard_normal(shape, np.float32) * 0.05).astype(ml_dtypes.bfloat16)
tensors = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
for layer in range(L):
    place = f"model.layers.{layer}."
    tensors |= {place + f"self_attn.{part}_proj.weight": (D, D) for part in "qkvo"}
    tensors |= {place + f"mlp.{part}_proj.weight": (F, D) for part in ("gate", "up")}
    tensors |= {place + "mlp.down_proj.weight": (D, F)}
    tensors |= {place + f"{part}_layernorm.weight": (D,) for part in ("input", "post_attention")}
names = list(tensors)
for shard in range(20):
    file = f"model-{shard + 1:05}-of-00020.safetensors"
    save_file({name: weight(*tensors[name]) for name in names[shard::20]}, folder / file)
index = {name: f"model-{number % 20 + 1:05}-of-00020.safetensors" for number, name in enumerate(names)}
(folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
config = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L,
          "num_attention_heads": D // H, "num_key_value_heads": D // H, "max_position_embeddings": 512,
          "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
(folder / "config.json").write_text(json.dumps(config))
"""
_CONVERT = """
import resource, sys
from maxlite.launcher.convert import convert
convert(sys.argv[1], sys.argv[2], [], "21MB", {"explain": False, "check": False})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_peak_memory_of_the_command(tmp_path):
    """Import and export of 400 MB in 20 files; the base is what the same command takes for a tiny model."""

    def convert(source: str | Path, destination: str) -> int:
        command = [sys.executable, "-c", _CONVERT, str(source), str(tmp_path / destination)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment())
        return int(done.stdout.splitlines()[-1])

    subprocess.run([sys.executable, "-c", _MAKE, str(tmp_path / "large")], check=True)
    size = sum(file.stat().st_size for file in tmp_path.glob("large/*.safetensors"))
    assert 3.9e8 < size < 4.2e8
    base = max(convert(STORIES, "tiny"), convert(tmp_path / "tiny", "tiny-out"))
    assert convert(tmp_path / "large", "run") - base < 1.3 * size
    assert convert(tmp_path / "run", "out") - base < 1.3 * size
    assert len(list(tmp_path.glob("out/*.safetensors"))) >= 20
    before, after = (read_tensors(tmp_path / name) for name in ("large", "out"))
    assert before.keys() == after.keys() and all(before[n].tobytes() == after[n].tobytes() for n in before)
