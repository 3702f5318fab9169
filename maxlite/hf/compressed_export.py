"""From kernels in few bits to the tensors of compressed-tensors: the same codes and scales in the files' layout."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.boxes import whole
from maxlite.hf.chunks import Progress, places_of
from maxlite.hf.compressed import PACKED, SCALE, SHAPE, pack, packed_shape
from maxlite.hf.compressed_json import Scheme, quantization_config
from maxlite.hf.copies import copy_values
from maxlite.hf.kernels import KERNEL, stacked_dims
from maxlite.hf.plan import Piece, Plan, Slot
from maxlite.hf.shards import Location, NewTensor
from maxlite.hf.source import listing
from maxlite.hf.writer import write_array
from maxlite.model.build import Model
from maxlite.model.equip import Product
from maxlite.nn.equipment import StoredForm
from maxlite.ops.stored import expand_scale, scale_shape, unpack

# What type, and how many bits of it, our types are there.
_STORED_AS = {"int8": ("int", 8), "int4": ("int", 4), "fp8": ("float", 8)}
_SCALE_BITS, _BFLOAT16_BITS = 32, 16
# Compiled as a whole: one small program for each shape.
_unpack = jax.jit(unpack, static_argnums=(1, 2))
_expand_scale = jax.jit(expand_scale, static_argnums=(1, 2))
_WEIGHT = ".weight"
_NUMBER = r"\d+"
_LAYERS_AND_EXPERTS = re.compile(r"\.\d+(?=\.)")


class CompressedPlan(NamedTuple):
    """What of a model goes into files as floats, and what in few bits.

    plain: the former. bundles: parameters that share tensors, and these tensors, of the latter.
    products: of each such parameter. scheme: how all of them are stored; None where there are none.
    """

    plain: Plan
    bundles: dict[tuple[str, ...], list[Piece]]
    products: dict[str, Product]
    scheme: Scheme | None

    @property
    def pieces(self) -> list[Piece]:
        """The tensors in few bits."""
        return [piece for pieces in self.bundles.values() for piece in pieces]


def plan_compressed(plan: Plan, model: Model) -> CompressedPlan:
    """Divides a plan of float kernels by what the products of `model` are stored as.

    What an adapter adds has no place among codes: a model with adapters goes into files as floats.

    Raises:
        ConversionError: compressed-tensors has no form for a stored product, or the family's files have not.
    """
    stored = {product.params_path + KERNEL: product for product in model.products if product.equipment.stored}
    if not stored or model.compute.lora_rank:
        return CompressedPlan(plan, {}, {}, None)
    qtype = str(model.compute.weight_quantization)
    problems = [] if qtype in _STORED_AS else [f"{qtype} is none of its types; {', '.join(_STORED_AS)} are"]
    compressed = {paths: pieces for paths, pieces in plan.bundles.items() if any(path in stored for path in paths)}
    for paths, pieces in compressed.items():
        problems += _misfits(pieces[0], [path for path in paths if path not in stored])
    if problems:
        raise ConversionError(
            f"compressed-tensors cannot hold this model as it is stored:\n  {listing(problems)}\n"
            "Quantize it again with another method, or leave those products out by weight_quant_module_path."
        )
    plain = {paths: pieces for paths, pieces in plan.bundles.items() if paths not in compressed}
    scheme = _scheme(qtype, list(stored.values()))
    _check_size(scheme, list(stored.values()))
    return CompressedPlan(dataclasses.replace(plan, bundles=plain), compressed, stored, scheme)


def compressed_tensors(plan: CompressedPlan) -> list[NewTensor]:
    """Returns the tensors of the files that hold codes, scales and shapes."""
    return [tensor for piece in plan.pieces for tensor in _tensors_of(piece, plan.scheme)] if plan.scheme else []


def write_compressed(
    plan: CompressedPlan, read: Callable[[str], jax.Array], locations: dict[str, Location], progress: Progress
) -> None:
    """Writes the tensors of `compressed_tensors`.

    read: path -> value of a parameter of the stored model, called once for each.
    """
    for paths, pieces in plan.bundles.items():
        codes, scales = {}, {}
        for path in paths:
            product, parent = plan.products[path], path.removesuffix(KERNEL)
            stored = read(f"{parent}/codes")
            codes[path] = np.asarray(_unpack(stored, stacked_dims(product), _form(product).qtype))
            scales[path] = np.asarray(read(f"{parent}/scale"))
        for piece in pieces:
            for name, array in _arrays_of(piece, plan, (codes, scales)):
                write_array(locations[name], array)
                progress(array.nbytes)


def remarks(plan: CompressedPlan) -> list[str]:
    """Returns lines on what the files need more bytes for than the run."""
    tiles = {_tile(product) for product in plan.products.values()}
    if plan.scheme is None or plan.scheme.columns in (None, *tiles):
        return []
    given = ", ".join(map(str, sorted(tiles)))
    return [
        f"compressed-tensors has one size of groups for all: scales are repeated for every {plan.scheme.columns} "
        f"elements (here they are for {given}). Another weight_quant_tile_size may fit better."
    ]


def describe_compressed(plan: CompressedPlan) -> dict[str, Any]:
    """Returns what config.json says of the files besides; nothing if they hold floats only."""
    if plan.scheme is None:
        return {}
    few = {piece.tensor.removesuffix(_WEIGHT) for piece in plan.pieces}
    # Matrices of floats, which transformers has as linear layers too; a tied one is in no file.
    plain = {
        piece.tensor.removesuffix(_WEIGHT)
        for piece in plan.plain.pieces
        if piece.tensor.endswith(_WEIGHT) and len(piece.shape) == 2 and piece.slots[0].path.endswith(KERNEL)
    }
    plain |= {copy.removesuffix(_WEIGHT) for copy, _ in plan.plain.table.copies}
    return {"quantization_config": quantization_config(plan.scheme, _patterns(plain, few))}


def _misfits(piece: Piece, floats: list[str]) -> list[str]:
    """Why a tensor cannot be kept in few bits; floats: those of its parameters that are not."""
    held = f"{piece.tensor} {list(piece.shape)}, which holds {' and '.join(slot.path for slot in piece.slots)},"
    problems = [f"{held} would be part floats: {', '.join(floats)}"] if floats else []
    if len(piece.shape) != 2 or not piece.tensor.endswith(_WEIGHT):
        problems.append(f"{held} is not the weight of a linear layer")
    return problems


def _scheme(qtype: str, products: list[Product]) -> Scheme:
    """One for all, since a reader of merged experts knows no other: scales for as many columns as divide all tiles."""
    sizes = [(_tile(product), _num_summed(product)) for product in products]
    # Where the last tile of a channel is shorter, they have a size in common all the same.
    columns = math.gcd(*(size for pair in sizes for size in pair))
    channels = all(tile == total for tile, total in sizes)
    kind, bits = _STORED_AS[qtype]
    return Scheme(kind, bits, kind == "int", 1, None if channels else columns)


def _check_size(scheme: Scheme, products: list[Product]) -> None:
    """Raises ConversionError if scales that are repeated would take more than the kernels do in bfloat16."""
    if scheme.columns is None or scheme.bits + _SCALE_BITS / scheme.columns <= _BFLOAT16_BITS:
        return
    tiles, sums = (sorted({count(product) for product in products}) for count in (_tile, _num_summed))
    raise ConversionError(
        f"compressed-tensors has one size of groups for all: tiles of {', '.join(map(str, tiles))} elements would "
        f"become groups of {scheme.columns}, and the folder larger than with floats. Quantize it again with one scale "
        "a channel (weight_quant_tile_size=null), or with a size that divides what the products sum over: "
        f"{', '.join(map(str, sums))}."
    )


def _tile(product: Product) -> int:
    """How many summed elements share a scale."""
    scales = scale_shape(product.shape, product.summed_dims, _form(product).tile_size)
    return -(-_num_summed(product) // math.prod(scales[place] for place in product.summed_dims))


def _num_summed(product: Product) -> int:
    return math.prod(product.shape[place] for place in product.summed_dims)


def _form(product: Product) -> StoredForm:
    assert product.equipment.stored is not None, product.path
    return product.equipment.stored


def _tensors_of(piece: Piece, scheme: Scheme) -> Iterator[NewTensor]:
    name, shape = piece.tensor, piece.shape
    if scheme.packed:
        yield NewTensor(name + PACKED, packed_shape(shape, scheme.bits), np.dtype(np.int32))
        yield NewTensor(name + SHAPE, (2,), np.dtype(np.int64))
    else:
        yield NewTensor(name, shape, np.dtype(ml_dtypes.float8_e4m3fn))
    yield NewTensor(name + SCALE, scheme.scale_shape(shape), np.dtype(np.float32))


def _arrays_of(
    piece: Piece, plan: CompressedPlan, held: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the tensors of `_tensors_of`; held: path -> codes, path -> scales, both stacked."""
    name, scheme = piece.tensor, plan.scheme
    assert scheme is not None
    codes, scales = held
    values = _laid_out(piece, {slot.path: codes[slot.path][slot.index] for slot in piece.slots})
    if scheme.packed:
        yield name + PACKED, pack(values, scheme.bits)
        yield name + SHAPE, np.array(piece.shape, np.int64)
    else:
        yield name, values
    parts = {slot.path: _spread(scales[slot.path][slot.index], slot, plan.products[slot.path]) for slot in piece.slots}
    spread = _laid_out(piece, parts)
    size = scheme.columns or piece.shape[1]
    reduced = np.ascontiguousarray(spread[:, ::size])
    assert (spread == np.repeat(reduced, size, axis=1)).all(), f"{name} has scales that differ within a group"
    yield name + SCALE, reduced


