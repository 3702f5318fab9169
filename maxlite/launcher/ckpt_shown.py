"""What `maxlite ckpt` prints: rows and lines for people, plain values for JSON."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from maxlite.checkpoint.compare import Comparison
from maxlite.checkpoint.leaves import SavedSharding
from maxlite.checkpoint.listing import ListedStep
from maxlite.checkpoint.record import Leaf, StepRecord
from maxlite.checkpoint.verify import Verified


def aligned(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Returns a table as text, one line a row however long. right: titles of the columns that end alike."""
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    pads = [str.rjust if title in right else str.ljust for title in titles]
    shown = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in shown)


def step_table(steps: Sequence[ListedStep], kept: Mapping[int, str], metric: str) -> str:
    """Returns one row a save. kept: step -> why. metric: a column of its own where a step has it."""
    has_metric = any(entry.record is not None and metric in entry.record.metrics for entry in steps)
    titles = ["step", "saved", "size", *([metric] if has_metric else []), "processes", "complete by", "state", "kept"]
    rows = []
    for entry in steps:
        record, complete = entry.record, entry.problem is None
        name = entry.folder.name if entry.step is None else str(entry.step)
        cells = [name, "" if record is None else _time_text(record.time), size_text(entry.num_bytes)]
        if has_metric:
            value = None if record is None else record.metrics.get(metric)
            cells.append("" if value is None else f"{value:.6g}")
        cells += ["", ""] if record is None else [str(record.num_processes), record.atomicity]
        why = kept.get(entry.step, "no, goes with the next save") if entry.step is not None and complete else ""
        rows.append([*cells, entry.problem or "complete", why])
    return aligned(titles, rows, right=("size", "processes", metric))


def leaf_table(leaves: Mapping[str, Leaf], shardings: Mapping[str, SavedSharding | None]) -> str:
    """Returns one row an array: what it is, and along which axes of the mesh each dimension was cut."""
    rows = [
        (path, shape_text(leaf.shape), leaf.dtype, size_text(leaf.num_bytes()), _cut_text(shardings[path]))
        for path, leaf in leaves.items()
    ]
    return aligned(("array", "shape", "dtype", "size", "cut along"), rows, right=("size",))


def about_step(record: StepRecord) -> Iterator[str]:
    """Yields lines: when and by whom a step was saved, its versions and metrics."""
    axes = " ".join(f"{axis}={size}" for axis, size in record.mesh.items() if size > 1) or "one device"
    noun = "process" if record.num_processes == 1 else "processes"
    yield f"saved {_time_text(record.time)} by {record.num_processes} {noun} on {axes}, complete by {record.atomicity}"
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in record.versions.items())
    if record.metrics:
        yield "metrics: " + ", ".join(f"{tag} {value:.6g}" for tag, value in record.metrics.items())


def difference_lines(found: Comparison, first: str, second: str) -> Iterator[str]:
    """Yields a line for each array in which two steps differ, and a last one for all that do not."""
    for where, alone in ((first, found.only_first), (second, found.only_second)):
        for path, leaf in alone.items():
            yield f"{path}: only in {where}, {shape_text(leaf.shape)} {leaf.dtype}"
    for path, (one, other) in found.shapes.items():
        yield f"{path}: shape {shape_text(one.shape)} -> {shape_text(other.shape)}"
    for path, (one, other) in found.dtypes.items():
        yield f"{path}: dtype {one.dtype} -> {other.dtype}"
    for row in found.values:
        strange = f", {row.not_finite:,} of them not finite" if row.not_finite else ""
        yield f"{row.path}: {row.count:,} of {row.total:,} values differ{strange}, by at most {row.largest:.4g}"
    yield f"{found.equal} of {found.equal + len(found.values)} arrays of one shape have equal values"


def verified_lines(row: Verified) -> Iterator[str]:
    """Yields one line a step, and below it one for each problem."""
    state = "not as it was saved" if row.problems else "sound"
    yield f"{row.folder.name}: {state}, {row.num_arrays} arrays, {size_text(row.num_bytes)} in {row.seconds:.1f} s"
    yield from (f"  {problem}" for problem in row.problems)


def step_as_json(entry: ListedStep, kept: Mapping[int, str]) -> dict[str, Any]:
    """Returns what is known of a save."""
    complete = entry.problem is None
    return {
        "step": entry.step,
        "folder": str(entry.folder),
        "complete": complete,
        "problem": entry.problem,
        "num_bytes": entry.num_bytes,
        "kept": None if entry.step is None else kept.get(entry.step),
        **({} if entry.record is None else record_as_json(entry.record)),
    }


def record_as_json(record: StepRecord) -> dict[str, Any]:
    """Returns a record without its lists of files and arrays; JSON has no number for what is not finite."""
    about = {name: value for name, value in record.as_json().items() if name not in ("files", "leaves")}
    finite = {tag: value if math.isfinite(value) else None for tag, value in record.metrics.items()}
    return about | {"metrics": finite}


def leaf_as_json(leaf: Leaf) -> dict[str, Any]:
    """Returns what was saved of an array."""
    return dataclasses.asdict(leaf) | {"num_bytes": leaf.num_bytes()}


def sharding_as_json(sharding: SavedSharding | None) -> dict[str, Any]:
    """Returns under `sharding` the mesh axes of each dimension; null for an array that was on no mesh."""
    return {"sharding": None if sharding is None else [list(axes) for axes in sharding.spec]}


def comparison_as_json(found: Comparison) -> dict[str, Any]:
    """Returns a comparison; each pair is [first, second]."""

    def pairs(of: Mapping[str, tuple[Leaf, Leaf]]) -> dict[str, Any]:
        return {path: [leaf_as_json(one), leaf_as_json(other)] for path, (one, other) in of.items()}

    return {
        "only_first": {path: leaf_as_json(leaf) for path, leaf in found.only_first.items()},
        "only_second": {path: leaf_as_json(leaf) for path, leaf in found.only_second.items()},
        "shapes": pairs(found.shapes),
        "dtypes": pairs(found.dtypes),
        "values": [row._asdict() for row in found.values],
        "equal": found.equal,
    }


def size_text(num_bytes: int) -> str:
    """Returns a size for people: 132 B, 16.4 MB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


def shape_text(shape: Sequence[int | str]) -> str:
    """Returns a shape for people: [2, 64]."""
    return "[" + ", ".join(map(str, shape)) + "]"


def _cut_text(sharding: SavedSharding | None) -> str:
    """The mesh axes of more than one device, for each dimension."""
    if sharding is None:
        return "no mesh"
    entries = ["*".join(axis for axis in axes if sharding.mesh[axis] > 1) or "-" for axes in sharding.spec]
    return shape_text(entries) if set(entries) - {"-"} else "copied"


def _time_text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
