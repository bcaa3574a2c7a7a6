"""Token embedding, shared by the tp ranks: each holds an equal part of the vocabulary.

The vocabulary is padded to a multiple of the ranks; padding is zero and stays so, and no checkpoint has it.

Shapes: B rows, T tokens, V rows of the vocabulary that this rank holds, C hidden channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, Groups, own_slice, reduce_scatter
from braid.errors import DataError
from braid.nn.canonical import Canonical
from braid.nn.cost import INDEX, Cost, Portion, scatter_cost


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


class Vocabulary:
    """The ids that one rank of a group holds, out of all."""

    def __init__(self, ids: int, group: Group = ALONE) -> None:
        self.ids = ids
        """Of all ranks together."""
        self.group = group
        self.rows = -(-ids // group.size)
        """What each rank has room for."""
        self.first = group.rank * self.rows
        self.held = min(max(ids - self.first, 0), self.rows)
        """How many of its rows are ids: all but the last ranks fill theirs."""

    def local(self, ids: Tensor) -> Tensor:
        """Each id's row on this rank; `rows` where another rank has it."""
        if self.group.size == 1:
            return ids
        rows = ids - self.first
        return rows.where((rows >= 0) & (rows < self.rows), self.rows)


class _LookUp(torch.autograd.Function):
    """The row of each token, zero for tokens that have none here. Sums the gradients of a token's occurrences
    in float32 or better: a common token has thousands of them, of which a bfloat16 sum would lose most."""

    @staticmethod
    def forward(ctx: Any, weight_VC: Tensor, row_BT: Tensor) -> Tensor:
        ctx.save_for_backward(row_BT)
        rows = ctx.rows = len(weight_VC)
        x_BTC = F.embedding(row_BT.clamp(max=rows - 1), weight_VC)
        return x_BTC.masked_fill_((row_BT == rows)[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (row_BT,) = ctx.saved_tensors
        grad_NC = grads[0].flatten(0, 1)
        wide = torch.promote_types(grad_NC.dtype, torch.float32)
        rows = ctx.rows + 1  # the last one for tokens that another rank has
        # On CUDA index_add_ adds in no fixed order; embedding's own backward sorts first.
        if grad_NC.is_cuda:
            row_N, grad = row_BT.flatten(), grad_NC.to(wide)
            total = torch.ops.aten.embedding_dense_backward(grad, row_N, rows, -1, False)
        else:
            total = torch.zeros(rows, grad_NC.shape[1], dtype=wide)
            total.index_add_(0, row_BT.flatten(), grad_NC.to(wide))
        return total[:-1].to(grad_NC.dtype), None


class _OfVocabulary(nn.Module):
    """A weight with a row for every id that this rank holds."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        groups: Groups = Groups(),
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`copies` are the pipeline ranks that hold the same rows, where several do."""
        super().__init__()
        self.groups, self.copies = groups, copies
        self.vocabulary = Vocabulary(vocab, groups.tp)
        self.weight = nn.Parameter(torch.empty(self.vocabulary.rows, hidden, device=device, dtype=dtype))

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Scores of the ids that this rank holds, for tokens of all tp ranks."""
        return F.linear(hidden_BTC, self.weight)

    def canonical(self) -> dict[str, Canonical]:
        ids, (_, hidden) = self.vocabulary, self.weight.shape
        weight = Canonical(
            parameter="weight",
            shape=(ids.ids, hidden),
            fill="normal",
            index=(slice(0, ids.held),),
            part=(ids.held, hidden),
            offset=(min(ids.first, ids.ids), 0),
            copies=self.copies,
        )
        return {"weight": weight}


class Embedding(_OfVocabulary):
    """One vector per token id. Ids are taken as valid; `check_ids` says so, once per micro-batch. A model that
    ties its head to the embedding uses `logits` for it."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The vectors of this rank's tokens, out of the ids of all."""
        ids_BT = own_slice(ids_BT, self.groups.cp, dim=1)
        return reduce_scatter(_LookUp.apply(self.weight, self.vocabulary.local(ids_BT)), self.groups.tp, dim=1)

    def cost(self, portion: Portion) -> Cost:
        """Where each token's vector lies. Gradients of a token's occurrences are summed in a wide dtype."""
        tp, own = self.groups.tp, portion.places(self.groups.cp)
        rows, hidden = self.weight.shape
        return Cost(
            kept=(own if tp.size > 1 else portion.places()) * INDEX,
            passing=(rows + own) * hidden * portion.wide,
            calls=scatter_cost(tp, own * hidden * portion.narrow, "embeddings"),
        )


class Head(_OfVocabulary):
    """The head of a model that does not tie it to the embedding."""

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        return self.logits(hidden_BTC)
