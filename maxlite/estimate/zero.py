"""What one device holds between two steps, by how much of it is split over the data-parallel devices.

DP copies all; ZeRO-1 splits the optimizer's state, ZeRO-2 the gradients too, ZeRO-3 the parameters too
(arXiv:1910.02054).
"""

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes of a whole state over all devices that share it: parameters, gradients, optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


class ZeroRow(NamedTuple):
    """Bytes on one device."""

    stage: str
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def zero_table(state: StateBytes, num_devices: int) -> list[ZeroRow]:
    """Returns the rows DP, ZeRO-1, ZeRO-2 and ZeRO-3 for `num_devices` ways of splitting."""
    parameters, gradients, optimizer = state
    return [
        ZeroRow("DP", parameters, gradients, optimizer),
        ZeroRow("ZeRO-1", parameters, gradients, optimizer / num_devices),
        ZeroRow("ZeRO-2", parameters, gradients / num_devices, optimizer / num_devices),
        ZeroRow("ZeRO-3", *(part / num_devices for part in state)),
    ]
