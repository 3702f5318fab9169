"""The least time that a step can take, by what it computes, what it moves through memory and what it sends.

Each part alone would take its work over its rate; the step takes at least the longest of them, and about their sum
where nothing overlaps. Rates are the makers' peaks, so the times are bounds and not forecasts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxlite.estimate.hlo import Collective
from maxlite.parallel.devices import slice_of
from maxlite.parallel.topology import DeviceSpec


class Rates(NamedTuple):
    """flops: FLOP/s of a device. wraps: whether each dimension of a slice's torus is closed; () for no torus."""

    flops: float
    spec: DeviceSpec
    wraps: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of each part; `bound` is the longest, `serial` the sum."""

    compute: float
    memory: float
    links: float
    network: float

    @property
    def bound(self) -> float:
        """Least seconds of a step."""
        return max(self.compute, self.memory, self.links, self.network)

    @property
    def serial(self) -> float:
        """Seconds without any overlap."""
        return self.compute + self.memory + self.links + self.network

    @property
    def limit(self) -> str:
        """Which part is the longest."""
        parts = {"compute": self.compute, "memory": self.memory, "links": self.links, "network": self.network}
        return max(parts, key=lambda name: parts[name])


def build_roofline(
    flops: float, memory_bytes: float, collectives: Sequence[Collective], devices: Sequence[jax.Device], rates: Rates
) -> Roofline:
    """Returns the bounds of one device. devices: in the mesh's order, as the groups of collectives count them."""
    links = network = 0.0
    for collective in collectives:
        on_links, on_network = _seconds(collective, devices, rates)
        links += collective.times * on_links
        network += collective.times * on_network
    return Roofline(flops / rates.flops, memory_bytes / rates.spec.memory_bandwidth, links, network)


def crosses_slices(collective: Collective, devices: Sequence[jax.Device]) -> bool:
    """Says whether devices of one group stand in several slices."""
    return any(len(_slices(group, devices)) > 1 for group in collective.groups)


def _seconds(collective: Collective, devices: Sequence[jax.Device], rates: Rates) -> tuple[float, float]:
    """On the links of a slice and on the network between slices, each time it runs.

    A group over several slices works in each slice first and then between them, each device with its share.
    """
    spec = rates.spec
    if collective.kind == "collective-permute":
        if crosses_slices(collective, devices):
            return 0.0, collective.payload / spec.network_bandwidth
        # Permutations in both directions and along other dimensions run beside one another, so all links count.
        return collective.payload / link_bandwidth([devices[place] for place in _ring(collective)], rates), 0.0
    group = collective.groups[0]
    slices = _slices(group, devices)
    num_slices, inside = len(slices), len(group) // len(slices)
    rounds = 2 if collective.kind == "all-reduce" else 1
    on_links = rounds * collective.payload * (inside - 1) / inside
    on_network = rounds * collective.payload * (num_slices - 1) / num_slices / inside
    members = [device for device in group if slice_of(devices[device]) == slices[0]]
    bandwidth = link_bandwidth([devices[member] for member in members], rates)
    return on_links / bandwidth, on_network / spec.network_bandwidth


def link_bandwidth(devices: Sequence[jax.Device], rates: Rates) -> float:
    """Bytes per second that a device of a ring can send: two directions of each dimension that the group spans.

    A line that does not close has its ends in the way, and is half as fast. Cores of one chip share its memory.
    """
    if not rates.wraps:
        return rates.spec.link_bandwidth
    places = [tuple(getattr(device, "coords", ())) for device in devices]
    spans = [len({place[dim] for place in places}) > 1 for dim in range(len(rates.wraps))]
    links = sum(2 if wraps else 1 for spanned, wraps in zip(spans, rates.wraps, strict=True) if spanned)
    return links * rates.spec.link_bandwidth if links else rates.spec.memory_bandwidth


def mfu_bound(model_flops: float, seconds: float, rates: Rates) -> float:
    """Share of the peak that the model's own FLOP are at best."""
    return model_flops / (seconds * rates.flops)


def _ring(collective: Collective) -> set[int]:
    """The devices that the first pair of a permutation is joined with, over all pairs."""
    found = set(collective.groups[0])
    while more := {device for pair in collective.groups if found & set(pair) for device in pair} - found:
        found |= more
    return found


def _slices(group: Sequence[int], devices: Sequence[jax.Device]) -> list[int]:
    return sorted({slice_of(devices[member]) for member in group})
