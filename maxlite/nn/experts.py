"""The gated MLPs of a mixture of experts, all experts' matrices of one kind in one array."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.schema import ModelConfig
from maxlite.nn.equippable import Equippable
from maxlite.nn.lora import factor
from maxlite.nn.mlp import build_gate
from maxlite.nn.observe import note_input
from maxlite.nn.param import param
from maxlite.ops.experts import NOT_CUT, Gathering, RowGroups, grouped_bias, grouped_product, whole
from maxlite.ops.quantized_experts import Cuts, quantized_grouped_product
from maxlite.ops.rounding import rounded
from maxlite.ops.stored import expand_scale
from maxlite.ops.stored_experts import StoredExperts, grouped_stored_product
from maxlite.parallel.sharding import axis_size, cutting_axes, live_axes

Weights = dict[str, jax.Array]
Axes = tuple[str | None, ...]

_FLOATS = ("kernel", "lora_a", "lora_b", "bias")
_STORED = ("codes", "scale")


class Placement(NamedTuple):
    """Mesh axes of more than one device, by what lies along them, for tokens of one size.

    rows, length: rows of the batch, and the tokens of a row.
    sequence: those of `length` that cut the hidden width too. A device gathers the row's tokens along them before the
        experts, and afterwards keeps its own tokens' part of the sum.
    experts, embed, hidden: dimensions of the experts' kernels.
    """

    rows: tuple[str, ...]
    length: tuple[str, ...]
    sequence: tuple[str, ...]
    experts: tuple[str, ...]
    embed: tuple[str, ...]
    hidden: tuple[str, ...]


def build_placement(num_rows: int, length: int) -> Placement:
    """Follows the rules in context; mesh axes that do not divide the rows or the length do not cut them."""
    experts, hidden = live_axes("exp"), _hidden_axes()
    embed = tuple(axis for axis in live_axes("embed") if axis not in experts)
    plain, fine = live_axes("length"), live_axes("norm_length")
    sequence = fine[len(plain) :]
    if fine != (*plain, *sequence) or sequence != hidden or length % axis_size(fine):
        sequence = ()
    cut = cutting_axes("length", length)
    return Placement(cutting_axes("batch", num_rows), (*cut, *sequence), sequence, experts, embed, hidden)


class ExpertLinear(Equippable):
    """Each expert's matrix, and perhaps its bias."""

    equation = "ERD,EDF->ERF"

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
        compute: ComputeConfig,
        *,
        use_bias: bool,
        rngs: nnx.Rngs | None,
    ):
        """Makes the kernel of `shape` [E, in, out], the last two named `axes`, and the bias [E, out]."""
        super().__init__()
        dtype = compute.weight_dtype
        self.kernel_shape, self.kernel_axes = shape, ("exp", *axes)
        self.kernel = param(rngs, shape, self.kernel_axes, dtype=dtype, fan_in=shape[1])
        self.use_bias = use_bias
        if use_bias:
            self.bias = param(rngs, (shape[0], shape[2]), ("exp", axes[1]), dtype=dtype, value=0.0)
        self.dtype = jnp.dtype(compute.dtype)

    def weights(self) -> Weights:
        """Returns the weights for `__call__` on each device: floats in the compute dtype, half the bytes to gather."""
        weights = {name: rounded(array, self.dtype) for name, array in self._arrays(_FLOATS).items()}
        weights |= self._arrays(_STORED)
        if self._tiles_are_cut():
            weights["scale"] = _finer(weights["scale"], self.kernel_shape[1], axis_size(_hidden_axes()))
        return weights

    def weight_axes(self) -> dict[str, Axes]:
        """Returns the logical axes of `weights`."""
        names = self._arrays((*_FLOATS, *_STORED))
        axes: dict[str, Axes] = {name: getattr(self, name).get_metadata()["axes"] for name in names}
        return axes | ({"scale": self.kernel_axes} if self._tiles_are_cut() else {})

    def __call__(self, rows: jax.Array, groups: RowGroups | None, weights: Weights, placement: Placement) -> jax.Array:
        """Multiplies each row with its expert's matrix; where the summed width is cut, this is a part of the sum.

        rows: [R, in] that fall on experts as `groups` says; without it [E, R, in].
        Returns: the same with the last dimension out.
        """
        note_input(self.equipment.path, rows, groups)
        y, gatherings = self._product(rows, groups, weights, placement), self._gatherings(placement)
        if self.equipment.adapter is not None:
            narrow = grouped_product(rows, weights["lora_a"], groups, gatherings["lora_a"])
            narrow = narrow * factor(self.equipment.adapter)
            added = grouped_product(narrow, weights["lora_b"], groups, gatherings["lora_b"])
            y = y + added
        if not self.use_bias:
            return y
        bias = whole(gatherings["bias"], weights["bias"])
        if self.kernel_axes[2] == "embed" and placement.hidden:
            # One of the devices whose parts are added up adds it.
            bias = jnp.where(jax.lax.axis_index(placement.hidden) == 0, bias, 0)
        return y + (bias[:, None] if groups is None else grouped_bias(bias, groups, rows.shape[0]))

    def _product(self, rows: jax.Array, groups: RowGroups | None, weights: Weights, placement: Placement) -> jax.Array:
        equipment, gatherings = self.equipment, self._gatherings(placement)
        if equipment.stored is not None:
            stored = StoredExperts(weights["codes"], weights["scale"])
            both = (gatherings["codes"], gatherings["scale"])
            return grouped_stored_product(rows, stored, groups, equipment.stored.qtype, both)
        if equipment.rule is not None:
            cuts = self._cuts(gatherings["kernel"], placement)
            return quantized_grouped_product(rows, weights["kernel"], groups, cuts, equipment.rule)
        return grouped_product(rows, weights["kernel"], groups, gatherings["kernel"])

    def _gatherings(self, placement: Placement) -> dict[str, Gathering]:
        """How weights that are cut along their embed dimension become whole."""
        return {
            name: Gathering(placement.embed, axes.index("embed")) if "embed" in axes else NOT_CUT
            for name, axes in self.weight_axes().items()
        }

    def _cuts(self, gathering: Gathering, placement: Placement) -> Cuts:
        """An expert's rows come from all devices that its tokens are on; those along `experts` have sent theirs."""
        spread = dict.fromkeys((*placement.rows, *placement.length))
        rows = tuple(axis for axis in spread if axis not in (*placement.experts, *placement.hidden))
        summed, made = (placement.hidden if axis == "mlp" else () for axis in self.kernel_axes[1:])
        return Cuts(gathering, summed, made, rows)

    def _tiles_are_cut(self) -> bool:
        """Whether devices have parts of the summed dimension, and with them tiles of its scales."""
        tiled = any(array.shape[1] > 1 for array in self._arrays(("scale",)).values())
        return tiled and self.kernel_axes[1] == "mlp" and bool(_hidden_axes())

    def _arrays(self, names: tuple[str, ...]) -> Weights:
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}


