import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import CompileConfig
from maxlite.errors import ConfigError
from maxlite.parallel.topology import build_topology, without_compile_cache
from maxlite.parallel.xla_flags import PRESETS, check_options, compiler_options


def section(flags=None, preset=None):
    return CompileConfig(None, 1, None, flags, preset)


def test_flags_are_read_with_their_types():
    flags = "--xla_a=true --xla_b=false --xla_c=12 --xla_d=-1 --xla_e=0.5 --xla_f=a=b"
    assert compiler_options(section(flags), "cpu") == {
        "xla_a": True,
        "xla_b": False,
        "xla_c": 12,
        "xla_d": -1,
        "xla_e": 0.5,
        "xla_f": "a=b",
    }
    assert compiler_options(section(), "cpu") == {}


@pytest.mark.parametrize("flags", ["xla_a=true", "--xla_a", "--=3", "--xla_a=1 -xla_b=2"])
def test_a_flag_that_is_not_written_as_one_is_refused(flags):
    with pytest.raises(ConfigError, match=r"is not written --name=value"):
        compiler_options(section(flags), "cpu")


def test_a_flag_of_the_user_goes_before_the_presets():
    name, preset = next(iter(PRESETS.items()))
    flag = next(iter(preset.flags))
    assert compiler_options(section(f"--{flag}=7", name), "tpu")[flag] == 7


def test_presets_are_named_when_another_is_asked_for():
    with pytest.raises(ConfigError, match=re.escape(", ".join(PRESETS))):
        compiler_options(section(preset="fast"), "tpu")


def test_a_preset_of_another_platform_is_refused():
    with pytest.raises(ConfigError, match="is for tpu, and the step is compiled for cpu"):
        compiler_options(section(preset=next(iter(PRESETS))), "cpu")


@pytest.mark.parametrize("flag", ["xla_no_such_flag=true", "xla_cpu_enable_fast_math=perhaps"])
def test_what_the_compiler_refuses_is_named_and_ends_no_process(flag):
    name = flag.partition("=")[0]
    options = compiler_options(section(f"--xla_embed_ir_in_executable=false --{flag}"), "cpu")
    with pytest.raises(ConfigError, match=f"^compile_xla_flags: .*refuses --{name}=.*: .*{name}"):
        check_options(options, jax.devices()[0])


@pytest.mark.parametrize(
    ("flags", "key"), [(None, "xla_flags_preset=sync_collectives"), ("--{}=perhaps", "compile_xla_flags")]
)
def test_a_refused_flag_is_blamed_on_the_key_that_it_came_from(flags, key):
    flag = next(iter(PRESETS["sync_collectives"].flags))
    options = compiler_options(section(flags and flags.format(flag), "sync_collectives"), "tpu")
    # The compiler for CPUs knows no flag of TPUs.
    with pytest.raises(ConfigError, match=f"^{key}: the compiler for cpu refuses --{flag}="):
        check_options(options, jax.devices()[0])


def test_flags_that_the_compiler_knows_are_accepted():
    check_options(compiler_options(section("--xla_cpu_enable_fast_math=false"), "cpu"), jax.devices()[0])


def compiled_for(topology, options, width=512, tensor=4):
    """A training step of two layers of 2 x width hidden, weights split over fsdp and tensor."""
    mesh = Mesh(np.array(build_topology(topology, 1).devices).reshape(-1, tensor), ("fsdp", "tensor"))

    def placed(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    def loss(params, x):
        def layer(x, weights):
            up, down = (weight.astype(jnp.bfloat16) for weight in weights)
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), placed("fsdp", None, "tensor"))
            return x + jax.lax.with_sharding_constraint(hidden @ down, placed("fsdp", "tensor")), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    up, down = (2, width, 2 * width), (2, 2 * width, width)
    shapes = ((up, placed(None, "fsdp", "tensor")), (down, placed(None, "tensor", "fsdp")))
    params = tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape, sharding in shapes)
    x = jax.ShapeDtypeStruct((8, width // 2, width), jnp.bfloat16, sharding=placed("fsdp", "tensor"))
    out = tuple(sharding for _, sharding in shapes)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(params, x)
    with without_compile_cache():
        return lowered.compile(compiler_options=options).as_text()


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("preset", "topology", "mark", "more"),
    [
        ("async_collectives", "v6e-8", '"AsyncCollectiveStart"', True),
        ("sync_collectives", "v5e-8", '"AsyncCollectiveStart"', False),
        ("sparse_core_collectives", "v6e-8", 'async_execution_thread="sparsecore"', True),
    ],
)
def test_a_preset_changes_the_program(preset, topology, mark, more):
    plain = compiled_for(topology, {}).count(mark)
    changed = compiled_for(topology, compiler_options(section(preset=preset), "tpu")).count(mark)
    assert changed > plain if more else changed < plain


@pytest.mark.tpu
@pytest.mark.slow
def test_large_products_send_no_pieces_round_without_collective_matmul():
    options = compiler_options(section(preset="no_collective_matmul"), "tpu")
    mark = " collective-permute-start("
    assert compiled_for("v5e-8", {}, width=2048, tensor=1).count(mark) > 0
    assert compiled_for("v5e-8", options, width=2048, tensor=1).count(mark) == 0


@pytest.mark.tpu
def test_the_tpu_compiler_refuses_a_flag_by_name():
    device = build_topology("v5e-4", 1).devices[0]
    with pytest.raises(ConfigError, match=r"refuses --xla_tpu_no_such_flag=1: .*xla_tpu_no_such_flag"):
        check_options(compiler_options(section("--xla_tpu_no_such_flag=1"), "tpu"), device)
