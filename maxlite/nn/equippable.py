"""What Linear and ExpertLinear have in common: a kernel that may be adapted, or stored in few bits."""

from flax import nnx

from maxlite.nn.equipment import PLAIN, Equipment
from maxlite.nn.lora import add_adapter
from maxlite.nn.stored import store_kernel


class Equippable(nnx.Module):
    """A product with an `equation` and a `kernel`."""

    equippable = True

    def __init__(self) -> None:
        """Begins with its kernel alone."""
        self.equipment = PLAIN

    def equip(self, equipment: Equipment, *, rngs: nnx.Rngs | None) -> None:
        """Gives the product what its path asks for: an adapter beside the kernel, or codes in place of it."""
        self.equipment = equipment
        if equipment.adapter is not None:
            add_adapter(self, equipment.adapter, rngs=rngs)
        if equipment.stored is not None:
            store_kernel(self, equipment.stored, rngs=rngs)
