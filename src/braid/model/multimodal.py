"""Multimodal input: rows of encoders take the places of placeholder tokens in a language model's embeddings.

    embeddings of this rank's tokens   t t V V V t A A t      V, A: placeholder ids of two modules
    rows of modules                        0 1 2   0 1        in (sample, item, row) order

A rank replaces embeddings in its own slice of the tokens, so it needs the rows of the placeholders in that
slice and no others. Text gets no gradient from rows, and the embedding none at placeholders. A prediction whose
target is a placeholder has no loss. MTP depths embed placeholders as plain ids.

Shapes: B rows of text, T tokens, t tokens of this rank, R rows of a module that this rank reads, C hidden
channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from braid.distributed.collectives import Group, own_slice
from braid.errors import DataError
from braid.model.context import MicroBatch

Rows = Mapping[str, Tensor]
"""The rows of each module that a rank reads, by the module's name."""
NO_ROWS: Rows = MappingProxyType({})
"""Those of text alone."""


def placeholders(tokens_BT: Tensor, ids: Mapping[str, int], tp_cp: Group) -> dict[str, Tensor]:
    """For every module, the indices of its placeholders among this rank's B · t tokens. `tokens_BT` are on the
    host: finding them on a GPU would synchronize with it."""
    own_N = own_slice(tokens_BT, tp_cp, dim=1).flatten()
    return {name: (own_N == token).nonzero().flatten() for name, token in ids.items()}


def merge(embedded_BtC: Tensor, indices: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """Embeddings with rows in place of placeholders. Saves indices only."""
    if not indices:
        return embedded_BtC
    for name, index_R in indices.items():
        if len(rows[name]) != len(index_R):
            raise DataError(
                f"{name}: {len(rows[name])} rows for {len(index_R)} placeholders in this rank's tokens: every "
                "item needs as many placeholders as it has rows"
            )
    index_R = torch.cat(list(indices.values()))
    rows_RC = torch.cat([rows[name] for name in indices]).to(embedded_BtC.dtype)
    # Not index_copy, which saves the rows.
    return embedded_BtC.flatten(0, 1).index_put((index_R,), rows_RC).view(embedded_BtC.shape)


def mask_placeholders(batch: MicroBatch, ids: Mapping[str, int]) -> MicroBatch:
    """The batch without loss where the target is a placeholder: inside an item, and just before it."""
    if not ids:
        return batch
    targets = torch.tensor(list(ids.values()), device=batch.labels_BT.device)
    return replace(batch, loss_mask_BT=batch.loss_mask_BT & ~torch.isin(batch.labels_BT, targets))
