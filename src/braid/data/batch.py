"""A batch: what the model reads and what it should have said, as torch tensors.

Shapes: B samples, T positions, S = T + 1 tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from braid.data.source import DocumentSpan


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Samples side by side. All tensors are int64, the mask is bool."""

    tokens_BT: Tensor
    """Token ids to read."""
    labels_BT: Tensor
    """The token after each; always a valid id, whether it counts or not."""
    loss_mask_BT: Tensor
    """Whether the label counts: never across documents, never padding, never a masked prompt."""
    positions_BT: Tensor
    """Position of each token in its document, from 0 at the first token of it in the sample."""
    documents_BT: Tensor
    """Number of the token's document in its sample, ascending from 0; padding is -1."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def collated(spans: Sequence[DocumentSpan], length: int) -> Batch:
    """Spans of T + 1 tokens as a batch; none at all is an empty batch."""
    shape = (len(spans), length + 1)
    ids_BS = np.empty(shape, np.int64)
    counted_BS, starts_BS = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
    for row, span in enumerate(spans):
        ids_BS[row], counted_BS[row], starts_BS[row] = span.ids_S, span.counted_S, span.starts_S
    starts_BS[:, 0] = True  # a sample sees nothing of what came before it
    steps_S = np.arange(length + 1)
    positions_BS = steps_S - np.maximum.accumulate(np.where(starts_BS, steps_S, 0), axis=1)
    documents_BS = np.cumsum(starts_BS, axis=1) - 1
    padding_B = np.asarray([span.padding for span in spans], np.int64)
    documents_BS[steps_S >= length + 1 - padding_B[:, None]] = -1
    return Batch(
        tokens_BT=torch.from_numpy(ids_BS[:, :-1].copy()),
        labels_BT=torch.from_numpy(ids_BS[:, 1:].copy()),
        loss_mask_BT=torch.from_numpy(counted_BS[:, 1:] & ~starts_BS[:, 1:]),
        positions_BT=torch.from_numpy(positions_BS[:, :-1].copy()),
        documents_BT=torch.from_numpy(documents_BS[:, :-1].copy()),
    )
