"""Config -> a Model: pure functions over plain nested dicts of parameters. The rest of maxlite sees only this."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.layers import LayerSpec, layer_groups, layer_specs
from maxlite.config.schema import LogicalAxisRules, ModelConfig
from maxlite.errors import ConfigError
from maxlite.model.block import ATTENTION
from maxlite.model.equip import ADAPTER_NAMES, Product, check_matches
from maxlite.model.stack import take_apart, unstack
from maxlite.model.transformer import Output, Transformer
from maxlite.nn.cache import Cache
from maxlite.ops.soft_cap import soft_capped
from maxlite.parallel.sharding import describe_axes, indivisible, mesh_axes, num_parts, shardings_of

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as data and pure functions.

    config, compute: the sections it was built from, the dtype resolved.
    abstract_params: nested dict of ShapeDtypeStruct; the weights of a layer group are stacked over its repeats.
    logical_axes: nested dict of the same tree, the names of each weight's dimensions.
    decays: nested dict of the same tree, whether weight decay shrinks each.
    trainable: nested dict of the same tree, whether training changes each: with adapters only these.
    products: of all layers, and what each has besides its kernel.
    """

    config: ModelConfig
    compute: ComputeConfig
    abstract_params: Params
    logical_axes: Params
    decays: Params
    trainable: Params
    products: tuple[Product, ...]
    graphdef: Any

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(size for size, _ in self._sizes())

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that act on one token: of the experts' those that it is sent to."""
        total = 0
        for size, names in self._sizes():
            # What an expert owns has the experts first; the router has them last.
            of_expert = "exp" in names[:-1]
            total += size * self.config.num_experts_per_tok // self.config.num_experts if of_expert else size
        return total

    def init(self, key: jax.Array) -> Params:
        """Returns initial parameters; the same values on any mesh."""
        return nnx.to_pure_dict(nnx.state(_make(self.config, self.compute, key)))

    def apply(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Runs the model on tokens, positions, segment_ids: [B, T]. Returns hidden states [B, T, D] and the cache."""
        return nnx.merge(self.graphdef, params)(tokens, positions, segment_ids, cache)

    def unembedding(self, params: Params) -> jax.Array:
        """Returns the matrix from hidden states to logits: [D, V], in the compute dtype."""
        return nnx.merge(self.graphdef, params).unembedding()

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden: [..., D]. Returns: [..., V] float32."""
        logits = jnp.einsum("...D,DV->...V", hidden, self.unembedding(params), preferred_element_type=jnp.float32)
        return soft_capped(logits, self.config.final_logits_soft_cap)

    def init_cache(self, batch: int, length: int, *, stacked: bool = True) -> Cache:
        """Returns an empty cache of `length` slots a row; unstacked to go with `unstack`ed parameters."""

        def layer(spec: LayerSpec) -> Any:
            return ATTENTION[spec.attention].init_cache(spec, self.config, self.compute, batch, length)

        layers: dict[str, Any] = {}
        for index, group in enumerate(layer_groups(self.config)):
            runs = [
                {f"block_{position}": layer(spec) for position, spec in enumerate(group.pattern)}
                for _ in range(group.repeats)
            ]
            layers[f"group_{index}"] = jax.tree.map(lambda *slots: jnp.stack(slots), *runs) if stacked else tuple(runs)
        slots = jnp.zeros((batch, length), jnp.int32)
        return Cache(layers, slots, slots, jnp.int32(0))

    def unstack(self, params: Params) -> Params:
        """Returns the parameters with one array a layer, as decoding wants them."""
        return unstack(params, self._repeats())

    def take_apart(self, params: Params) -> Params:
        """As `unstack`, for parameters that are needed no longer: memory for one weight more, not for all twice."""
        return take_apart(params, self._repeats())

    def shardings(self, mesh: Mesh, rules: LogicalAxisRules) -> Params:
        """Returns the NamedSharding of every parameter.

        Raises:
            ConfigError: lists every size that its mesh axes do not divide.
        """
        shardings, _ = shardings_of(self.abstract_params, self.logical_axes, mesh, rules)
        # Layers that the stages do not divide are one message a group, not one for each of its weights.
        within_layers = tuple(row for row in rules if row[0] != "layers")
        _, problems = shardings_of(self.abstract_params, self.logical_axes, mesh, within_layers)
        named = [*_undivided_layers(self.config, mesh, rules), *_undivided_sizes(self.config, mesh, rules)]
        # The sizes that have keys of their own come first: that is where to look.
        if named or problems:
            raise ConfigError("\n".join(named + problems))
        return shardings

    def _sizes(self) -> Iterator[tuple[int, tuple[str | None, ...]]]:
        """Numbers of weights and the logical axes of each array; a kernel counts alike however it is stored."""
        stored = [product for product in self.products if product.equipment.stored is not None]
        for product in stored:
            yield product.repeats * math.prod(product.shape), ("layers", *product.axes)
        left_out = {f"{product.params_path}/{name}" for product in stored for name in ("codes", "scale")}
        axes = jax.tree.leaves(self.logical_axes, is_leaf=lambda node: isinstance(node, tuple))
        for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(self.abstract_params), axes, strict=True):
            if "/".join(step.key for step in path) not in left_out:
                yield math.prod(leaf.shape), names

    def _repeats(self) -> dict[str, int]:
        return {f"group_{index}": group.repeats for index, group in enumerate(layer_groups(self.config))}


