"""Reads the text of a compiled program: which collectives run, how often, how large, along which mesh axes.

A program is a set of computations; the entry calls others. What stands in the body of a loop runs as often as the
loop does. Compilers write one collective in several forms, and each is counted once:

    pairs      all-gather-start, all-gather-done: the start counts
    wrapped    async-start calls a computation that holds the collective
    spread     on TPU one collective is spread over several fusions under one channel_id, to run beside other work
    fused      on TPU an all-reduce inside a computation all-reduce-scatter is a reduce-scatter
    sent       on TPU what goes between slices is sent and received through the hosts, by a note on the recv
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from maxlite.estimate.groups import Groups, Layout, axes_of, parse_groups, parse_pairs, parse_slice_groups

_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Kinds of transfers between slices.
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b(pred|token|opaque|(?:bf|f|s|u|c)(\d+)[a-z0-9]*)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?(\S+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CALLERS = ("fusion", "call", "call-start", "async-start", "custom-call")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array of a program: dtype as XLA writes it, and the sizes on one device."""

    dtype: str
    dims: tuple[int, ...]
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        size = self.bits
        for dim in self.dims:
            size *= dim
        return -(-size // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. shape, operands, attributes: text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool


# How often each loop around an instruction runs, the outermost first; None where the text does not say.
Loops = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it.

    kind: all-gather, all-reduce, ... payload: bytes of the whole buffers that the group shares, before or after.
    groups: devices that take part together, or, for collective-permute, `pairs` of (from, to).
    axes: mesh axes along which they differ. loops: those around it.
    """

    kind: str
    payload: int
    groups: Groups
    axes: tuple[str, ...]
    loops: Loops

    @property
    def times(self) -> int:
        """How often it runs in a call of the program; a loop of unknown length counts once."""
        times = 1
        for trips in self.loops:
            times *= trips or 1
        return times

    @property
    def group_size(self) -> int:
        """Devices in a group; 2 for collective-permute."""
        return max(len(group) for group in self.groups)

    @property
    def sent(self) -> int:
        """Bytes that a device sends, at least, each time it runs."""
        others = self.group_size - 1
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload * others // self.group_size


class Program:
    """A parsed program."""

    def __init__(self, text: str) -> None:
        """`text`: of `compiled.as_text()`."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        partitions = _PARTITIONS.search(text[: text.find("\n")])
        # Absent from a program for one device.
        self.num_partitions = int(partitions[1]) if partitions else 1
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if line.endswith("{") and (header := _HEADER.match(line)):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif (start := _NAME.match(line)) is not None:
                instruction = _instruction(start[2], line[start.end() :], bool(start[1]))
                current[instruction.name] = instruction

    def collectives(self, layout: Layout) -> list[Collective]:
        """Returns every collective that runs. layout: of the mesh that the program was compiled for."""
        return list(_Walk(self, layout).computation(self.entry, (), set()))


class _Walk:
    """Goes through the computations in the order in which they run."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout

    def computation(self, name: str, loops: Loops, seen: set[str]) -> Iterator[Collective]:
        """seen: channels met in this computation and its fusions."""
        for instruction in self.program.computations.get(name, {}).values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in _KINDS:
                channel = _attribute(instruction, "channel_id")
                key = f"{kind} {channel or instruction.name}"
                if key not in seen:
                    seen.add(key)
                    yield from self._collective(instruction, kind, name, loops)
            elif instruction.opcode == "recv" and (transfer := _TRANSFER.search(instruction.attributes)):
                yield self._transfer(instruction, _TRANSFERS[transfer[1]], loops)
            elif instruction.opcode == "while":
                yield from self._loop(name, instruction, loops)
            elif instruction.opcode in _CALLERS:
                inner = set() if instruction.opcode == "call" else seen
                for called in _CALLED.findall(instruction.attributes):
                    yield from self.computation(called, loops, inner)
            elif instruction.opcode == "conditional":
                for called in _branches(instruction):
                    yield from self.computation(called, loops, set())

    def _loop(self, caller: str, instruction: Instruction, loops: Loops) -> Iterator[Collective]:
        body = _attribute(instruction, "body").lstrip("%")
        condition = _attribute(instruction, "condition").lstrip("%")
        inner = (*loops, _trip_count(self.program, caller, instruction))
        yield from self.computation(condition, inner, set())
        yield from self.computation(body, inner, set())

    def _collective(self, instruction: Instruction, kind: str, computation: str, loops: Loops) -> Iterator[Collective]:
        if kind == "collective-permute":
            groups: Groups = parse_pairs(_attribute_text(instruction, "source_target_pairs"))
        else:
            groups = parse_groups(_attribute_text(instruction, "replica_groups"), self.program.num_partitions)
        if self.program.num_partitions < self.layout.size:
            groups = self.layout.of_slice(groups)
        payload = sum(shape.bytes for shape in shapes_of(_result(instruction)))
        if kind == "reduce-scatter":
            payload *= max(len(group) for group in groups)
        elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        # A permutation may turn out to move nothing.
        if groups:
            axes = axes_of(groups, self.layout.shape)
            yield Collective(kind, payload, groups, axes, loops)

    def _transfer(self, instruction: Instruction, kind: str, loops: Loops) -> Collective:
        """Between slices. The shape is (what comes, context, token)."""
        groups = self.layout.of_ids(
            parse_slice_groups(_attribute_text(instruction, "_xla_megascale_target").strip('"'))
        )
        shape = next(shapes_of(instruction.shape))
        payload = shape.bytes * (len(groups[0]) if kind == "reduce-scatter" else 1)
        axes = axes_of(groups, self.layout.shape)
        return Collective(kind, payload, groups, axes, loops)


def shapes_of(text: str) -> Iterator[Shape]:
    """Yields the arrays in the text of a shape, which may be a tuple."""
    for name, bits, dims in _SHAPE.findall(text):
        sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
        yield Shape(name, sizes, int(bits) if bits else 8 * _BYTES[name])


def _trip_count(program: Program, caller: str, loop: Instruction) -> int | None:
    """Returns how often the body of a `while` runs, or None where that depends on data.

    XLA notes it on some backends; elsewhere it is read from the condition: counter < bound, by steps of one.
    """
    if noted := _TRIP_COUNT.search(loop.attributes):
        return int(noted[1])
    condition = program.computations.get(_attribute(loop, "condition").lstrip("%"), {})
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or _attribute(root, "direction") != "LT":
        return None
    start, bound = (_value_in_loop(program, caller, loop, condition, operand) for operand in root.operands)
    return None if start is None or bound is None else max(bound - start, 0)


def _value_in_loop(
    program: Program, caller: str, loop: Instruction, condition: Mapping[str, Instruction], name: str
) -> int | None:
    """The integer that an operand of a loop's condition has when the loop begins."""
    instruction = condition[name]
    if instruction.opcode == "constant":
        return _integer(instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    body = program.computations[caller]
    carried = body.get(loop.operands[0])
    index = int(_attribute(instruction, "index"))
    if carried is None or carried.opcode != "tuple":
        return None
    source = body.get(carried.operands[index])
    while source is not None and source.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        source = body.get(source.operands[0])
    return _integer(source) if source is not None and source.opcode == "constant" else None


def _integer(constant: Instruction) -> int | None:
    (text,) = constant.operands or ("",)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    assert opcode is not None, f"no instruction: {rest[:200]}"
    close = _closing(rest, opcode.end() - 1)
    inside = re.sub(r"/\*.*?\*/", "", rest[opcode.end() : close])
    # Operands of some versions carry their shapes: f32[2,3]{1,0} %name.
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside))
    return Instruction(name, rest[:end], opcode[1], operands, rest[close + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced: {text[start : start + 80]}")


def _split(text: str) -> list[str]:
    """Parts between the commas that stand outside brackets."""
    parts, depth, begin = [], 0, 0
    for match in re.compile(r"[()\[\]{},]").finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]


def _attribute(instruction: Instruction, name: str) -> str:
    """The value of `name=`, up to a comma; empty where there is none."""
    found = re.search(rf"\b{name}=([^\s,]+)", instruction.attributes)
    return found[1] if found else ""


def _attribute_text(instruction: Instruction, name: str) -> str:
    """All that follows `name=`."""
    return instruction.attributes.partition(f"{name}=")[2]


def _branches(instruction: Instruction) -> list[str]:
    listed = _BRANCHES.search(instruction.attributes)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return _CALLED.findall(instruction.attributes)


def _result(instruction: Instruction) -> str:
    """The shape of what comes out: of a start, which also holds its operands, the second part."""
    if not instruction.opcode.endswith("-start") or not instruction.shape.startswith("("):
        return instruction.shape
    if instruction.opcode == "all-reduce-start":
        return instruction.shape
    return _split(instruction.shape[1:-1])[1]
