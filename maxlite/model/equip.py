"""Which products of the layers are rounded, stored in few bits or adapted: by their module paths.

A product is a Linear or an ExpertLinear inside a layer. Embedding, output matrix, norms, routers, biases and
convolutions are none, nor are gates of one number.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from flax import nnx

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.quant_schema import QuantRule
from maxlite.errors import ConfigError
from maxlite.nn.equipment import Adapter, Equipment, StoredForm
from maxlite.nn.experts import ExpertLinear
from maxlite.nn.linear import Linear
from maxlite.ops.stored import contracted_dims

# What the names of `quantization` stand for: dtypes of kernels, activations and incoming gradients.
_NAMED_RULES = {
    "int8": QuantRule(".*", "int8", "int8", "int8"),
    "int4": QuantRule(".*", "int4", "int8", "int8"),
    "fp8": QuantRule(".*", "fp8", "fp8", "fp8_e5m2"),
}
# The parameters of an adapter, beside those of its product.
ADAPTER_NAMES = ("lora_a", "lora_b")
# Normal floats fit values near each other; over a whole channel they would waste most of their sixteen steps.
NF4_TILE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of a layer, for all repeats of its group.

    path: what regular expressions see, as group_0/block_0/attention/query.
    params_path: where its arrays are among the parameters, as group_0/layers/block_0/attention/query.
    equation: as of Linear; of experts "ERD,EDF->ERF".
    shape, axes: of the kernel of one repeat, whatever it is stored as.
    repeats: stacked in each of its arrays.
    """

    path: str
    params_path: str
    equation: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    repeats: int
    equipment: Equipment

    @property
    def is_experts(self) -> bool:
        """Whether the kernel has a matrix for each expert."""
        return self.axes[0] == "exp"

    @property
    def summed_dims(self) -> tuple[int, ...]:
        """The kernel's dimensions that the product sums over."""
        return contracted_dims(self.equation)


def equip(pattern: nnx.Module, group: str, compute: ComputeConfig, *, rngs: nnx.Rngs | None) -> None:
    """Gives each product of one repeat of a group of layers what its path asks for."""
    for steps, part in _parts_of(pattern, ()):
        path = "/".join((group, *steps))
        part.equip(_equipment(path, compute), rngs=rngs)


def products_of(pattern: nnx.Module, group: str, repeats: int) -> Iterator[Product]:
    """Yields the products of a group of layers that is equipped, by their names."""
    for steps, part in _parts_of(pattern, ()):
        inner = "/".join(steps)
        yield Product(
            path=f"{group}/{inner}",
            params_path=f"{group}/layers/{inner}",
            equation=part.equation,
            shape=part.kernel_shape,
            axes=part.kernel_axes,
            repeats=repeats,
            equipment=part.equipment,
        )


def check_matches(products: tuple[Product, ...], compute: ComputeConfig) -> None:
    """Makes sure that each regular expression of the config decides about some product.

    Raises:
        ConfigError: says which does not, and lists the paths of the products; or which product a rule can't round.
    """
    paths = [product.path for product in products]
    for number, rule in enumerate(compute.quant_rules or ()):
        if not any(_first_match(path, compute) is rule for path in paths):
            matching = any(re.fullmatch(rule.module_path, path) for path in paths)
            wrong = "decides about no product: rows before it match all of its" if matching else "matches no product"
            raise ConfigError(_no_match(f"row {number} of quant_rules, {rule.module_path!r},", wrong, paths))
    given = (
        ("weight_quant_module_path", compute.weight_quant_module_path, compute.weight_quantization is not None),
        ("lora_module_path", compute.lora_module_path, compute.lora_rank > 0),
    )
    _check_rules(products)
    for key, pattern, used in given:
        if used and not any(re.fullmatch(pattern, path) for path in paths):
            raise ConfigError(_no_match(f"{key}={pattern!r}", "matches no product", paths))


def _check_rules(products: tuple[Product, ...]) -> None:
    for product in products:
        rule = product.equipment.rule
        if rule is None:
            continue
        summed = math.prod(product.shape[dim] for dim in product.summed_dims)
        if product.is_experts and (rule.act_qtype is None or rule.tile_size or rule.calibration != "absmax"):
            raise ConfigError(
                f"quant_rules: {rule.module_path!r} matches the experts {product.path}, whose kernels and activations "
                "are rounded together, with one scale a channel, by absmax: give weight_qtype and act_qtype, and "
                "neither tile_size nor calibration; or put a row for the experts before it."
            )
        if rule.tile_size is not None and summed % rule.tile_size:
            raise ConfigError(
                f"quant_rules: tile_size {rule.tile_size} of {rule.module_path!r} does not divide the {summed} "
                f"elements that {product.path} sums over; take a divisor, or a row of its own for this product."
            )