def build_model(model: ModelConfig, compute: ComputeConfig, platform: str | None = None) -> Model:
    """Builds the handle of a model without making any array; `dtype=auto` becomes what the platform likes.

    platform: of the devices that it will run on; None is the default device's.

    Raises:
        ConfigError: a regular expression of quantization or adapters matches no product of the layers.
    """
    compute = dataclasses.replace(compute, dtype=resolve_dtype(compute.dtype, platform))
    # Not by tracing `init`, which takes ten times as long; a test holds the two together.
    transformer = Transformer(model, compute, rngs=None)
    products = transformer.products()
    check_matches(products, compute)
    graphdef, state = nnx.split(transformer)
    variables = nnx.to_flat_state(state)
    abstract, axes, decays, trainable = {}, {}, {}, {}
    for path, variable in variables:
        shape = variable.get_raw_value()
        names = variable.get_metadata()["axes"]
        _put(decays, path, variable.get_metadata()["decays"])
        _put(trainable, path, not compute.lora_rank or path[-1] in ADAPTER_NAMES)
        _put(abstract, path, shape)
        # Inside a group every weight has the repeats as its first dimension.
        _put(axes, path, ("layers",) * (len(shape.shape) - len(names)) + names)
    return Model(model, compute, abstract, axes, decays, trainable, products, graphdef)


def resolve_dtype(dtype: str, platform: str | None = None) -> str:
    """Returns the dtype that `auto` stands for on a platform (None: the default device's): float32 on a CPU."""
    if dtype != "auto":
        return dtype
    return "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"


def _activation_sizes(model: ModelConfig) -> list[tuple[str, int | None, str]]:
    """Key, size and axis of what activations are cut along."""
    specs = layer_specs(model)
    softmax = any(spec.attention != "gated_delta_net" for spec in specs)
    kinds = {spec.mlp for spec in specs}
    sizes: list[tuple[str, int | None, str]] = [("emb_dim", model.emb_dim, "activation_embed")]
    if softmax:
        sizes.append(("num_query_heads", model.num_query_heads, "activation_heads"))
        sizes.append(("num_kv_heads", model.num_kv_heads, "activation_kv_heads"))
        sizes.append(("global_num_kv_heads", model.global_num_kv_heads, "activation_kv_heads"))
    if kinds & {"dense", "dense_and_moe"}:
        sizes.append(("mlp_dim", model.mlp_dim, "activation_mlp"))
    if kinds - {"dense"}:
        sizes.append(("num_experts", model.num_experts, "exp"))
        sizes.append(("moe_mlp_dim", model.moe_mlp_dim, "activation_mlp"))
        sizes.append(("shared_expert_mlp_dim", model.shared_expert_mlp_dim, "activation_mlp"))
    return sizes


def _undivided_sizes(model: ModelConfig, mesh: Mesh, rules: LogicalAxisRules) -> list[str]:
    sizes = [(key, size, axis) for key, size, axis in _activation_sizes(model) if size is not None]
    return [text for key, size, axis in sizes for text in indivisible(key, (size,), (axis,), mesh, rules)]


def _undivided_layers(model: ModelConfig, mesh: Mesh, rules: LogicalAxisRules) -> Iterator[str]:
    axes = mesh_axes("layers", rules)
    stages = num_parts(axes, mesh)
    for index, group in enumerate(layer_groups(model)):
        if group.repeats % stages:
            kinds = ", ".join(f"{spec.attention}+{spec.mlp}" for spec in group.pattern)
            yield (
                f"Group {index} of the layers is {group.repeats} x ({kinds}), which {describe_axes(axes, mesh)} does "
                "not divide: each pipeline stage needs as many. Change ici_pipeline_parallelism (or dcn_), or "
                "num_decoder_layers."
            )


def _make(model: ModelConfig, compute: ComputeConfig, key: jax.Array) -> Transformer:
    return Transformer(model, compute, rngs=nnx.Rngs(params=key))


def _put(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