class Experts(nnx.Module):
    """num_experts gated MLPs of the same sizes, stacked."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes gate and up [E, D, F] and down [E, F, D]."""
        assert model.moe_mlp_dim is not None
        wide, narrow = (model.emb_dim, model.moe_mlp_dim), (model.moe_mlp_dim, model.emb_dim)
        count, bias = model.num_experts, model.mlp_bias
        self.join = build_gate(model)
        self.gate = ExpertLinear((count, *wide), ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.up = ExpertLinear((count, *wide), ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.down = ExpertLinear((count, *narrow), ("mlp", "embed"), compute, use_bias=bias, rngs=rngs)

    def weights(self) -> tuple[dict[str, Weights], dict[str, dict[str, Axes]]]:
        """Returns the weights for `__call__` on each device, and their logical axes."""
        parts = {"gate": self.gate, "up": self.up, "down": self.down}
        weights = {name: part.weights() for name, part in parts.items()}
        return weights, {name: part.weight_axes() for name, part in parts.items()}

    def __call__(
        self, rows: jax.Array, groups: RowGroups | None, weights: dict[str, Weights], placement: Placement
    ) -> jax.Array:
        """rows: [R, D] that fall on experts as `groups` says; without it [E, R, D]. Returns: the same shape."""
        gate = checkpoint_name(self.gate(rows, groups, weights["gate"], placement), "moe_mlpwi_0")
        up = checkpoint_name(self.up(rows, groups, weights["up"], placement), "moe_mlpwi_1")
        return checkpoint_name(self.down(self.join(gate, up), groups, weights["down"], placement), "moe_mlpwo")


def _hidden_axes() -> tuple[str, ...]:
    return tuple(axis for axis in live_axes("mlp") if axis not in live_axes("exp"))


def _finer(scale: jax.Array, size: int, parts: int) -> jax.Array:
    """scale: [E, tiles, out] for `size` summed elements. Returns: of tiles that end where the parts end."""
    tiles = scale.shape[1]
    if size % tiles:
        return expand_scale(scale, (scale.shape[0], size, scale.shape[2]), (1,))
    return jnp.repeat(scale, math.lcm(tiles, parts) // tiles, axis=1)
