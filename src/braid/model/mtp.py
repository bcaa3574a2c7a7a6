"""Multi-token prediction: each depth looks one token further ahead than the one before.

Depth d reads, at every token i, the hidden state of the depth before it (of the main stack for depth 0) and
the embedding of token i + 1 + d, and predicts token i + 2 + d. Embedding and head are the model's own. With
hyper-connections a depth reads all streams as they leave the last block before it, and has an exit of its own.

Shapes: B rows, T tokens, t tokens of this rank, C hidden channels. What is called `stream` is the residual
stream: BtC, or BtSC with hyper-connections.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture, pattern
from braid.distributed.collectives import Groups
from braid.kernels import Kernels
from braid.kernels.documents import runs_of
from braid.model.block import Block
from braid.model.context import Context, MicroBatch
from braid.model.streams import leaving
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Portion
from braid.nn.hyper_connection import HyperExit
from braid.nn.linear import Linear
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.recompute import Recomputing


class Targets(NamedTuple):
    """What one depth is given and should say."""

    tokens_BT: Tensor
    """The token that the depth is shown at each place: the last one it need not predict."""
    labels_BT: Tensor
    loss_mask_BT: Tensor
    """Where the label counts: it counts for the main model, and lies in the same document."""


def targets(batch: MicroBatch, depth: int) -> Targets:
    """The micro-batch shifted for a depth. What would come from behind the row's end is masked."""
    ahead = depth + 1
    runs_BT = runs_of(batch.documents_BT)
    same_BT = (_shifted(runs_BT, ahead, fill=-1) == runs_BT) & (batch.documents_BT >= 0)
    return Targets(
        tokens_BT=_shifted(batch.labels_BT, depth, fill=0).where(same_BT, 0),
        labels_BT=_shifted(batch.labels_BT, ahead, fill=0),
        loss_mask_BT=_shifted(batch.loss_mask_BT, ahead, fill=0) & same_BT,
    )


def _shifted(x_BT: Tensor, places: int, *, fill: int) -> Tensor:
    """Everything moved `places` to the left, with `fill` behind the end."""
    return F.pad(x_BT[:, places:], (0, min(places, x_BT.shape[1])), value=fill)


