"""Single numbers that belong to heads, such as the rates at which their states decay.

They are float32 or better in every model: a rate near 1 that is rounded to bfloat16 changes how long a state
lasts. They are a module of their own, so that sharding treats them as such, and it must be called to have them.

Shapes: h heads that compute on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from braid.distributed.collectives import own_slice
from braid.nn.canonical import Canonical, Fill
from braid.nn.head_partition import HeadPartition


class HeadScalars(nn.Module):
    """For each of some names, a number per head."""

    def __init__(
        self,
        share: HeadPartition,
        fills: Mapping[str, Fill],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`fills` are the canonical names, each with how it starts."""
        super().__init__()
        self.share = share
        self.fills = dict(fills)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name in fills:
            self.register_parameter(name, nn.Parameter(torch.empty(share.heads, device=device, dtype=wide)))

    def forward(self) -> tuple[Tensor, ...]:
        """One tensor x_h per name. They are copies: sharding may take back the weights once this returns."""
        cp = self.share.ranks.cp
        return tuple(own_slice(self.get_parameter(name), cp, 0).clone() for name in self.fills)

    def canonical(self) -> dict[str, Canonical]:
        share = self.share
        held, start = (share.heads,), (share.ranks.tp.rank * share.heads,)
        return {
            name: Canonical(parameter=name, shape=(share.all_heads,), fill=fill, part=held, offset=start)
            for name, fill in self.fills.items()
        }
