"""Adapters of a run <-> a folder as the library PEFT keeps them, without the weights that they stand beside.

A linear layer of the files is [out, in] where our kernel is [in..., out...], so that PEFT's lora_A [r, in] is our
lora_a turned round, and its lora_B [out, r] our lora_b.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlite.checkpoint.restore import parameter_reader
from maxlite.config.schema import Config
from maxlite.data.json_files import read_json, write_json
from maxlite.data.model_folder import ORIGINALS
from maxlite.errors import ConversionError
from maxlite.hf.convert import export_plan, host_abstract
from maxlite.hf.kernels import KERNEL
from maxlite.hf.peft_json import ADAPTER_CONFIG, ADAPTER_FILE, AdapterConfig, adapter_config
from maxlite.hf.plan import Piece, Plan
from maxlite.hf.run_files import run_of
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.shards import NewTensor, make_shard
from maxlite.hf.source import listing
from maxlite.hf.writer import new_folder, write_array
from maxlite.model.build import Model, build_model
from maxlite.model.equip import Product

_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_PART = re.compile(r"(.*)\.lora_(A|B)\.weight")


class Place(NamedTuple):
    """The product, and the repeat of its group, that a linear layer of the files is."""

    product: Product
    repeat: int


class Found(NamedTuple):
    """Adapters of a folder. pattern: lora_module_path of their products. arrays: path of a parameter -> its value."""

    pattern: str
    arrays: dict[str, np.ndarray]


def export_adapters(config: Config, source: Path, destination: Path) -> tuple[AdapterConfig, int]:
    """Writes the adapters of a run (or of RUN/checkpoints/<n>) as a folder that PEFT opens.

    Returns: what its adapter_config.json says, and how many layers have an adapter.

    Raises:
        ConversionError: the run has none, PEFT has no place for one, or the destination exists.
        CheckpointError: there are no parameters.
    """
    model = build_model(config.model, config.compute)
    adapted = [product for product in model.products if product.equipment.adapter is not None]
    if not adapted:
        raise ConversionError(f"{source} has no adapters (lora_rank=0); without --adapters its weights are written.")
    plan = export_plan(config, source)
    places = _adapted_places(plan, adapted)
    described = AdapterConfig(config.compute.lora_rank, config.compute.lora_alpha, _base_of(config, run_of(source)))
    with new_folder(destination) as unfinished:
        read = parameter_reader(source, host_abstract(model))
        tensors = {}
        for product in adapted:
            lora_a, lora_b = (np.asarray(read(f"{product.params_path}/{name}")) for name in ("lora_a", "lora_b"))
            for module, place in places.items():
                if place.product is product:
                    tensors |= _to_files(module, lora_a[place.repeat], lora_b[place.repeat])
        _write_file(unfinished / ADAPTER_FILE, tensors)
        write_json(unfinished / ADAPTER_CONFIG, dict(adapter_config(described, _target_modules(plan, places))))
    return described, len(places)


def read_adapters(folder: Path, config: AdapterConfig, plan: Plan, model: Model) -> Found:
    """Returns the adapters in a folder, float as they are in the file, stacked over the layers.

    plan, model: of the model that they are for, without adapters.

    Raises:
        ConversionError: names tensors that are missing, not known or misshapen.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ConversionError(f"{folder} has no {ADAPTER_FILE}; save its adapters with safe_serialization=True.")
    source = SafetensorsSource(file)
    places = _places(plan, model.products)
    parts: dict[Place, dict[str, np.ndarray]] = {}
    stray = []
    for name, tensor in source.tensors.items():
        module, part = _module_of(name, plan)
        if module not in places:
            stray.append(f"{name} {list(tensor.shape)}")
            continue
        place = places[module]
        wanted = _file_shapes(place.product, config.rank)[part]
        if tensor.shape != wanted:
            raise ConversionError(f"{name} in {file} is {list(tensor.shape)}, this model's is {list(wanted)}")
        parts.setdefault(place, {})[part] = source.rows(name, 0, tensor.shape[0])
    if stray or not parts:
        problem = listing(stray) if stray else "there are none"
        raise ConversionError(f"the adapters in {file} are not of this {plan.table.name} model's layers:\n  {problem}")
    return _stacked(file, parts, config.rank, model)


