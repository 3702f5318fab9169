"""The batch that the data room hands to training and evaluation."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of next-token prediction; every field is [B, T], of numpy here and of jax once on the devices.

    inputs: int32, the tokens that the model reads.
    targets: int32, the token after each input, always of the same document.
    loss_mask: float32, 1 for a target that counts, 0 for padding and for what is only read.
    positions: int32, the place within the segment, from 0.
    segment_ids: int32, 1, 2, ... per row; 0 is padding.
    source_ids: int32, the place in dataset_mixture of what a token came from; None without a mixture.
    """

    inputs: Any
    targets: Any
    loss_mask: Any
    positions: Any
    segment_ids: Any
    source_ids: Any = None
