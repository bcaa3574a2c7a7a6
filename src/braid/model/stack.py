"""The stack: the blocks of a layout, one after the other."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.collectives import Groups
from braid.kernels import Kernels
from braid.model.block import Block
from braid.model.context import Context
from braid.nn.canonical import Canonical, under
from braid.nn.moe.journey import Dispatcher
from braid.pattern import Layout


class Stack(nn.Module):
    """Every block of the main stack, under its index in the layout."""

    def __init__(
        self,
        layout: Layout,
        shape: architecture.Model,
        kernels: Kernels,
        dispatcher: Dispatcher | None = None,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                str(block.index): Block(
                    block, shape, kernels, dispatcher, groups=groups, device=device, dtype=dtype
                )
                for block in layout.blocks
            }
        )

    def forward(self, x_BtC: Tensor, context: Context) -> Tensor:
        for block in self.blocks.values():
            x_BtC = block(x_BtC, context)
        return x_BtC

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for index, block in self.blocks.items():
            tensors |= under(f"blocks.{index}", f"blocks.{index}", cast(Block, block).canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        return sum(cast(Block, block).flops(tokens) for block in self.blocks.values())
