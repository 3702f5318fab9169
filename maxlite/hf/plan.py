"""A family's table worked out for one model: every tensor of the files and the parameters it holds."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.layers import LayerPlace
from maxlite.errors import ConversionError
from maxlite.hf.rules import Rule, Table
from maxlite.hf.source import Source, listing, row_ranges
from maxlite.hf.transforms import Shape, Transform

_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Entries of two tensors that are compared at once.
_COMPARED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Slot:
    """Part of a parameter: `path`[`index`], the index being the repeat of a layer, the number of an expert, or none.

    shape: of that part.
    """

    path: str
    index: tuple[int, ...]
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of the files, and the parts of parameters that it holds.

    shape: the tensor's.
    """

    tensor: str
    shape: Shape
    transform: Transform
    slots: tuple[Slot, ...]
    float32: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every tensor of one model.

    parameters: path -> shape and dtype of each of our parameters, in the tree's order.
    bundles: parameters that share tensors (most stand alone), and their tensors.
    """

    table: Table
    parameters: dict[str, Any]
    bundles: dict[tuple[str, ...], list[Piece]]

    @property
    def pieces(self) -> list[Piece]:
        """All tensors."""
        return [piece for pieces in self.bundles.values() for piece in pieces]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A tensor of the files that is knowingly not read, and why."""

    tensor: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of `convert-hf --explain`: a tensor of the files, what is done to it, and one of our parameters."""

    tensor: str
    tensor_shape: Shape
    transform: str
    parameter: str
    parameter_shape: Shape


def plan_tensors(table: Table, abstract_params: Any, places: Sequence[LayerPlace]) -> Plan:
    """Works out which tensors hold which parameters of one model.

    abstract_params: nested dict of arrays or their shapes, the layers' stacked over the repeats of their group.
    places: where each layer lies, first to last.

    Raises:
        ConversionError: the family's files have no place for a parameter.
    """
    parameters = leaf_paths(abstract_params)
    bundles: dict[tuple[str, ...], list[Piece]] = {}
    covered: dict[str, str] = {}
    for rule in table.rules:
        for piece in _pieces_of(rule, parameters, places):
            paths = tuple(slot.path for slot in piece.slots)
            bundles.setdefault(paths, []).append(piece)
            for slot in piece.slots:
                other = covered.setdefault(f"{slot.path}{slot.index}", piece.tensor)
                assert other == piece.tensor, f"{other} and {piece.tensor} both hold {slot.path}"
    shared = [path for paths in bundles for path in paths]
    assert len(shared) == len(set(shared)), f"{table.name}: a parameter shares tensors with different others"
    uncovered = [f"{path} {list(leaf.shape)}" for path, leaf in parameters.items() if path not in shared]
    if uncovered:
        raise ConversionError(
            f"Hugging Face files of {table.name} models have no tensor for these parameters:\n  {listing(uncovered)}\n"
            "Change the keys of the model that call for them, or choose another family."
        )
    first = {path: number for number, path in enumerate(parameters)}
    ordered = sorted(bundles.items(), key=lambda bundle: first[bundle[0][0]])
    return Plan(table, parameters, dict(ordered))


def explain(plan: Plan) -> list[Row]:
    """Returns a row for every tensor and parameter, tensors in the order of the files."""
    rows = []
    for piece in sorted(plan.pieces, key=lambda piece: natural_order(piece.tensor)):
        for slot in piece.slots:
            index = "".join(f"[{number}]" for number in slot.index)
            rows.append(Row(piece.tensor, piece.shape, piece.transform.text, slot.path + index, slot.shape))
    return rows


def check_tensors(plan: Plan, source: Source) -> list[Skipped]:
    """Compares the tensors of a source with a plan before anything is read, and returns those to be skipped.

    Raises:
        ConversionError: names every kind of tensor that is missing, not known or not as the model wants it.
    """
    pieces = {piece.tensor: piece for piece in plan.pieces}
    copies = {tensor: of for tensor, of in plan.table.copies if tensor not in pieces}
    missing = [f"{name} {list(piece.shape)} is missing" for name, piece in pieces.items() if name not in source.tensors]
    skipped, unfit, stray = [], [], []
    for name, tensor in source.tensors.items():
        if name in pieces:
            unfit += _misfit(name, pieces[name].shape, source)
        elif copies.get(name) in source.tensors:
            unfit += _difference(name, copies[name], source)
            skipped.append(Skipped(name, f"it repeats {copies[name]}"))
        elif reasons := [ignored.reason for ignored in plan.table.ignored if ignored.matches(name)]:
            skipped.append(Skipped(name, reasons[0]))
        else:
            stray.append(f"{name} {list(tensor.shape)} in {tensor.file.name} is not part of this model")
    if missing or unfit or stray:
        texts = [listing(problems) for problems in (missing, unfit, stray) if problems]
        raise ConversionError(
            f"the tensors in {source.place} are not those of this {plan.table.name} model:\n  "
            + "\n  ".join(texts)
            + "\nIts config.json and its weights disagree, or some files are missing or of another model."
        )
    return skipped


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Returns a sort key by which layer 2 comes before layer 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in name.split("."))


def _pieces_of(rule: Rule, parameters: dict[str, Any], places: Sequence[LayerPlace]) -> Iterator[Piece]:
    """Yields the tensors of a rule: of every layer that has its parameters, of every expert."""
    for layer, place in enumerate(places) if "{layer}" in rule.tensor else [(None, None)]:
        block = "" if place is None else f"group_{place.group}/layers/block_{place.position}/"
        index = () if place is None else (place.repeat,)
        paths, needed = (
            tuple(path if path.startswith("group_") else block + path for path in names)
            for names in (rule.paths, rule.where)
        )
        if not all(path in parameters for path in (*paths, *needed)):
            continue
        experts = [()]
        if "{expert}" in rule.tensor:
            experts = [(expert,) for expert in range(parameters[paths[0]].shape[len(index)])]
        for expert in experts:
            at = index + expert
            slots = tuple(Slot(path, at, tuple(parameters[path].shape[len(at) :])) for path in paths)
            name = rule.tensor.format(layer=layer, expert=expert[0] if expert else None)
            shape = rule.transform.file_shape(tuple(slot.shape for slot in slots))
            yield Piece(name, shape, rule.transform, slots, rule.float32)


def _misfit(name: str, shape: Shape, source: Source) -> list[str]:
    tensor = source.tensors[name]
    where = f"{name} in {tensor.file.name}"
    if tuple(tensor.shape) != shape:
        return [f"{where} is {list(tensor.shape)}, this model's is {list(shape)}"]
    if tensor.dtype.name not in _FLOATS:
        return [f"{where} is {tensor.dtype.name}: allowed are {', '.join(_FLOATS)}, or a known quantization_config"]
    return []


def _difference(name: str, of: str, source: Source) -> list[str]:
    """Whether a tensor that may only repeat another one differs from it."""
    tensor, original = source.tensors[name], source.tensors[of]
    text = f"{name} in {tensor.file.name} differs from {of}, but this model has one tensor for both (tied)"
    if tensor.shape != original.shape or tensor.dtype != original.dtype:
        return [text]
    for start, stop in row_ranges(tensor.shape, _COMPARED):
        if source.rows(name, start, stop).tobytes() != source.rows(of, start, stop).tobytes():
            return [text]
    return []
