"""Per-head scalar parameters, such as the decay rates of Mamba-2 and gated delta nets (A_log, D, dt_bias).

They are at least float32 in every model: rounding a decay near 1 to bfloat16 changes how long a state lasts.
They form a module, and so an FSDP unit, of their own; FSDP unshards them when the module is called.

Shapes: h heads that this rank computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from braid.distributed.collectives import own_slice
from braid.nn.canonical import Canonical, Fill
from braid.nn.head_partition import HeadPartition


class HeadScalars(nn.Module):
    """One scalar per head for each name."""

    def __init__(
        self,
        partition: HeadPartition,
        fills: Mapping[str, Fill],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`fills` maps canonical names to their initialization."""
        super().__init__()
        self.partition = partition
        self.fills = dict(fills)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name in fills:
            self.register_parameter(name, nn.Parameter(torch.empty(partition.heads, device=device, dtype=wide)))

    def forward(self) -> tuple[Tensor, ...]:
        """One tensor x_h per name. They are copies, because FSDP may free the parameters once this returns."""
        cp = self.partition.ranks.cp
        return tuple(own_slice(self.get_parameter(name), cp, 0).clone() for name in self.fills)

    def canonical(self) -> dict[str, Canonical]:
        partition = self.partition
        held, start = (partition.heads,), (partition.ranks.tp.rank * partition.heads,)
        return {
            name: Canonical(parameter=name, shape=(partition.all_heads,), fill=fill, part=held, offset=start)
            for name, fill in self.fills.items()
        }
