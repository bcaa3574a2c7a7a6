"""Token embedding.

Shapes: B rows, T tokens, V vocabulary, C hidden channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.errors import DataError
from braid.nn.canonical import Canonical


def check_ids(ids_BT: Tensor, vocab: int) -> None:
    """Refuse ids that have no embedding. Meant for the host: on a GPU this would wait for the device."""
    if not ids_BT.numel():
        return
    low, high = (int(bound) for bound in ids_BT.aminmax())
    if low < 0 or high >= vocab:
        row, token = ((ids_BT < 0) | (ids_BT >= vocab)).nonzero()[0].tolist()
        raise DataError(
            f"token id {int(ids_BT[row, token])} in row {row} at token {token} is outside the vocabulary: "
            f"ids run from 0 to {vocab - 1}; use the model's own tokenizer, or set model.vocab to match it"
        )


class Embedding(nn.Module):
    """One vector per token id. Ids are taken as valid; `check_ids` says so, once per micro-batch."""

    def __init__(
        self, vocab: int, hidden: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, device=device, dtype=dtype))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.weight)

    def canonical(self) -> dict[str, Canonical]:
        return {"weight": Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="normal")}
