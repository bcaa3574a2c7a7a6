"""The stack: the blocks of a layout in sequence, or the pipeline segments of it that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels import Kernels
from braid.model.block import Block
from braid.model.context import StackContext
from braid.nn.canonical import Canonical, under
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.pattern import Layout


class Stack(nn.Module):
    """The main stack of blocks, keyed by their index in the layout."""

    def __init__(
        self,
        layout: Layout,
        segments: Sequence[int],
        shape: architecture.Trunk,
        kernels: Kernels,
        dispatcher: Dispatcher | None = None,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`segments` are the virtual pipeline stages of this rank."""
        super().__init__()
        self.layout = layout
        on: dict[str, Any] = {"groups": groups, "device": device, "dtype": dtype}
        held = [block for segment in segments for block in layout.segments[segment].blocks]
        self.blocks = nn.ModuleDict(
            {str(block.index): Block(block, shape, kernels, dispatcher, **on) for block in held}
        )

    def forward(self, stream: Tensor, segments: Sequence[int], context: StackContext) -> Tensor:
        for segment in segments:
            for block in self.layout.segments[segment].blocks:
                stream = self.blocks[str(block.index)](stream, context)
        return stream

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for index, block in self.blocks.items():
            tensors |= under(f"blocks.{index}", f"blocks.{index}", cast(Block, block).canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        return sum(cast(Block, block).flops(tokens) for block in self.blocks.values())
