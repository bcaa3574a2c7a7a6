"""The encoder: patches of packed items, a stack of blocks, final norm, row groups, projector.

    rows = projector(join(norm(blocks(patches · W + b + positions))))    `group` neighbours of an item joined

A lane packs its items one after the other into a single row of tokens, filled up with padding; an item is a
document: its prefix tokens, then its patches. Layers are those of the language model, split over tp, cp, ep and
pp in the same way. Each of the P = tp · cp ranks of a lane holds a slice of the tokens between layers, and
returns slice i of ceil(R / P) of the R rows. Without prefix tokens the pack is padded to a multiple of
P · `group` patches, so the slices of patches are those of whole rows, and joining rows needs no other rank.
With them, ranks gather all tokens first. A pack without items is padding alone, so that every lane issues the
same collectives.

Patches of images come in the order of `braid.patch_grid`, so that joining neighbours is pixel shuffle.

Shapes: N patches of all items of a lane, T tokens, those of prefixes and padding included, t tokens of this
rank, I numbers of a patch, C hidden channels, R rows of a lane, r rows of this rank, J = `group` · C joined
channels, W output channels. `stream` is the residual stream: 1tC, or 1tSC with hyper-connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from braid.distributed.collectives import Groups, all_gather, own_slice
from braid.encoders import Encoder
from braid.errors import DataError
from braid.kernels import Kernels
from braid.kernels.host import to_device
from braid.model.block import Block, BlockCosts
from braid.model.context import MicroBatchTotals, PackedRows, StackContext
from braid.model.language import Losses, sum_losses
from braid.model.stack import Stack
from braid.model.stacked import StackedModel
from braid.nn.canonical import Canonical, under
from braid.nn.cost import INDEX_BYTES, Cost, Workload, all_gather_calls, in_phase
from braid.nn.dropout import keep_mask
from braid.nn.hyper_connection import expand
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.nn.patch_embedding import PatchEmbedding, PrefixPlaces
from braid.nn.position_table import TAPS, Taps, Window, item_taps, random_windows
from braid.nn.projector import Projector
from braid.nn.work import Work, moved
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
    grids: Sequence[tuple[int, int]]
    """Rows and columns of patches of each item; 1 x n for what has no second dimension."""
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
    taps: Taps | None
    """Where this rank's tokens read the table of positions; None without one, and on later stages."""
    prefix: PrefixPlaces | None
    """This rank's prefix tokens; None if the encoder has none."""
    joined_N: Tensor | None
    """The tokens of all ranks that this rank's rows are made of; None if they are its own."""


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
        self.patches: PatchEmbedding | None = None
        self.projector: Projector | None = None
        if first:
            self.patches = PatchEmbedding(shape, groups=groups, **on)
        self.stack = Stack(layout, self.segments, shape, kernels, dispatcher, groups=groups, **on)
        if last:
            self._build_final_norm(on)
            self.projector = Projector(shape, kernels, groups=groups, **on)

    # ------------------------------------------------------------------------------------ forward

    def prepare(self, items: Items, totals: MicroBatchTotals | None = None) -> EncoderContext:
        """Validate items, pack them and create their context. `totals` are the patches and lanes over all
        ranks; by default the items are on this rank only."""
        self.check(items)
        shape, ranks = self.shape, self.groups.tp_cp
        patches = sum(items.lengths)
        tokens = [shape.tokens(length) for length in items.lengths]
        padding = shape.pack_tokens(patches, len(tokens), ranks.size) - sum(tokens)
        lengths = torch.tensor([*tokens, padding])
        starts = lengths.cumsum(0) - lengths
        positions_T = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        number = [sample << ITEM_BITS | item for sample, item in zip(items.samples, items.numbers, strict=True)]
        documents_1T = torch.tensor([*range(len(items.lengths)), -1]).repeat_interleave(lengths)[None]
        patch_N = ((positions_T >= shape.prefix) & (documents_1T[0] >= 0)).nonzero().flatten()
        batch = PatchRows(
            patches_1tI=self._own(_spread(items.patches_NI.to(self.dtype), patch_N, len(positions_T)))[None],
            item_1T=to_device(torch.tensor([*number, 0]).repeat_interleave(lengths)[None], self.device),
            rows=shape.rows(patches),
            taps=self._taps(items, number, patch_N, len(positions_T)),
            prefix=self._prefix(positions_T, documents_1T[0]),
            joined_N=self._joined(patch_N),
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

    def _own(self, x_T: Tensor) -> Tensor:
        """This rank's slice of what all tokens of the pack have, on its device."""
        return to_device(own_slice(x_T, self.groups.tp_cp, dim=0), self.device)

    def _taps(self, items: Items, numbers: Sequence[int], patch_N: Tensor, tokens: int) -> Taps | None:
        """Where the tokens of this rank read the table of positions. Frozen positions have no jitter: nothing
        could learn from it."""
        table = self.shape.positions
        if table is None or self.patches is None or self.patches.positions is None:
            return None
        windows: Sequence[Window | None] = [None] * len(items.grids)
        if table.jitter and items.training and self.patches.positions.requires_grad:
            windows = random_windows(items.seed, items.step, numbers)
        taps = [
            item_taps(table, grid, self.shape.block, window)
            for grid, window in zip(items.grids, windows, strict=True)
        ]
        wide = torch.promote_types(self.dtype, torch.float32)
        row_N4 = torch.cat([torch.zeros(0, TAPS, dtype=torch.int64), *(each.row_N4 for each in taps)])
        weight_N4 = torch.cat([torch.zeros(0, TAPS), *(each.weight_N4 for each in taps)]).to(wide)
        return Taps(*(self._own(_spread(each, patch_N, tokens)) for each in (row_N4, weight_N4)))

    def _prefix(self, position_T: Tensor, document_T: Tensor) -> PrefixPlaces | None:
        """The prefix tokens among those of this rank."""
        if not self.shape.prefix:
            return None
        position_t, document_t = (own_slice(x, self.groups.tp_cp, dim=0) for x in (position_T, document_T))
        token_n = ((position_t < self.shape.prefix) & (document_t >= 0)).nonzero().flatten()
        return PrefixPlaces(to_device(token_n, self.device), to_device(position_t[token_n], self.device))

    def _joined(self, patch_N: Tensor) -> Tensor | None:
        """The patches of this rank's rows among the tokens of all ranks."""
        if not self.shape.prefix:
            return None
        ranks, group = self.groups.tp_cp, self.shape.group
        held = own_rows(self.shape.rows(len(patch_N)), ranks.rank, ranks.size)
        return to_device(patch_N[held.start * group : held.stop * group], self.device)

    def check(self, items: Items) -> None:
        """Raise a DataError if an item is empty, not made of whole groups, or of a shape that the encoder does
        not take, or if patches do not fit."""
        group, given = self.shape.group, tuple(items.patches_NI.shape)
        names = [
            f"item {number} of sample {sample}"
            for sample, number in zip(items.samples, items.numbers, strict=True)
        ]
        for name, length in zip(names, items.lengths, strict=True):
            if length < 1 or length % group:
                raise DataError(
                    f"{name} has {length} patches: an item has at least one, and a multiple of group ({group})"
                )
        if given != (sum(items.lengths), self.shape.input):
            raise DataError(
                f"patches are {' x '.join(map(str, given))}, but items of {sum(items.lengths)} patches with "
                f"{self.shape.input} numbers each were announced"
            )
        if self.patches is not None:  # later stages know how many patches there are, not how they lie
            for name, length, grid in zip(names, items.lengths, items.grids, strict=True):
                _check_grid(name, length, grid, self.shape.block)

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
        """Project the patches, and add positions and prefix tokens: the initial residual stream."""
        assert self.patches is not None
        batch = context.batch
        x_1tC: Tensor = self.patches(batch.patches_1tI, batch.taps, batch.prefix)
        return x_1tC if self.shape.hyper is None else expand(x_1tC, self.shape.hyper.streams)

    def project(self, hidden_1tC: Tensor, context: EncoderContext) -> Tensor:
        """Join the rows of every group, and project those of this rank that are not padding."""
        assert self.projector is not None
        batch, ranks = context.batch, self.groups.tp_cp
        if batch.joined_N is not None:
            # A patch is in a row of one rank only: the sum over ranks in backward has one term.
            hidden_1tC = all_gather(hidden_1tC, ranks, dim=1).index_select(1, batch.joined_N)
        joined_rJ = hidden_1tC.reshape(-1, self.shape.group * self.shape.hidden)
        held = own_rows(batch.rows, ranks.rank, ranks.size)
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
        parts = {"positions": self.positions_cost(workload)}
        if self.patches is not None:
            parts["embedding"] = self.patches.cost(workload)
        parts |= self.block_costs(BlockCosts(workload))
        if self.projector is not None:
            head = self._head_cost(workload, self.projector)
            parts["head"] = head if self.exit is None else self.exit.cost(workload) + head
        return parts

    def _head_cost(self, workload: Workload, projector: Projector) -> Cost:
        """The final norm, the exchange of tokens, and the projector."""
        ranks, group = self.groups.tp_cp, self.shape.group
        tokens, stream = workload.local_tokens(ranks), self.shape.hidden * workload.narrow
        head, joined = Cost(), tokens * stream
        if self.final_norm is not None:
            head = self.final_norm.cost(workload, tokens)
            if workload.recomputes("norm"):
                head = replace(head, kept=tokens * stream)
            joined = workload.norm_output(joined, bool(self.shape.prefix))
        if not self.shape.prefix:
            return head + projector.cost(workload, tokens // group, joined)
        patches = workload.tokens - workload.items * self.shape.prefix
        rows = -(-(patches // group) // ranks.size)
        # Backward has the gradient of all tokens, and that of this rank's.
        gathered = Cost(
            kept=rows * group * INDEX_BYTES,
            passing=(workload.local_tokens() + tokens) * stream,
            calls=in_phase(all_gather_calls(ranks, tokens * stream, "features"), "head"),
        )
        return head + gathered + projector.cost(workload, rows, rows * group * stream)

    def works(self, workload: Workload, load: float = 1.0) -> dict[str, dict[str, Work]]:
        """The work of each part of this rank by kind of phase, in forward order, for a pack of equal items; see
        `LanguageModel.works`."""
        parts: dict[str, dict[str, Work]] = {}
        if self.patches is not None:
            parts["embedding"] = {"embed": self.patches.work(workload) + self.expand_work(workload)}
        parts |= dict(self.block_works(workload, load))
        if self.projector is not None:
            ends = {"final_norm": self.final_norm_work(workload), "head": self._head_work(workload)}
            parts["head"] = {kind: work for kind, work in ends.items() if work != Work()}
        return parts

    def _head_work(self, workload: Workload) -> Work:
        """The projector; with prefix tokens, patches are picked from the tokens of all ranks first."""
        assert self.projector is not None
        ranks, group, work = self.groups.tp_cp, self.shape.group, Work()
        tokens, stream = workload.local_tokens(ranks), self.shape.hidden * workload.narrow
        rows = tokens // group
        if self.shape.prefix:
            rows = -(-((workload.tokens - workload.items * self.shape.prefix) // group) // ranks.size)
            picked = 2 * rows * group * stream
            work = moved(picked, picked + workload.local_tokens() * stream, launches=(1, 2))
        return work + self.projector.work(workload, rows)

    def flops(self, tokens: int) -> int:
        """Forward FLOPs of one item of `tokens` patches; those of a pack are the sum over its items."""
        leave = 0 if self.exit is None else self.exit.flops(self.shape.tokens(tokens))
        layers = self.stack.flops(self.shape.tokens(tokens))
        return self._embed_flops(tokens) + layers + leave + self._head_flops(tokens)

    def phase_flops(self, phase: Phase, tokens: int) -> int:
        """The share of `flops` in a phase; phases of a split MoE block are not counted."""
        match phase.kind:
            case "segment":
                return self.flops(tokens)
            case "embed":
                return self._embed_flops(tokens)
            case "block":
                block = cast(Block, self.stack.blocks[str(phase.block)])
                return block.flops(self.shape.tokens(tokens))
            case "final_norm":
                return 0 if self.exit is None else self.exit.flops(self.shape.tokens(tokens))
            case "head":
                return self._head_flops(tokens)
            case _:
                return 0

    def _embed_flops(self, patches: int) -> int:
        """Zeros are projected in the places of prefix tokens."""
        own = self.shape.tokens(patches) // self.groups.tp_cp.size
        return 0 if self.patches is None else self.patches.flops(own)

    def _head_flops(self, patches: int) -> int:
        own = patches // self.groups.tp_cp.size
        return 0 if self.projector is None else self.projector.flops(own // self.shape.group)


def _check_grid(item: str, patches: int, grid: tuple[int, int], block: int) -> None:
    rows, columns = grid
    if rows * columns != patches:
        raise DataError(f"{item} has {patches} patches, but is said to be {rows} x {columns} of them")
    if rows % block or columns % block:
        raise DataError(
            f"{item} is {rows} x {columns} patches: the encoder joins {block} x {block} of them into a row, so "
            f"both sides must be multiples of {block}"
        )


def _spread(x_N: Tensor, token_N: Tensor, tokens: int) -> Tensor:
    """What patches have, in the places of their tokens; zero for all other tokens."""
    x_T = x_N.new_zeros(tokens, *x_N.shape[1:])
    x_T[token_N] = x_N
    return x_T


def own_rows(rows: int, rank: int, ranks: int) -> range:
    """The rows of a lane that one of its tp · cp ranks returns: slice `rank` of ceil(rows / ranks)."""
    most = -(-rows // ranks)
    return range(min(rank * most, rows), min((rank + 1) * most, rows))
