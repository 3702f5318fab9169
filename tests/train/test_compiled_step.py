import json
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxlite.errors import ConfigError
from maxlite.parallel.topology import without_compile_cache
from maxlite.train.compiled_step import read_step, write_step

MESH = Mesh(np.array(jax.devices()[:1]), ("data",))

# Two runs of the same script, in processes of their own: the first compiles and writes, the second reads.
SCRIPT = """
import sys
import jax, numpy as np
from maxlite.config.load import load_config
from maxlite.data.batch import Batch
from maxlite.parallel.devices import prepare_jax
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.xla_flags import compiler_options
from maxlite.train.compiled_step import read_step, write_step
from maxlite.train.setup import build_setup
from maxlite.train.state import init_state

mode, path, *overrides = sys.argv[1:]
config = load_config("base.yml", overrides, {})
prepare_jax(config)
setup = build_setup(config)
options = compiler_options(config.compile, "cpu")
compiled_here = []
import jax._src.compiler as compiler
inner = compiler.backend_compile_and_load
def watch(backend, module, *rest):
    compiled_here.append(str(module.operation.attributes["sym_name"]))
    return inner(backend, module, *rest)
compiler.backend_compile_and_load = watch
with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
    lowered = setup.train_step.lower(setup.abstract, setup.abstract_batch)
    if mode == "write":
        step = lowered.compile()
        write_step(path, lowered, step, setup.mesh, options)
    else:
        step = read_step(path, lowered, setup.mesh, options)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
    start = jax.jit(lambda key: init_state(setup.model, setup.optimizer, key), out_shardings=shardings)
    state = start(jax.random.key(0))
    draw = np.random.default_rng(0)
    for _ in range(3):
        ids = draw.integers(0, 64, (8, 17)).astype(np.int32)
        ones = np.ones((8, 16), np.int32)
        places = np.tile(np.arange(16, dtype=np.int32), (8, 1))
        batch = Batch(ids[:, :-1], ids[:, 1:], ones.astype(np.float32), places, ones)
        state, metrics = step(state, setup.place(batch))
        print("loss", float(metrics["loss"]).hex())
print("compiled train_step here:", any("train_step" in name for name in compiled_here))
"""
CONFIG = (
    "cpu_devices=8",
    "ici_fsdp_parallelism=8",
    "vocab_size=64",
    "emb_dim=32",
    "mlp_dim=32",
    "num_decoder_layers=2",
    "num_query_heads=2",
    "num_kv_heads=2",
    "head_dim=16",
    "dataset_type=synthetic",
    "max_target_length=16",
    "per_device_batch_size=1",
    "peak_tflops_per_device=1",
    "jax_cache_dir=null",
)


def run(environment, mode, path, *more):
    # The tests' own compile cache would hide what is compiled.
    environment = {name: value for name, value in environment.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, mode, str(path), *CONFIG, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_another_process_trains_with_the_file_and_compiles_no_step(process_environment, tmp_path):
    path = tmp_path / "step.bin"
    code, written, errors = run(process_environment, "write", path)
    assert code == 0, errors
    code, read, errors = run(process_environment, "read", path)
    assert code == 0, errors
    assert written[-1] == "compiled train_step here: True" and read[-1] == "compiled train_step here: False"
    assert len(read) == 4 and read[:3] == written[:3]
    code, _, errors = run(process_environment, "read", path, "learning_rate=1e-5")
    assert code == 1 and "is of another program (the config" in errors


def doubling():
    return jax.jit(lambda x: x * 2).lower(jnp.ones(3))


@pytest.fixture
def saved(tmp_path):
    lowered = doubling()
    path = tmp_path / "folder" / "double.bin"
    # A CPU program that comes out of the compile cache cannot be written once more: jaxlib loses its functions.
    with without_compile_cache():
        assert write_step(str(path), lowered, lowered.compile(), MESH, {}) == path.stat().st_size
    return path, lowered


def test_a_program_comes_back(saved):
    path, _ = saved
    assert read_step(str(path), doubling(), MESH, {})(jnp.arange(3.0)).tolist() == [0, 2, 4]
    assert [file.name for file in path.parent.iterdir()] == ["double.bin"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("jax", "0.9", "another version of jax: 0.9 in the file"),
        ("device_kind", "TPU v4", "another kind of device: TPU v4 in the file, cpu here"),
        ("num_devices", 4, "another number of devices: 4 in the file, 1 here"),
        ("format", 0, "another version of the file: 0 in the file"),
    ],
)
def test_a_file_of_another_kind_is_refused(saved, field, value, message):
    path, lowered = saved
    with zipfile.ZipFile(path) as archive:
        header, program = json.loads(archive.read("header.json")), archive.read("program.bin")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(header | {field: value}))
        archive.writestr("program.bin", program)
    with pytest.raises(ConfigError, match=message):
        read_step(str(path), lowered, MESH, {})


def test_another_program_is_refused(saved):
    path, _ = saved
    other = jax.jit(lambda x: x * 3).lower(jnp.ones(3))
    with pytest.raises(ConfigError, match="another program"):
        read_step(str(path), other, MESH, {})


def test_a_program_of_other_flags_is_refused(saved):
    path, lowered = saved
    with pytest.raises(
        ConfigError, match="another set of compiler flags: none in the file, --xla_a=true --xla_b=3 here"
    ):
        read_step(str(path), lowered, MESH, {"xla_b": 3, "xla_a": True})
    write_step(str(path), lowered, lowered.compile(), MESH, {"xla_b": 3, "xla_a": True})
    read_step(str(path), doubling(), MESH, {"xla_a": True, "xla_b": 3})
    with pytest.raises(ConfigError, match="--xla_a=true --xla_b=3 in the file, --xla_b=3 here"):
        read_step(str(path), lowered, MESH, {"xla_b": 3})


def test_what_is_no_compiled_step_is_refused(saved):
    path, lowered = saved
    path.write_bytes(b"text")
    with pytest.raises(ConfigError, match="is no compiled step"):
        read_step(str(path), lowered, MESH, {})
    with pytest.raises(ConfigError, match="does not exist; write it"):
        read_step(str(path.with_name("none.bin")), lowered, MESH, {})
    path.parent.joinpath("file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        write_step(str(path.parent / "file" / "step.bin"), lowered, lowered.compile(), MESH, {})
