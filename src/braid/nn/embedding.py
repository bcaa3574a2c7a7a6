"""Vocab-parallel embedding and head: tp ranks split the rows of the vocabulary equally.

The vocabulary is padded to a multiple of the tp size. Padding rows are zero and stay zero; checkpoints do not
contain them.

Shapes: B rows, T tokens, V rows of the vocabulary that this rank holds, C hidden channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, Groups, own_slice, reduce_scatter
from braid.errors import DataError
from braid.kernels.linear_cross_entropy import LinearCrossEntropy
from braid.nn.canonical import Canonical
from braid.nn.cost import INDEX_BYTES, Cost, Workload, in_phase, reduce_scatter_calls
from braid.nn.delayed_wgrad import Delaying
from braid.nn.loss import linear_cross_entropy
from braid.nn.vocabulary import Vocabulary
from braid.nn.work import Work, moved, scatter_copies


def check_ids(ids_BT: Tensor, vocab: int) -> None:
    """Raise a DataError for ids without an embedding. For tensors on the host; on a GPU it would
    synchronize."""
    if not ids_BT.numel():
        return
    low, high = (int(bound) for bound in ids_BT.aminmax())
    if low < 0 or high >= vocab:
        row, token = ((ids_BT < 0) | (ids_BT >= vocab)).nonzero()[0].tolist()
        raise DataError(
            f"token id {int(ids_BT[row, token])} in row {row} at token {token} is outside the vocabulary: "
            f"ids run from 0 to {vocab - 1}; use the tokenizer of the model, or set model.vocab to match it"
        )


class _Lookup(torch.autograd.Function):
    """Embedding lookup; zero for ids of other ranks. Backward sums the gradients of an id's occurrences in at
    least float32: a frequent token has thousands of them, most of which a bfloat16 sum would lose."""

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
        rows = ctx.rows + 1  # the last one collects the gradients of ids of other ranks
        return sum_by_row(grad_NC.to(wide), row_BT.flatten(), rows)[:-1].to(grad_NC.dtype), None


def lookup(weight_VC: Tensor, row_BT: Tensor) -> Tensor:
    """Rows of a weight."""
    x_BTC: Tensor = _Lookup.apply(weight_VC, row_BT)
    return x_BTC


def sum_by_row(x_NC: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """The sum of the vectors of each row, in a fixed order."""
    # On CUDA index_add_ is nondeterministic (atomics); the backward of F.embedding sorts rows first.
    if x_NC.is_cuda:
        total: Tensor = torch.ops.aten.embedding_dense_backward(x_NC, row_N, rows, -1, False)
        return total
    return torch.zeros(rows, x_NC.shape[1], dtype=x_NC.dtype).index_add_(0, row_N, x_NC)


class _VocabParallel(Delaying):
    """A weight with a row for every id of this rank. Its gradient is never delayed, but as the head's weight it
    may be written to the main gradient."""

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
        """`copies` are the pipeline ranks that replicate these rows (tied head, MTP)."""
        super().__init__()
        self.groups, self.copies = groups, copies
        self.vocabulary = Vocabulary(vocab, groups.tp)
        self.weight = nn.Parameter(torch.empty(self.vocabulary.rows, hidden, device=device, dtype=dtype))

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Logits of this rank's ids, for the tokens of all tp ranks."""
        return F.linear(hidden_BTC, self.weight)

    def loss(
        self,
        implementation: LinearCrossEntropy,
        hidden_BTC: Tensor,
        labels_BT: Tensor,
        mask_BT: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Sum and count of the loss of logits / scale, for the tokens of all tp ranks."""
        tokens = (hidden_BTC.flatten(0, 1), labels_BT.flatten(), mask_BT.flatten())
        return linear_cross_entropy(
            implementation, self.weight, *tokens, self.vocabulary, scale, self.wgrad_store
        )

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


class Embedding(_VocabParallel):
    """Token embedding, times a factor. Ids must be valid; `check_ids` checks them once per micro-batch. A tied
    head uses `logits`, without the factor."""

    def __init__(self, vocab: int, hidden: int, *, scale: float = 1.0, **on: Any) -> None:
        super().__init__(vocab, hidden, **on)
        self.scale = scale

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Embeddings of this rank's tokens, from the ids of all tokens; reduce-scattered over tp."""
        ids_BT = own_slice(ids_BT, self.groups.cp, dim=1)
        x_BTC = lookup(self.weight, self.vocabulary.local(ids_BT))
        x_BtC = reduce_scatter(x_BTC, self.groups.tp, dim=1)
        return x_BtC if self.scale == 1 else x_BtC * self.scale

    def cost(self, workload: Workload) -> Cost:
        """Saves the row indices; backward sums in a wide dtype, and scales a copy of the gradient."""
        tp, own = self.groups.tp, workload.local_tokens(self.groups.cp)
        rows, hidden = self.weight.shape
        scaled = 0 if self.scale == 1 else workload.local_tokens(self.groups.tp_cp) * hidden * workload.narrow
        return Cost(
            kept=(own if tp.size > 1 else workload.local_tokens()) * INDEX_BYTES,
            passing=(rows + own) * hidden * workload.wide + scaled,
            calls=in_phase(reduce_scatter_calls(tp, own * hidden * workload.narrow, "embeddings"), "embed"),
        )

    def work(self, workload: Workload) -> Work:
        """The lookup, zeros for ids of other ranks, and the sum of the gradients of each id in float32, by
        kernels that sort the ids. The gradient is as large as the weight."""
        tp, tokens, (rows, hidden) = self.groups.tp, workload.local_tokens(self.groups.cp), self.weight.shape
        n, w, entries = workload.narrow, workload.wide, tokens * hidden
        cast = (n + w) if workload.mixed else 0
        backward = entries * (w + cast) + rows * hidden * (2 * w + cast)
        work = moved(4 * entries * n, backward, launches=(4 if tp.size == 1 else 9, 12))
        work += scatter_copies(workload, tp, entries // tp.size * n)
        return work if self.scale == 1 else work + moved(*(2 * entries // tp.size * n,) * 2)


class Head(_VocabParallel):
    """An untied head."""

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        return self.logits(hidden_BTC)
