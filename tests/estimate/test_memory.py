import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.estimate.memory import bytes_needed, program_memory
from maxlite.train.state import device_bytes, host_bytes


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.00G) "
            "exceeds available HBM (15.75G).",
            192 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.52G "
            "of 15.75G hbm. Exceeded hbm capacity by 1.77G.",
            17.52 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: something else", None),
    ],
)
def test_what_the_compiler_says_of_too_large_a_program(message, found):
    assert bytes_needed(message) == (found if found is None else pytest.approx(found))


def test_bytes_of_a_device_are_of_its_shards():
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    tree = {
        "split": jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=split),
        "copied": jax.ShapeDtypeStruct((5,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())),
        "away": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=split.with_memory_kind("pinned_host")),
    }
    assert device_bytes(tree) == 2 * 3 * 2 + 5 * 4
    assert host_bytes(tree) == 2 * 4


def test_memory_of_a_program_counts_a_donated_argument_once():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    grow = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=0)
    memory = program_memory(grow.lower(x).compile())
    assert memory.arguments == 4096 and memory.results < 4096
    assert memory.peak == memory.arguments + memory.results + memory.temporaries + memory.code