def describe_equipment(products: tuple[Product, ...]) -> list[str]:
    """Returns lines that say which products are rounded, stored in few bits or adapted; none where none is."""
    kinds: dict[str, list[Product]] = {}
    for product in products:
        for text in _descriptions(product):
            kinds.setdefault(text, []).append(product)
    lines = [f"{text}: {describe_products(found)}" for text, found in sorted(kinds.items())]
    for word, has in (("Quantized", _has_rule), ("Stored", _has_codes)):
        rest = [product for product in products if not has(product)]
        if 0 < len(rest) < len(products):
            lines.append(f"Not {word.lower()}: {describe_products(rest)}")
    if lines:
        lines.append("As they are: embedding, output matrix, norms, biases, routers, convolutions, gates of one number")
    return lines


def describe_products(products: list[Product]) -> str:
    """Returns paths in few words: group_0/block_0/{attention/{query,key}, mlp/{up,down}} x 4 layers."""
    groups: dict[str, list[Product]] = {}
    for product in products:
        groups.setdefault(product.path.partition("/")[0], []).append(product)
    texts = []
    for name, found in groups.items():
        tree: dict[str, Any] = {}
        for product in found:
            node = tree
            for step in product.path.split("/")[1:]:
                node = node.setdefault(step, {})
        texts.append(f"{name}/{_braced(tree)} x {found[0].repeats} layers")
    return "; ".join(texts)


def _parts_of(module: nnx.Module, steps: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Linear | ExpertLinear]]:
    """Products below a module with the names on the way to them, by their names once a layer is stacked."""
    for name, child in list(vars(module).items()):
        if isinstance(child, Linear | ExpertLinear):
            if child.equippable:
                yield (*steps, name), child
        elif isinstance(child, nnx.Module):
            yield from _parts_of(child, (*steps, name))


def _equipment(path: str, compute: ComputeConfig) -> Equipment:
    rule = _first_match(path, compute)
    if rule is not None and not (rule.weight_qtype or rule.act_qtype or rule.bwd_qtype):
        rule = None
    stored = adapter = None
    if compute.weight_quantization and re.fullmatch(compute.weight_quant_module_path, path):
        size = compute.weight_quant_tile_size
        if size is None and compute.weight_quantization == "nf4":
            size = NF4_TILE_SIZE
        stored = StoredForm(compute.weight_quantization, size)
    if compute.lora_rank and re.fullmatch(compute.lora_module_path, path):
        adapter = Adapter(compute.lora_rank, compute.lora_alpha)
    return Equipment(path, rule, stored, adapter)


def _first_match(path: str, compute: ComputeConfig) -> QuantRule | None:
    rules = compute.quant_rules or ()
    if compute.quantization is not None:
        rules = (*rules, _NAMED_RULES[compute.quantization])
    return next((rule for rule in rules if re.fullmatch(rule.module_path, path)), None)


def _no_match(what: str, wrong: str, paths: list[str]) -> str:
    listed = "\n  ".join(paths)
    return f"{what} {wrong}; it must match a whole path. The model's products are\n  {listed}"


def _has_rule(product: Product) -> bool:
    return product.equipment.rule is not None


def _has_codes(product: Product) -> bool:
    return product.equipment.stored is not None


def _descriptions(product: Product) -> Iterator[str]:
    rule, stored, adapter = product.equipment.rule, product.equipment.stored, product.equipment.adapter
    if rule is not None:
        yield f"Quantized: {_describe_rule(rule)}"
    if stored is not None:
        tile = "one scale a channel" if stored.tile_size is None else f"a scale for {stored.tile_size} summed elements"
        yield f"Stored: {stored.qtype} kernels, {tile}"
    if adapter is not None:
        yield f"Adapted: rank {adapter.rank}, alpha {adapter.alpha:g}"


def _describe_rule(rule: QuantRule) -> str:
    weight, act, bwd = rule.weight_qtype, rule.act_qtype, rule.bwd_qtype
    if weight and weight == act == bwd:
        text = f"{weight} products, forward and backward"
    else:
        named = (("kernels", weight), ("activations", act), ("gradients", bwd))
        text = ", ".join(f"{qtype} {what}" for what, qtype in named if qtype)
        text += ", forward and backward" if bwd else ", forward"
    if rule.tile_size is not None:
        text += f", scales for {rule.tile_size} summed elements"
    return text if rule.calibration == "absmax" else f"{text}, scales by {rule.calibration}"


def _braced(tree: dict[str, Any]) -> str:
    """Names that lead to the same stand together."""
    ends: dict[str, list[str]] = {}
    for name, below in tree.items():
        ends.setdefault(_braced(below) if below else "", []).append(name)
    texts = []
    for end, names in ends.items():
        joined = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
        texts.append(f"{joined}/{end}" if end else joined)
    return texts[0] if len(texts) == 1 else "{" + ", ".join(texts) + "}"
