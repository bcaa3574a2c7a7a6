"""Multi-token prediction (MTP, DeepSeek-V3, arXiv 2412.19437): each depth predicts one token further ahead.

    h_d[i] = norm(blocks_d(W_d · [norm(embed(token[i + 1 + d])); norm(h_{d-1}[i])]))    predicts token i + 2 + d

h_{-1} is the main model's final hidden state. Embedding and head are shared with the main model. With
hyper-connections a depth reads all streams of the last block before it, projects streams and embedding
separately, and has an exit of its own.

Shapes: B rows, T tokens, t tokens of this rank, C hidden channels. `stream` is the residual stream: BtC, or
BtSC with hyper-connections.
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
from braid.model.block import Block, BlockCosts
from braid.model.context import Context, MicroBatch
from braid.model.streams import build_exit
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload
from braid.nn.hyper_connection import HyperExit
from braid.nn.linear import Linear
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, moved


class Targets(NamedTuple):
    """Inputs and labels of one depth."""

    tokens_BT: Tensor
    """The token that the depth embeds at each position: the one before its label."""
    labels_BT: Tensor
    loss_mask_BT: Tensor
    """True where the main model's loss counts the label, and the label is in the same document."""


def targets(batch: MicroBatch, depth: int) -> Targets:
    """The micro-batch shifted for a depth. Positions past the end of a row are masked."""
    ahead = depth + 1
    runs_BT = runs_of(batch.documents_BT)
    same_BT = (_shift(runs_BT, ahead, fill=-1) == runs_BT) & (batch.documents_BT >= 0)
    return Targets(
        tokens_BT=_shift(batch.labels_BT, depth, fill=0).where(same_BT, 0),
        labels_BT=_shift(batch.labels_BT, ahead, fill=0),
        loss_mask_BT=_shift(batch.loss_mask_BT, ahead, fill=0) & same_BT,
    )


def _shift(x_BT: Tensor, places: int, *, fill: int) -> Tensor:
    return F.pad(x_BT[:, places:], (0, min(places, x_BT.shape[1])), value=fill)


class Mtp(Recomputing):
    """One depth: two norms, a projection of both inputs into one stream, blocks, a final norm. The final norm
    is never recomputed: the head's backward needs its output before the depth's weights are unsharded."""

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
        self.depth, self.groups = depth.depth, groups
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
        self.exit = build_exit(shape, kernels, {"groups": groups, **on})
        self.final_norm = normed()

    def forward(self, before: Tensor, embedded_BtC: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns the input of the next depth, and the hidden state for the head."""
        stream = self.enter(before, embedded_BtC)
        for block in self.blocks.values():
            stream = block(stream, context)
        hidden_BtC = self.apply_final_norm(stream)
        return hidden_BtC if self.exit is None else stream, hidden_BtC

    def enter(self, before: Tensor, embedded_BtC: Tensor) -> Tensor:
        """The input of the depth's blocks."""
        if self.projection is not None:
            x_BtC: Tensor = self.projection(self.recomputed("norm", self._concat_normed, before, embedded_BtC))
            return x_BtC
        assert self.embedding_projection is not None
        assert self.hidden_projection is not None
        projected_BtC = self.embedding_projection(self.recomputed("norm", self.embedding_norm, embedded_BtC))
        streams_BtSC: Tensor = self.hidden_projection(self.recomputed("norm", self.hidden_norm, before))
        return streams_BtSC + projected_BtC.unsqueeze(2)

    def _concat_normed(self, hidden_BtC: Tensor, embedded_BtC: Tensor) -> Tensor:
        return torch.cat([self.embedding_norm(embedded_BtC), self.hidden_norm(hidden_BtC)], -1)

    def apply_final_norm(self, stream: Tensor) -> Tensor:
        """Merge the streams, if there are several, and apply the final norm."""
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

    def cost(self, known: BlockCosts, groups: Groups, *, first: bool, starts: Container[int]) -> Cost:
        """The cost without head and loss. `starts` are the blocks whose input streams are saved, if
        hyper-connections are recomputed."""
        workload = known.workload
        tokens = workload.local_tokens(groups.tp_cp)
        total = self._enter_cost(workload, groups, tokens, first)
        for index, block in self.blocks.items():
            total += known.of(cast(Block, block), len(self.blocks), input_saved=int(index) in starts)
        if self.exit is not None:
            total += self.exit.cost(workload)
        return total + self.final_norm.cost(workload, tokens)

    def _enter_cost(self, workload: Workload, groups: Groups, tokens: int, first: bool) -> Cost:
        # The head may save the same hidden state; with tp it saves an all-gathered copy instead. If norms are
        # recomputed, the first depth's input comes from the replay of the main model's final norm.
        stream = tokens * self.hidden_norm.channels * workload.narrow
        norms = self.embedding_norm.cost(workload, tokens)
        norms += self.hidden_norm.cost(workload, tokens * self.streams)
        if self.exit is None:
            if workload.recomputes("norm"):
                return replace(norms, kept=stream * (1 + (not first and groups.tp.size > 1)))
            same = not self.hidden_norm.upcasts(workload) and groups.tp.size == 1
            return norms + Cost(kept=stream * (2 - same))
        # A learned exit before this depth saves the same streams, unless it saves upcast copies of them.
        learns = isinstance(self.exit, HyperExit)
        if workload.recomputes("norm"):
            kept_before = learns and (not workload.mixed or workload.device == "cuda")
            return replace(norms, kept=stream * (1 + (0 if kept_before else self.streams)))
        kept_before = learns and not self.hidden_norm.upcasts(workload)
        return norms + Cost(kept=stream * (1 + (0 if kept_before else self.streams)))

    def flops(self, tokens: int) -> int:
        blocks = sum(cast(Block, block).flops(tokens) for block in self.blocks.values())
        leave = 0 if self.exit is None else self.exit.flops(tokens)
        return self.enter_flops(tokens) + blocks + leave

    def enter_flops(self, tokens: int) -> int:
        """The input projections, of this rank's tokens."""
        own = tokens // self.groups.tp_cp.size
        if self.projection is not None:
            return self.projection.flops(own)
        assert self.embedding_projection is not None
        assert self.hidden_projection is not None
        return self.embedding_projection.flops(own) + self.hidden_projection.flops(own * self.streams)

    def enter_work(self, workload: Workload) -> Work:
        """The norms and projections of both inputs, which become one tensor before the product, or after it."""
        tokens = workload.local_tokens(self.groups.tp_cp)
        one = tokens * self.hidden_norm.channels * workload.narrow
        work = self.embedding_norm.work(workload, tokens, "norm")
        work += self.hidden_norm.work(workload, tokens * self.streams, "norm")
        if self.projection is not None:
            joined = moved(4 * one, 4 * one, launches=(1, 2), region="norm")
            return work + joined + self.projection.work(workload, tokens)
        assert self.embedding_projection is not None
        assert self.hidden_projection is not None
        work += self.embedding_projection.work(workload, tokens)
        work += self.hidden_projection.work(workload, tokens * self.streams)
        return work + moved((2 * self.streams + 1) * one, (self.streams + 1) * one)

    def final_norm_work(self, workload: Workload) -> Work:
        norm = self.final_norm.work(workload, workload.local_tokens(self.groups.tp_cp))
        return norm if self.exit is None else self.exit.work(workload) + norm
