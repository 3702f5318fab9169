import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.errors import ConfigError
from maxlite.model.build import build_model
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import constrain, indivisible, partition_spec, shardings_of, use_mesh

RULES = (("batch", ("data", "fsdp")), ("embed", ("fsdp",)), ("mlp", ("tensor",)), ("norm", ()), ("embed", ("tensor",)))


@pytest.fixture
def mesh():
    return Mesh(
        np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("embed", "mlp"), P("fsdp", "tensor")),
        (("batch", "length", "mlp"), P(("data", "fsdp"), None, "tensor")),
        (("length", "unknown"), P()),
        ((None, "mlp", None), P(None, "tensor")),
        (("norm",), P()),
        ((), P()),
        # A mesh axis is used once: the earlier dimension has it, the later goes without, in whole or in part.
        (("embed", "embed"), P("fsdp")),
        (("embed", "batch"), P("fsdp", "data")),
        (("batch", "embed"), P(("data", "fsdp"))),
        # The first row that names an axis decides, also where its mesh axis is taken.
        (("mlp", "embed"), P("tensor", "fsdp")),
    ],
)
def test_partition_spec(axes, spec):
    assert partition_spec(axes, RULES) == spec


def test_the_first_row_decides():
    assert partition_spec(("embed",), (("embed", ()), ("embed", ("fsdp",)))) == P()


def test_constrain_places_an_activation(mesh):
    x = jnp.arange(32.0).reshape(4, 8)
    with use_mesh(mesh, RULES):
        y = jax.jit(lambda x: constrain(x * 2, "batch", "mlp"))(x)
        with pytest.raises(AssertionError):
            constrain(x, "batch")
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "tensor")), 2)
    np.testing.assert_array_equal(y, x * 2)


def test_constrain_does_nothing_without_a_mesh_or_on_one_device(mesh):
    x = jnp.ones((2, 2))
    assert constrain(x, "batch", "mlp") is x
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), mesh.axis_names, axis_types=mesh.axis_types)
    with use_mesh(one, RULES):
        assert constrain(x, "batch", "mlp") is x
    assert constrain(x, "batch", "mlp") is x


def precisions(jaxpr) -> list[str]:
    """The precision of every matrix product in a program, those of inner programs too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(str(equation.params["precision"]))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found += precisions(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_precision_reaches_forward_and_backward_products(tiny_config):
    config = tiny_config()
    model = build_model(config.model, config.compute)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    tokens = jnp.zeros((1, 4), jnp.int32)

    def program(precision):
        def loss(params):
            return model.apply(params, tokens, tokens, tokens + 1).hidden.sum()

        with use_mesh(mesh, RULES, precision):
            return precisions(jax.make_jaxpr(jax.grad(loss))(model.abstract_params).jaxpr)

    assert len(program("highest")) > 20 and all("HIGHEST" in name for name in program("highest"))
    assert not any("HIGHEST" in name for name in program("default"))


def test_use_mesh_ends_with_an_error_too(mesh):
    with pytest.raises(KeyError), use_mesh(mesh, RULES):
        raise KeyError
    x = jnp.ones((2, 2))
    assert constrain(x, "batch", "mlp") is x


def test_every_size_that_does_not_divide_is_listed(mesh):
    shapes = {"a": {"kernel": jax.ShapeDtypeStruct((3, 6), "float32")}, "b": jax.ShapeDtypeStruct((5,), "float32")}
    axes = {"a": {"kernel": ("embed", "mlp")}, "b": ("mlp",)}
    _, (first, second) = shardings_of(shapes, axes, mesh, RULES)
    assert "parameter a/kernel: dimension embed of size 3" in first and "fsdp=2" in first
    assert "parameter b: dimension mlp of size 5" in second and "tensor=2" in second


def test_a_product_of_mesh_axes_is_named():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4, 1), ("data", "fsdp", "tensor"))
    (message,) = indivisible("batch", (6, 3), ("batch", "length"), mesh, RULES)
    assert message.startswith("batch: dimension batch of size 6 is not divided by mesh axes data=2 x fsdp=4;")
    assert not list(indivisible("batch", (16, 3), ("batch", "length"), mesh, RULES))


def model_on_eight(tiny_config, *overrides):
    config = tiny_config(*overrides)
    model = build_model(config.model, config.compute)
    return model, build_mesh(config.parallel, jax.devices()[:8]), config.parallel.logical_axis_rules


def test_emb_60_on_eight_way_fsdp(tiny_config):
    model, mesh, rules = model_on_eight(tiny_config, "emb_dim=60", "ici_fsdp_parallelism=8")
    with pytest.raises(ConfigError) as caught:
        model.shardings(mesh, rules)
    lines = str(caught.value).splitlines()
    assert any("parameter embedding/table: dimension embed of size 60" in line for line in lines)
    assert all("fsdp=8" in line and "60" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_query_heads=4"], "num_query_heads: dimension activation_heads of size 4"),
        (["num_query_heads=8"], "num_kv_heads: dimension activation_kv_heads of size 2"),
        (["num_query_heads=8", "num_kv_heads=8", "mlp_dim=100"], "mlp_dim: dimension activation_mlp of size 100"),
        (
            ["num_query_heads=8", "num_kv_heads=8", "vocab_size=60"],
            "parameter embedding/table: dimension vocab of size 60",
        ),
    ],
)
def test_sizes_on_eight_way_tensor(tiny_config, overrides, message):
    degrees = ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=8"]
    model, mesh, rules = model_on_eight(tiny_config, *overrides, *degrees)
    with pytest.raises(ConfigError) as caught:
        model.shardings(mesh, rules)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(message) and "tensor=8" in first


def test_a_rule_takes_an_axis_off_the_mesh(tiny_config):
    model, mesh, rules = model_on_eight(tiny_config, "emb_dim=60", "ici_fsdp_parallelism=8")
    shardings = model.shardings(mesh, (("embed", ()), *rules))
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))