def _stacked(file: Path, parts: Mapping[Place, Mapping[str, np.ndarray]], rank: int, model: Model) -> Found:
    adapted = [product for product in model.products if any(place.product is product for place in parts)]
    arrays = {}
    for product in adapted:
        layers = [parts.get(Place(product, repeat), {}) for repeat in range(product.repeats)]
        if any(layer.keys() != {"A", "B"} for layer in layers):
            raise ConversionError(
                f"{file} has adapters of some of the layers of {product.path} alone; here all or none have one."
            )
        summed = len(product.summed_dims)
        sizes = {"A": (*product.shape[:summed], rank), "B": (rank, *product.shape[summed:])}
        for part, name in (("A", "lora_a"), ("B", "lora_b")):
            stacked = np.stack([layer[part].T.reshape(sizes[part]) for layer in layers])
            arrays[f"{product.params_path}/{name}"] = stacked
    return Found(_pattern([product.path for product in adapted], model), arrays)


def _pattern(paths: list[str], model: Model) -> str:
    """A regular expression that matches these paths and no others of the model; short, if one does."""
    short = ".*/(" + "|".join(dict.fromkeys(path.split("/", 2)[2] for path in paths)) + ")"
    if [product.path for product in model.products if re.fullmatch(short, product.path)] == paths:
        return short
    return "|".join(paths)


def _places(plan: Plan, products: Iterable[Product]) -> dict[str, Place]:
    """Linear layers of the files that are one of our products each, by their names."""
    by_path = {product.params_path + KERNEL: product for product in products}
    places = {}
    for piece in plan.pieces:
        if piece.slots[0].path in by_path and _is_linear(piece, by_path[piece.slots[0].path]):
            places[piece.tensor.removesuffix(_WEIGHT)] = Place(by_path[piece.slots[0].path], piece.slots[0].index[0])
    return places


def _is_linear(piece: Piece, product: Product) -> bool:
    return len(piece.slots) == 1 and not product.is_experts and piece.tensor.endswith(_WEIGHT)


def _adapted_places(plan: Plan, adapted: list[Product]) -> dict[str, Place]:
    places = _places(plan, adapted)
    reached = {place.product.path for place in places.values()}
    missing = [product.path for product in adapted if product.path not in reached]
    if missing:
        raise ConversionError(
            f"PEFT has no place for the adapters of\n  {listing(missing)}\nwhich share a tensor with others in the "
            f"files of {plan.table.name} models. Without --adapters they are merged into the weights; or train with a "
            "lora_module_path that leaves them out, as .*/attention/.*"
        )
    return places


def _module_of(name: str, plan: Plan) -> tuple[str | None, str]:
    """The linear layer of the plan that a tensor of a file of adapters is of, and which part; None if of none."""
    found = _PART.fullmatch(name.removeprefix(_PREFIX))
    if found is None:
        return None, ""
    tensor = found[1] + _WEIGHT
    for pattern, replacement in plan.table.spellings:
        tensor = re.sub(pattern, replacement, tensor)
    return tensor.removesuffix(_WEIGHT), found[2]


def _file_shapes(product: Product, rank: int) -> dict[str, tuple[int, int]]:
    summed = len(product.summed_dims)
    inputs, outputs = (int(np.prod(sizes)) for sizes in (product.shape[:summed], product.shape[summed:]))
    return {"A": (rank, inputs), "B": (outputs, rank)}


def _to_files(module: str, lora_a: np.ndarray, lora_b: np.ndarray) -> dict[str, np.ndarray]:
    rank = lora_b.shape[0]
    name = f"{_PREFIX}{module}.lora_"
    return {f"{name}A.weight": lora_a.reshape(-1, rank).T, f"{name}B.weight": lora_b.reshape(rank, -1).T}


def _target_modules(plan: Plan, places: Mapping[str, Place]) -> set[str]:
    """The last parts of the names, if no other layer has one of them; else the whole names."""
    endings = {module.rpartition(".")[2] for module in places}
    modules = {piece.tensor.removesuffix(_WEIGHT) for piece in plan.pieces if piece.tensor.endswith(_WEIGHT)}
    meant = {module for module in modules if module.rpartition(".")[2] in endings}
    return endings if meant == places.keys() else set(places)


def _base_of(config: Config, run: Path) -> str | None:
    """The model that the adapters are for, if its folder is known."""
    kept = run / ORIGINALS / ADAPTER_CONFIG
    if kept.is_file():
        return read_json(kept, ConversionError).get("base_model_name_or_path")
    folder = config.checkpoint.load_hf
    return None if folder is None else str(Path(folder).expanduser().absolute())


def _write_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    new = [NewTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    for name, location in make_shard(file, new).items():
        write_array(location, np.ascontiguousarray(tensors[name]))
