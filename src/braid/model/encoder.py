"""The encoder: patches of packed items, a stack of blocks, final norm, row groups, projector.

    rows = projector(join(norm(blocks(patches · W + b))))        `group` neighbouring rows of an item joined

A lane packs its items one after the other into a single row of patches, filled up with padding; an item is a
document. Layers are those of the language model, split over tp, cp, ep and pp in the same way. Each of the
P = tp · cp ranks of a lane holds a slice of the patches between layers. The pack is padded to a multiple of
P · `group` patches, so the slices of patches are those of whole rows: rank i returns slice i of ceil(R / P) of
the R rows, and joining rows needs no other rank. A pack without items is padding alone, so that every lane
issues the same collectives.

Shapes: N patches of all items of a lane, T = N with padding, t patches of this rank, I numbers of a patch, C
hidden channels, R rows of a lane, r rows of this rank, J = `group` · C joined channels, W output channels.
`stream` is the residual stream: 1tC, or 1tSC with hyper-connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.distributed.collectives import Groups, own_slice
from braid.encoders import Encoder
from braid.errors import DataError
from braid.kernels import Kernels
from braid.kernels.host import to_device
from braid.model.block import Block
from braid.model.context import MicroBatchTotals, PackedRows, StackContext
from braid.model.language import Losses, sum_losses
from braid.model.stack import Stack
from braid.model.stacked import StackedModel
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload
from braid.nn.dropout import keep_mask
from braid.nn.hyper_connection import expand
from braid.nn.linear import Linear
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.projector import Projector
from braid.pattern import Layer, Layout
from braid.schedule.phases import Phase

ITEM_BITS = 20
"""A sample has at most 2 ** ITEM_BITS items: sample and item make one number, which seeds random masks."""


@dataclass(frozen=True, kw_only=True)
class Items:
    """The input of an encoder: the items of one lane, in (sample, item) order, on the host."""

    patches_NI: Tensor
    """The patches of all items, one after the other; none if the lane has no items."""
    lengths: Sequence[int]
    """Patches of each item."""
    samples: Sequence[int]
    """Global index of each item's sample."""
    numbers: Sequence[int]
    """Place of each item among those of its sample, from 0."""
    step: int = 0
    seed: int = 0
    """The seed of this module, see `module_seed`."""
    training: bool = True


@dataclass(frozen=True, kw_only=True)
class PatchRows(PackedRows):
    """The pack of a lane."""

    patches_1tI: Tensor
    """This rank's slice."""
    item_1T: Tensor
    """Global number of each patch's item, which random masks are seeded with in place of the pack's row."""
    rows: int
    """Output rows of the lane."""


class EncoderContext(StackContext):
    """The state of one micro-batch in an encoder; see `EncoderModel.prepare`."""

    batch: PatchRows

    def keep_mask(self, layer: Layer, rate: float, channels: int) -> Tensor:
        """The dropout mask of a layer. A patch has the same mask in any pack."""
        batch = self.batch
        return keep_mask(
            rate,
            seed=batch.seed,
            step=batch.step,
            layer=layer.stream,
            sample_B=self.local_slice(batch.item_1T),
            position_T=self.local_slice(batch.positions_BT),
            channels=channels,
        )


