"""Collation: packed document spans to a micro-batch of tokens, labels, loss mask, positions and document ids.

Shapes: B samples, T positions, S = T + 1 tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from braid.data.source import DocumentSpan
from braid.model.context import MicroBatch


def collate(spans: Sequence[DocumentSpan], samples: Sequence[int], length: int) -> MicroBatch:
    """Spans of T + 1 tokens, with their global sample numbers, as a micro-batch; no spans give an empty one.

    Labels are the tokens shifted by one, always valid ids. The loss mask excludes labels of another document,
    padding and masked prompts. Positions restart with each document; documents are numbered from 0 within a
    sample, padding is -1.
    """
    shape = (len(spans), length + 1)
    ids_BS = np.empty(shape, np.int64)
    loss_mask_BS, starts_BS = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
    for row, span in enumerate(spans):
        ids_BS[row], loss_mask_BS[row], starts_BS[row] = span.ids_S, span.loss_mask_S, span.starts_S
    starts_BS[:, 0] = True  # a sample that begins inside a document cannot attend to the tokens before it
    steps_S = np.arange(length + 1)
    positions_BS = steps_S - np.maximum.accumulate(np.where(starts_BS, steps_S, 0), axis=1)
    documents_BS = np.cumsum(starts_BS, axis=1) - 1
    padding_B = np.asarray([span.padding for span in spans], np.int64)
    documents_BS[steps_S >= length + 1 - padding_B[:, None]] = -1
    return MicroBatch(
        tokens_BT=torch.from_numpy(ids_BS[:, :-1].copy()),
        labels_BT=torch.from_numpy(ids_BS[:, 1:].copy()),
        loss_mask_BT=torch.from_numpy(loss_mask_BS[:, 1:] & ~starts_BS[:, 1:]),
        positions_BT=torch.from_numpy(positions_BS[:, :-1].copy()),
        documents_BT=torch.from_numpy(documents_BS[:, :-1].copy()),
        sample_B=torch.tensor(list(samples), dtype=torch.int64),
    )