def _laid_out(piece: Piece, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Returns a tensor of the files that is made of these parts, one a slot."""
    boxes = {}
    for slot in piece.slots:
        lead = tuple((entry, entry + 1) for entry in slot.index)
        held = np.ascontiguousarray(parts[slot.path]).reshape((1,) * len(lead) + slot.shape)
        boxes[slot.path] = {lead + whole(slot.shape): held}
    laid = np.empty(piece.shape, next(iter(parts.values())).dtype)
    for region, view in places_of(piece, boxes):
        copy_values(laid[(*region, ...)], view)
    return laid


def _spread(scale: np.ndarray, slot: Slot, product: Product) -> np.ndarray:
    """Returns the scale of each element of a slot's kernel."""
    # Of experts a slot has one, and a dimension less.
    fewer = len(product.shape) - len(slot.shape)
    dims = tuple(place - fewer for place in product.summed_dims)
    return np.broadcast_to(np.asarray(_expand_scale(jnp.asarray(scale), slot.shape, dims)), slot.shape)


def _patterns(modules: set[str], others: set[str]) -> list[str]:
    """Returns names, and expressions for all layers or experts at once, that match all modules and none of others."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(modules):
        kinds.setdefault(_LAYERS_AND_EXPERTS.sub(".#", name), []).append(name)
    elsewhere = {_LAYERS_AND_EXPERTS.sub(".#", name) for name in others}
    patterns: list[str] = []
    for kind, names in kinds.items():
        numbered = "#" in kind and kind not in elsewhere
        patterns += [f"re:{_NUMBER.join(map(re.escape, kind.split('#')))}$"] if numbered else names
    return patterns
