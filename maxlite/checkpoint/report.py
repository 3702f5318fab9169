"""What a restore did, said in one line: nothing is left out in silence."""

import collections
import dataclasses
from collections.abc import Mapping

_LEAST_GB = 1e8


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """Of a restore that succeeded; arrays that are missing or of other shapes are an error.

    restored: paths of the arrays that were read.
    cast: path -> (dtype saved, dtype now) of those that have another one.
    not_used: paths of the arrays that the checkpoint has besides.
    num_bytes: of the arrays that were read, as they were saved, on all devices together.
    seconds: to read, check and place them.
    """

    restored: tuple[str, ...]
    cast: Mapping[str, tuple[str, str]]
    not_used: tuple[str, ...]
    num_bytes: int
    seconds: float

    def line(self) -> str:
        """Returns e.g. `Restored 35 arrays, 0.50 GB in 0.31 s (1.6 GB/s); not read: opt_state (71 arrays)`."""
        rate = self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        large = self.num_bytes >= _LEAST_GB
        size = f"{self.num_bytes / 1e9:.2f} GB" if large else f"{self.num_bytes / 1e6:.2f} MB"
        parts = [f"Restored {_arrays(len(self.restored))}, {size} in {self.seconds:.2f} s ({rate:.2f} GB/s)"]
        for (saved, now), count in collections.Counter(self.cast.values()).items():
            parts.append(f"cast {_arrays(count)} from {saved} to {now}")
        if self.not_used:
            roots = collections.Counter(path.partition("/")[0] for path in self.not_used)
            parts.append("not read: " + ", ".join(f"{root} ({_arrays(count)})" for root, count in roots.items()))
        return "; ".join(parts)


def _arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count} arrays"