def module_seed(seed: int, name: str) -> int:
    """The seed of a module's random masks: modules of one run have independent ones."""
    digest = hashlib.sha256(f"{seed}:modules.{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class EncoderModel(StackedModel):
    """An encoder. Weights are uninitialized until `initialize` or a checkpoint fills them."""

    shape: Encoder

    def __init__(
        self,
        shape: Encoder,
        layout: Layout,
        kernels: Kernels,
        *,
        groups: Groups = Groups(),
        dispatcher: Dispatcher | None = None,
        segments: Sequence[int] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        """The arguments are those of `LanguageModel`."""
        held_on: dict[str, Any] = {"groups": groups, "segments": segments, "device": device, "dtype": dtype}
        super().__init__(shape, layout, kernels, **held_on)
        first, last = 0 in self.segments, len(layout.segments) - 1 in self.segments
        on: dict[str, Any] = {"device": device, "dtype": self.dtype if stored is None else stored}
        self.patches: Linear | None = None
        self.projector: Projector | None = None
        if first:
            # Every tp rank projects patches of its own, with copies of one weight.
            self.patches = Linear(shape.input, shape.hidden, bias=shape.input_bias, copies=groups.tp, **on)
        self.stack = Stack(layout, self.segments, shape, kernels, dispatcher, groups=groups, **on)
        if last:
            self._build_final_norm(on)
            self.projector = Projector(shape, kernels, groups=groups, **on)

    # ------------------------------------------------------------------------------------ forward

    def prepare(self, items: Items, totals: MicroBatchTotals | None = None) -> EncoderContext:
        """Validate items, pack them and create their context. `totals` are the patches and lanes over all
        ranks; by default the items are on this rank only."""
        self.check(items)
        ranks, group = self.groups.tp_cp, self.shape.group
        rows = sum(self.shape.rows(length) for length in items.lengths)
        padding = group * ranks.size * max(1, -(-rows // ranks.size)) - group * rows
        lengths = torch.tensor([*items.lengths, padding])
        starts = lengths.cumsum(0) - lengths
        positions_T = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        number = [sample << ITEM_BITS | item for sample, item in zip(items.samples, items.numbers, strict=True)]
        documents_1T = torch.tensor([*range(len(items.lengths)), -1]).repeat_interleave(lengths)[None]
        patches_1TI = F.pad(items.patches_NI.to(self.dtype), (0, 0, 0, padding))[None]
        batch = PatchRows(
            patches_1tI=to_device(own_slice(patches_1TI, ranks, dim=1), self.device),
            item_1T=to_device(torch.tensor([*number, 0]).repeat_interleave(lengths)[None], self.device),
            rows=rows,
            positions_BT=to_device(positions_T[None], self.device),
            documents_BT=to_device(documents_1T, self.device),
            sample_B=to_device(torch.zeros(1, dtype=torch.int64), self.device),
            step=items.step,
            seed=items.seed,
            training=items.training,
        )
        return EncoderContext(
            batch=batch,
            groups=self.groups,
            totals=MicroBatchTotals.of(documents_1T) if totals is None else totals,
            host_documents_BT=documents_1T,
            dtype=self.dtype,
            caches={},
        )

    def check(self, items: Items) -> None:
        """Raise a DataError if an item is empty or not made of whole groups, or patches do not fit."""
        group, given = self.shape.group, tuple(items.patches_NI.shape)
        for length, sample, number in zip(items.lengths, items.samples, items.numbers, strict=True):
            if length < 1 or length % group:
                raise DataError(
                    f"item {number} of sample {sample} has {length} patches: an item has at least one, and a "
                    f"multiple of group ({group})"
                )
        if given != (sum(items.lengths), self.shape.input):
            raise DataError(
                f"patches are {' x '.join(map(str, given))}, but items of {sum(items.lengths)} patches with "
                f"{self.shape.input} numbers each were announced"
            )

    def forward(self, items: Items) -> Tensor:
        """The rows of items, for a model that is not pipelined; `run` returns auxiliary losses too."""
        rows_rW, _ = self.run(self.segments, None, self.prepare(items))
        return rows_rW

    def run(
        self, segments: Sequence[int], stream: Tensor | None, context: EncoderContext
    ) -> tuple[Tensor, Losses]:
        """Run consecutive segments. `stream` is the output of the segment before them, None for the first.
        Returns the output stream, or this rank's rows after the last segment, and the auxiliary losses."""
        with self.save_hooks():
            earlier = set(context.balances)
            if segments[0] == 0:
                stream = self.embed(context)
            assert stream is not None
            stream = self.stack(stream, segments, context)
            if segments[-1] == len(self.layout.segments) - 1:
                stream = self.project(self.apply_final_norm(stream), context)
        balances = {layer: balance for layer, balance in context.balances.items() if layer not in earlier}
        loss_sum, count = self.zero_loss()
        aux = sum_losses([balance.losses for balance in balances.values()])
        return stream, Losses(loss_sum=loss_sum, token_count=count, aux=aux, balances=balances)

    def embed(self, context: EncoderContext) -> Tensor:
        """Project the patches: the initial residual stream."""
        assert self.patches is not None
        x_1tC: Tensor = self.patches(context.batch.patches_1tI)
        return x_1tC if self.shape.hyper is None else expand(x_1tC, self.shape.hyper.streams)

    def project(self, hidden_1tC: Tensor, context: EncoderContext) -> Tensor:
        """Join the rows of every group, and project those of this rank that are not padding."""
        assert self.projector is not None
        joined_rJ = hidden_1tC.reshape(-1, self.shape.group * self.shape.hidden)
        held = own_rows(context.batch.rows, self.groups.tp_cp.rank, self.groups.tp_cp.size)
        rows_rW: Tensor = self.projector(joined_rJ[: len(held)])
        return rows_rW

    # --------------------------------------------------------------------- introspection and cost

    def canonical(self) -> dict[str, Canonical]:
        """Every checkpoint tensor of this rank by canonical name, and where it is stored."""
        tensors: dict[str, Canonical] = {}
        if self.patches is not None:
            tensors |= under("patches", "patches", self.patches.canonical())
        tensors |= self.stack_canonical()
        if self.projector is not None:
            tensors |= under("projector", "projector", self.projector.canonical())
        return tensors

    def costs(self, workload: Workload) -> dict[str, Cost]:
        """The cost of each part of this rank by canonical name, in forward order, for a pack of one row.
        `head` is the final norm and the projector; `positions` are the shared rotary tables."""
        tokens, stream = workload.local_tokens(self.groups.tp_cp), self.shape.hidden * workload.narrow
        parts = {"positions": self.positions_cost(workload)}
        if self.patches is not None:
            parts["embedding"] = Cost(kept=tokens * self.shape.input * workload.narrow)
        parts |= self.block_costs(workload)
        if self.final_norm is not None and self.projector is not None:
            norm = self.final_norm.cost(workload, tokens)
            if workload.recomputes("norm"):
                norm = replace(norm, kept=tokens * stream)
            joined = workload.norm_output(tokens * stream, False)
            head = norm + self.projector.cost(workload, tokens // self.shape.group, joined)
            parts["head"] = head if self.exit is None else self.exit.cost(workload) + head
        return parts

    def flops(self, tokens: int) -> int:
        """Forward FLOPs of one item of `tokens` patches; those of a pack are the sum over its items."""
        own = tokens // self.groups.tp_cp.size
        embed = 0 if self.patches is None else self.patches.flops(own)
        leave = 0 if self.exit is None else self.exit.flops(tokens)
        head = 0 if self.projector is None else self.projector.flops(own // self.shape.group)
        return embed + self.stack.flops(tokens) + leave + head

    def phase_flops(self, phase: Phase, tokens: int) -> int:
        """The share of `flops` in a phase; phases of a split MoE block are not counted."""
        own = tokens // self.groups.tp_cp.size
        match phase.kind:
            case "segment":
                return self.flops(tokens)
            case "embed" if self.patches is not None:
                return self.patches.flops(own)
            case "block":
                return cast(Block, self.stack.blocks[str(phase.block)]).flops(tokens)
            case "final_norm":
                return 0 if self.exit is None else self.exit.flops(tokens)
            case "head" if self.projector is not None:
                return self.projector.flops(own // self.shape.group)
            case _:
                return 0


def own_rows(rows: int, rank: int, ranks: int) -> range:
    """The rows of a lane that one of its tp · cp ranks returns: slice `rank` of ceil(rows / ranks)."""
    most = -(-rows // ranks)
    return range(min(rank * most, rows), min((rank + 1) * most, rows))
