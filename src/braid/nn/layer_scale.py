"""LayerScale (arXiv 2103.17239): a learned factor per channel on the output of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid.distributed.collectives import ALONE, Group
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload
from braid.nn.work import Work, moved


class LayerScale(nn.Module):
    """x · weight."""

    def __init__(
        self,
        channels: int,
        value: float,
        *,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Factors are `value` at first. `copies` are the ranks that replicate them and see other tokens."""
        super().__init__()
        self.channels, self.value, self.copies = channels, value, copies
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def canonical(self) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="weight",
            shape=(self.channels,),
            fill="constant",
            value=self.value,
            copies=self.copies,
        )
        return {"weight": weight}

    def cost(self, workload: Workload, vectors: int) -> Cost:
        """Saves its input; backward multiplies it with the gradient, to sum over vectors."""
        entries = vectors * self.channels * workload.narrow
        return Cost(kept=entries, passing=entries)

    def work(self, workload: Workload, vectors: int) -> Work:
        entries = vectors * self.channels * workload.narrow
        return moved(2 * entries, 6 * entries, launches=(1, 3))