class Mtp(Recomputing):
    """One depth: two norms, a projection of both inputs into one stream, the depth's blocks, a norm. The last
    is never recomputed: the head needs what it gave before the depth's weights are gathered."""

    def __init__(
        self,
        depth: pattern.MtpDepth,
        shape: architecture.Model,
        kernels: Kernels,
        dispatcher: Dispatcher | None = None,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.depth = depth.depth
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        self.streams = 1 if shape.hyper is None else shape.hyper.streams
        hidden, copied = shape.hidden, {"copies": groups.tp, **on}
        normed = partial(norm, shape.norm, hidden, shape.norm_eps, kernels.rms_norm.function, **copied)
        self.embedding_norm = normed()
        self.hidden_norm = normed()
        self.projection: Linear | None = None
        self.embedding_projection: Linear | None = None
        self.hidden_projection: Linear | None = None
        if shape.hyper is None:
            self.projection = Linear(2 * hidden, hidden, **copied)
        else:
            self.embedding_projection = Linear(hidden, hidden, **copied)
            self.hidden_projection = Linear(hidden, hidden, **copied)
        self.blocks = nn.ModuleDict(
            {
                str(block.index): Block(block, shape, kernels, dispatcher, groups=groups, **on)
                for block in depth.blocks
            }
        )
        self.exit = leaving(shape, kernels, {"groups": groups, **on})
        self.final_norm = normed()

    def forward(self, before: Tensor, embedded_BtC: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What the next depth reads, and the hidden state from which this depth's tokens are told."""
        stream = self.enter(before, embedded_BtC)
        for block in self.blocks.values():
            stream = block(stream, context)
        hidden_BtC = self.normed(stream)
        return hidden_BtC if self.exit is None else stream, hidden_BtC

    def enter(self, before: Tensor, embedded_BtC: Tensor) -> Tensor:
        """The stream that the depth's blocks see."""
        if self.projection is not None:
            x_BtC: Tensor = self.projection(self.recomputed("norm", self._both, before, embedded_BtC))
            return x_BtC
        assert self.embedding_projection is not None
        assert self.hidden_projection is not None
        shown_BtC = self.embedding_projection(self.recomputed("norm", self.embedding_norm, embedded_BtC))
        streams_BtSC: Tensor = self.hidden_projection(self.recomputed("norm", self.hidden_norm, before))
        return streams_BtSC + shown_BtC.unsqueeze(2)

    def _both(self, hidden_BtC: Tensor, embedded_BtC: Tensor) -> Tensor:
        return torch.cat([self.embedding_norm(embedded_BtC), self.hidden_norm(hidden_BtC)], -1)

    def normed(self, stream: Tensor) -> Tensor:
        """What the head is shown."""
        hidden_BtC: Tensor = self.final_norm(stream if self.exit is None else self.exit(stream))
        return hidden_BtC

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for name, module in self.named_children():
            if isinstance(module, RmsNorm | LayerNorm | Linear | HyperExit):
                tensors |= under(name, name, module.canonical())
        for index, block in self.blocks.items():
            tensors |= under(f"blocks.{index}", f"blocks.{index}", cast(Block, block).canonical())
        return tensors

    def cost(self, portion: Portion, groups: Groups, *, first: bool, starts: Container[int]) -> Cost:
        """Without what is told from it. The hidden state that it is given is kept by the head as well, where
        that sees it as it is; where norms are recomputed, so is that of the first depth. `starts` are blocks
        before which streams are kept, where hyper-connections are made again."""
        tokens = portion.places(groups.tp_cp)
        total = self._enter_cost(portion, groups, tokens, first)
        within = replace(portion, span=min(portion.span, len(self.blocks)))
        for index, block in self.blocks.items():
            total += cast(Block, block).cost(within, given=int(index) in starts)
        if self.exit is not None:
            total += self.exit.cost(portion)
        return total + self.final_norm.cost(portion, tokens)

    def _enter_cost(self, portion: Portion, groups: Groups, tokens: int, first: bool) -> Cost:
        stream = tokens * self.hidden_norm.channels * portion.narrow
        norms = self.embedding_norm.cost(portion, tokens)
        norms += self.hidden_norm.cost(portion, tokens * self.streams)
        if self.exit is None:
            if portion.again("norm"):
                return replace(norms, kept=stream * (1 + (not first and groups.tp.size > 1)))
            same = not self.hidden_norm.widens(portion) and groups.tp.size == 1
            return norms + Cost(kept=stream * (2 - same))
        # An exit before it that learns keeps the same streams, unless it has wide copies of them.
        learns = isinstance(self.exit, HyperExit)
        if portion.again("norm"):
            kept_before = learns and (not portion.mixed or portion.device == "cuda")
            return replace(norms, kept=stream * (1 + (0 if kept_before else self.streams)))
        kept_before = learns and not self.hidden_norm.widens(portion)
        return norms + Cost(kept=stream * (1 + (0 if kept_before else self.streams)))

    def flops(self, tokens: int) -> int:
        blocks = sum(cast(Block, block).flops(tokens) for block in self.blocks.values())
        leave = 0 if self.exit is None else self.exit.flops(tokens)
        return self.enter_flops(tokens) + blocks + leave

    def enter_flops(self, tokens: int) -> int:
        """Of the projection of both inputs."""
        if self.projection is not None:
            return self.projection.flops(tokens)
        assert self.embedding_projection is not None
        assert self.hidden_projection is not None
        return self.embedding_projection.flops(tokens) + self.hidden_projection.flops(tokens * self.streams)
