"""What a product of a layer has besides its kernel: rounding rules, a stored form, an adapter. Decided by its path."""

import dataclasses

from maxlite.config.quant_schema import QuantRule


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """How a kernel is stored: one of STORED_TYPES, and how many summed elements share a scale (None: all)."""

    qtype: str
    tile_size: int | None


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Low-rank weights that are added to a kernel, alpha / rank times (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True)
class Equipment:
    """Of one product. path: group_<g>/block_<b>/..., the same for all repeats of its group; empty outside of layers.

    rule: its operands are rounded while it is computed. stored: its kernel is kept in few bits, and does not train.
    """

    path: str = ""
    rule: QuantRule | None = None
    stored: StoredForm | None = None
    adapter: Adapter | None = None


PLAIN = Equipment()
