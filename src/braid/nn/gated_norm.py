"""RMSNorm with a SiLU gate: of Mamba-2 (arXiv 2405.21060), gate first, and of gated delta nets (arXiv
2412.06464), norm first. Statistics are computed in at least float32.

Shapes: I channels, P norm groups of this tp rank, G groups of heads with J channels each, V channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group, all_reduce
from braid.kernels import gated_norm as op
from braid.kernels.gated_norm import GatedNorm
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload, all_reduce_calls
from braid.nn.work import Work, moved


class GateThenNorm(nn.Module):
    """RMSNorm(y · SiLU(z)) over all channels or over equal groups of them. A group may span tp ranks."""

    def __init__(
        self,
        channels: int,
        parts: int,
        eps: float,
        *,
        gated_norm: GatedNorm = op.PLAIN,
        tp: Group = ALONE,
        sharers: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`channels` and `parts` (norm groups) are those of this tp rank. If a norm group is larger, `sharers`
        are the ranks that hold the rest of it."""
        super().__init__()
        self.channels, self.parts = channels, parts
        self.eps = eps
        self.gated_norm = gated_norm
        self.tp, self.sharers = tp, sharers
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, y_I: Tensor, z_GJ: Tensor) -> Tensor:
        """The gate may be a slice; it is copied only if the norm groups are not the groups of heads."""
        dims = (self.parts, self.channels // self.parts)
        z_PJ = z_GJ if z_GJ.shape[-2:] == dims else z_GJ.flatten(-2).unflatten(-1, dims)
        y_PJ, weight_PJ = y_I.unflatten(-1, dims), self.weight.unflatten(0, dims)
        if self.sharers.size > 1:
            return self._shared_norm(y_PJ, z_PJ, weight_PJ).flatten(-2)
        return self.gated_norm(y_PJ, z_PJ, weight_PJ, self.eps, gate_first=True).flatten(-2)

    def _shared_norm(self, y_PJ: Tensor, z_PJ: Tensor, weight_PJ: Tensor) -> Tensor:
        """Normalize each group over its channels on all `sharers`, with an all-reduce of the squares."""
        wide = torch.promote_types(y_PJ.dtype, torch.float32)
        gated = y_PJ.to(wide) * F.silu(z_PJ.to(wide))
        squares = all_reduce(gated.square().sum(-1, keepdim=True), self.sharers)
        normed = gated * torch.rsqrt(squares / (self.sharers.size * gated.shape[-1]) + self.eps)
        return (normed * weight_PJ.to(wide)).to(y_PJ.dtype)

    def canonical(self) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="weight",
            shape=(self.tp.size * self.channels,),
            fill="ones",
            part=(self.channels,),
            offset=(self.tp.rank * self.channels,),
        )
        return {"weight": weight}

    def fuses(self, workload: Workload) -> bool:
        """Whether it saves its inputs as they are and one scalar per norm group."""
        channels = self.channels // self.parts
        available = self.sharers.size == 1 and op.fuses(workload.device, workload.dtype, channels)
        return available and workload.may_fuse("gated_norm")

    def cost(self, workload: Workload, vectors: int) -> Cost:
        """The cost of `vectors` tokens: both inputs upcast, SiLU(z), the product, and its norm. The fused
        kernel saves y, and the gate, which the mixer counts."""
        passing = vectors * self.channels * workload.wide
        if self.fuses(workload):
            kept = vectors * (self.channels * workload.narrow + self.parts * workload.wide)
            return Cost(kept=kept, passing=passing)
        entries = vectors * (5 * self.channels + self.parts) + (self.channels if workload.mixed else 0)
        return Cost(
            kept=entries * workload.wide,
            passing=passing,
            calls=all_reduce_calls(self.sharers, vectors * self.parts * workload.wide, "mamba2 norm"),
        )

    def work(self, workload: Workload, vectors: int) -> Work:
        """A group that spans ranks is normed by ops of torch, in float32."""
        entries, n, w = vectors * self.channels, workload.narrow, workload.wide
        if self.sharers.size == 1 and op.fuses("cuda", workload.dtype, self.channels // self.parts):
            return _fused_work(workload, entries)
        return moved(entries * (3 * n + 15 * w), entries * (3 * n + 33 * w), launches=(13, 21), region="core")


class NormThenGate(nn.Module):
    """RMSNorm(y) · SiLU(z) of every head."""

    def __init__(
        self,
        channels: int,
        eps: float,
        *,
        gated_norm: GatedNorm = op.PLAIN,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.copies = channels, copies
        self.eps = eps
        self.gated_norm = gated_norm
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, y_V: Tensor, z_V: Tensor) -> Tensor:
        return self.gated_norm(y_V, z_V, self.weight, self.eps, gate_first=False)

    def canonical(self) -> dict[str, Canonical]:
        return {
            "weight": Canonical(parameter="weight", shape=(self.channels,), fill="ones", copies=self.copies)
        }

    def fuses(self, workload: Workload) -> bool:
        """Whether it saves its inputs as they are and one scalar per head."""
        return workload.may_fuse("gated_norm") and op.fuses(workload.device, workload.dtype, self.channels)

    def cost(self, workload: Workload, vectors: int) -> Cost:
        """The cost of `vectors` heads: both inputs upcast, SiLU(z) and the norm, on a CPU also before its
        weight. The fused kernel saves y, and the gate, which the mixer counts."""
        passing = vectors * self.channels * workload.wide
        if self.fuses(workload):
            return Cost(kept=vectors * (self.channels * workload.narrow + workload.wide), passing=passing)
        entries = vectors * (self.channels * (5 if workload.device == "cpu" else 4) + 1)
        weight = self.channels if workload.mixed else 0
        return Cost(kept=(entries + weight) * workload.wide, passing=passing)

    def work(self, workload: Workload, vectors: int) -> Work:
        return _fused_work(workload, vectors * self.channels)


def _fused_work(workload: Workload, entries: int) -> Work:
    """Both inputs are read, the output is written; backward reads three tensors and writes two."""
    size = entries * workload.narrow
    return moved(3 * size, 5 * size, launches=(1, 3), region="core")
