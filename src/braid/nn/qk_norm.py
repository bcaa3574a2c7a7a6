"""QK-norm over all heads (OLMo 2, arXiv 2501.00656): RMSNorm over all query, and over all key channels.

    q ← q / sqrt(mean(q²) + eps) · weight        the mean is over the channels of all heads, on whatever ranks

tp ranks hold some of the heads. Each sums the squares of its own, and one all-reduce over tp of two numbers per
token, for queries and keys, completes both sums. Where neighbours replicate a key head, each contributes an
equal share of its squares. The norm comes before the all-to-all over cp, while a rank has all heads of its tp
rank, so cp ranks need not communicate.

Shapes: B rows, S tokens, K key-value heads of this tp rank, F channels of a key-value head with its query
heads, E those of one part of them, 2 for queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid.distributed.collectives import all_reduce
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload, all_reduce_calls
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, moved


class QkNormOverHeads(Recomputing):
    """The norms of queries and keys of one attention layer."""

    def __init__(
        self,
        partition: HeadPartition,
        parts: tuple[Part, Part, Part],
        eps: float,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`parts` are query, key and value of a key-value head."""
        super().__init__()
        self.partition, self.parts, self.eps = partition, parts, eps
        query, key, _ = (partition.groups * size for size in partition.sizes(parts))
        self.q_weight = nn.Parameter(torch.empty(query, device=device, dtype=dtype))
        self.k_weight = nn.Parameter(torch.empty(key, device=device, dtype=dtype))

    def forward(self, qkv_BSKF: Tensor) -> Tensor:
        """Queries and keys normed, values as they are. The all-reduce is outside the regions, so that a replay
        does not repeat it."""
        squares_BS2 = self.recomputed("core", self._squares, qkv_BSKF)
        squares_BS2 = all_reduce(squares_BS2, self.partition.ranks.tp)
        return self.recomputed("core", self._normed, qkv_BSKF, squares_BS2)

    def _squares(self, qkv_BSKF: Tensor) -> Tensor:
        """This rank's share of the sums of squares, in float32 or better."""
        wide = torch.promote_types(qkv_BSKF.dtype, torch.float32)
        q_BSKE, k_BSKE, _ = qkv_BSKF.split(self.partition.sizes(self.parts), -1)
        sums = [part.to(wide).square().sum((2, 3)) for part in (q_BSKE, k_BSKE)]
        return torch.stack([sums[0], sums[1] / self.partition.holders.size], -1)

    def _normed(self, qkv_BSKF: Tensor, squares_BS2: Tensor) -> Tensor:
        q_BSKE, k_BSKE, v_BSKE = qkv_BSKF.split(self.partition.sizes(self.parts), -1)
        means = (
            square_BS / self.partition.span(part).whole
            for square_BS, part in zip(squares_BS2.unbind(-1), self.parts[:2], strict=True)
        )
        q_mean_BS, k_mean_BS = means
        q_BSKE = self._scaled(q_BSKE, q_mean_BS, self.q_weight)
        k_BSKE = self._scaled(k_BSKE, k_mean_BS, self.k_weight)
        return torch.cat([q_BSKE, k_BSKE, v_BSKE], -1)

    def _scaled(self, x_BSKE: Tensor, mean_BS: Tensor, weight: Tensor) -> Tensor:
        factor_BS, wide = (mean_BS + self.eps).rsqrt(), mean_BS.dtype
        normed_BSKE = x_BSKE.to(wide) * factor_BS[..., None, None]
        return (normed_BSKE * weight.to(wide).view(x_BSKE.shape[2:])).to(x_BSKE.dtype)

    def canonical(self) -> dict[str, Canonical]:
        return {
            f"{part.name}_norm.weight": Canonical(
                parameter=f"{part.name}_weight",
                shape=(self.partition.span(part).whole,),
                fill="ones",
                part=(weight.numel(),),
                offset=(self.partition.span(part).start,),
                copies=self.partition.copies(part),
            )
            for part, weight in zip(self.parts[:2], (self.q_weight, self.k_weight), strict=True)
        }

    def cost(self, workload: Workload) -> Cost:
        """The cost without its input: upcast inputs, normed values, factors and upcast weights. A replay needs
        the completed sums alone, which it has to itself only after an all-reduce."""
        tp, channels = self.partition.ranks.tp, self.q_weight.numel() + self.k_weight.numel()
        tokens, wide = workload.local_tokens(self.partition.ranks.cp), workload.wide
        sums = tokens * 2 * wide
        if workload.recomputes("core"):
            kept = sums if tp.size > 1 else 0
        else:
            copies = (2 * tokens + 1 if workload.mixed else tokens) * channels * wide
            # Each upcast makes a copy of its own: one for the squares, one for the norm.
            kept = copies + (tokens * channels * wide if workload.mixed else 0) + sums
        return Cost(kept=kept, calls=all_reduce_calls(tp, sums, "attention norms"))

    def work(self, workload: Workload) -> Work:
        """Ops of torch, in float32: cast, square and sum; cast, two factors and a cast back; then q, k and v
        become one tensor."""
        tokens, n, w = workload.local_tokens(self.partition.ranks.cp), workload.narrow, workload.wide
        entries = tokens * (self.q_weight.numel() + self.k_weight.numel())
        joined = 2 * tokens * self.partition.groups * sum(self.partition.sizes(self.parts)) * n
        squares = (entries * (n + 4 * w), entries * (n + 7 * w) + joined + joined * 3 // 2)
        normed = (entries * (2 * n + 6 * w) + joined, entries * (2 * n + 14 * w) + joined)
        work = moved(*squares, launches=(9, 16), region="core")
        return work + moved(*normed, launches=(16, 24), region="core")
