"""The batch that the data room hands to training and evaluation."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Rows of next-token prediction; every field is [B, T].

    inputs: int32, the tokens that the model reads.
    targets: int32, the token after each input, always of the same document.
    loss_mask: float32, 1 for a real target, 0 for padding.
    positions: int32, the place within the segment, from 0.
    segment_ids: int32, 1, 2, ... per row; 0 is padding.
    """

    inputs: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
