"""Bytes on one device: of the state, by its shardings, and of a compiled program, by the compiler's own count."""

import dataclasses
import math
import re
from typing import Any

import jax

from maxlite.estimate.zero import StateBytes
from maxlite.train.state import TrainState

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_AMOUNT = r"([\d.]+)([BKMGT])?"
# How the TPU compiler says that a program does not fit, in the versions known.
_EXCESSES = (
    re.compile(rf"Used {_AMOUNT} of \S+ hbm"),
    re.compile(rf"\({_AMOUNT}\) exceeds available HBM"),
)


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of a compiled program on one device.

    arguments: what goes in, and for a training step also what comes out of it in the same place. results: what comes
    out beside. temporaries: activations, gradients and gathered weights, at the worst moment. code: the program.
    host: what waits in the host's memory.
    """

    arguments: int
    results: int
    temporaries: int
    code: int
    host: int

    @property
    def peak(self) -> int:
        """All that is on the device at the worst moment."""
        return self.arguments + self.results + self.temporaries + self.code


def program_memory(compiled: jax.stages.Compiled) -> ProgramMemory:
    """Reads what the compiler planned."""
    plan: Any = compiled.memory_analysis()
    return ProgramMemory(
        arguments=plan.argument_size_in_bytes,
        results=max(plan.output_size_in_bytes - plan.alias_size_in_bytes, 0),
        temporaries=plan.temp_size_in_bytes,
        code=plan.generated_code_size_in_bytes,
        host=plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes,
    )


def whole_state(state: TrainState, gradients: Any) -> StateBytes:
    """Bytes of a state and its gradients over all devices."""
    return StateBytes(_bytes(state.params), _bytes(gradients), _bytes(state.opt_state))


def bytes_needed(message: str) -> float | None:
    """Reads the bytes needed from what the compiler says of a program that does not fit."""
    for pattern in _EXCESSES:
        if match := pattern.search(message):
            number, unit = match.groups()
            return float(number) * _UNITS[unit or "B"]
    return None


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
