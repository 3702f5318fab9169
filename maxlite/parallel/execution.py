"""How a step runs on its mesh, beside where its tensors lie: choices that change speed and memory, not results."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from maxlite.config.schema import ParallelConfig

# What attention runs on where nobody chose: pure JAX, which every backend has.
DEFAULT_KERNEL = "blockwise"


@dataclasses.dataclass(frozen=True)
class Execution:
    """kernels: kind of attention -> its kernel in training (ops/attention.py).

    context_strategy, load_balance: how rows that are cut over their length attend (ops/context_parallel.py).
    microbatches: parts of a batch in a pipeline, None for one a stage; layers_per_stage: repeats of the layer pattern
    that a stage runs in a round, None for all that it has (model/pipeline.py).
    """

    kernels: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    context_strategy: str = "all_gather"
    load_balance: bool = True
    microbatches: int | None = None
    layers_per_stage: int | None = None

    def kernel(self, kind: str) -> str:
        """Returns the kernel of a kind of attention."""
        return self.kernels.get(kind, DEFAULT_KERNEL)


def build_execution(parallel: ParallelConfig, kernels: Mapping[str, str]) -> Execution:
    """Returns what the keys of the parallel section say, with the kernels chosen."""
    return Execution(
        kernels=MappingProxyType(dict(kernels)),
        context_strategy=parallel.context_parallel_strategy,
        load_balance=parallel.context_parallel_load_balance,
        microbatches=parallel.num_pipeline_microbatches,
        layers_per_stage=parallel.num_layers_per_pipeline_stage,
    )
