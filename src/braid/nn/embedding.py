"""Token embedding.

Shapes: B rows, T tokens, V vocabulary, C hidden channels.
"""

from __future__ import annotations

from typing import Any

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


class _LookUp(torch.autograd.Function):
    """Sums the gradients of a token's occurrences in float32 or better: a common token has thousands of them,
    of which a bfloat16 sum would lose most."""

    @staticmethod
    def forward(ctx: Any, weight_VC: Tensor, ids_BT: Tensor) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.rows = len(weight_VC)
        return F.embedding(ids_BT, weight_VC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids_BT,) = ctx.saved_tensors
        grad_NC = grads[0].flatten(0, 1)
        wide = torch.promote_types(grad_NC.dtype, torch.float32)
        # On CUDA index_add_ adds in no fixed order; embedding's own backward sorts first.
        if grad_NC.is_cuda:
            ids_N, grad = ids_BT.flatten(), grad_NC.to(wide)
            total = torch.ops.aten.embedding_dense_backward(grad, ids_N, ctx.rows, -1, False)
        else:
            total = torch.zeros(ctx.rows, grad_NC.shape[1], dtype=wide)
            total.index_add_(0, ids_BT.flatten(), grad_NC.to(wide))
        return total.to(grad_NC.dtype), None


class Embedding(nn.Module):
    """One vector per token id. Ids are taken as valid; `check_ids` says so, once per micro-batch."""

    def __init__(
        self, vocab: int, hidden: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, device=device, dtype=dtype))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return _LookUp.apply(self.weight, ids_BT)

    def canonical(self) -> dict[str, Canonical]:
        return {"weight": Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="normal")}
