"""A micro-batch in memory that stays where it is: the input of CUDA graphs.

A graph reads the addresses that it was captured with. Before each replay, `load` copies another micro-batch of
the same form to them: its tokens, the tables of its documents, the number of the step (from which masks are
drawn) and what its losses are divided by.

Shapes: B rows, T tokens, K numbers of a loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from braid.errors import GraphError
from braid.kernels.attention.spans import Spans, document_runs, spans_of
from braid.kernels.attention.tiles import TILE, StaticTiles, tile_count
from braid.kernels.host import copy_to_
from braid.model.block import Block, Mixer
from braid.model.context import Context, MicroBatch, MicroBatchTotals
from braid.model.language import LanguageModel, LossScale
from braid.nn.attention import Attention
from braid.nn.delta_net import DeltaNet
from braid.nn.latent_attention import LatentAttention
from braid.nn.mamba2 import Mamba2

Masks = tuple[tuple[int | None, bool], ...]
"""The attention masks of a model: window, and whether causal."""


@dataclass(frozen=True)
class BatchForm:
    """What of a micro-batch decides which kernels run, and on which shapes."""

    rows: int
    tokens: int
    packed: bool
    """Whether any row has several documents, in a model whose mixers tell."""
    totals: MicroBatchTotals | None
    """In a model with experts, whose balance losses divide by them on the host."""
    padding: int
    """Tokens of padding, in a model with experts: they have no rows."""
    tiles: int
    """Tiles of the tables of attention, rounded up."""


STEP, SCALE = "step", "loss scale"
_FIELDS = frozenset(each.name for each in fields(MicroBatch))


class BatchForms:
    """Tells the form of micro-batches of a model."""

    def __init__(self, model: LanguageModel) -> None:
        blocks = [cast(Block, block) for _, stack in model.block_stacks() for block in stack.values()]
        mixers = [mixer for block in blocks for _, mixer in block.mixers()]
        self.recurrent = any(isinstance(each, Mamba2 | DeltaNet) for each in mixers)
        self.experts = any(block.moe() is not None for block in blocks)
        self.masks: Masks = tuple(dict.fromkeys(mask for each in mixers if (mask := _mask(each)) is not None))

    def of(self, batch: MicroBatch, totals: MicroBatchTotals) -> BatchForm:
        """The form of a micro-batch on the host. Batches of equal form can share a graph."""
        documents_BT = batch.documents_BT
        rows, tokens = documents_BT.shape
        tiles = 0
        if self.masks:
            step = max(rows * tokens // TILE // 4, 1)
            tiles = -(-tile_count(document_runs(documents_BT).flatten()) // step) * step
        return BatchForm(
            rows=rows,
            tokens=tokens,
            packed=self.recurrent and not bool((documents_BT == documents_BT[:, :1]).all()),
            totals=totals if self.experts else None,
            padding=int((documents_BT < 0).sum()) if self.experts else 0,
            tiles=tiles,
        )


def _mask(mixer: Mixer) -> tuple[int | None, bool] | None:
    if isinstance(mixer, Attention):
        return mixer.shape.window, mixer.causal
    return (None, mixer.causal) if isinstance(mixer, LatentAttention) else None


class StaticBatch:
    """The memory of one micro-batch of a form."""

    def __init__(
        self, model: LanguageModel, masks: Masks, form: BatchForm, batch: MicroBatch, scale: LossScale
    ) -> None:
        self.model, self.form, self.seed = model, form, batch.seed
        device = model.device
        wide = torch.promote_types(model.dtype, torch.float32)
        self.memory: dict[str, Tensor] = {
            **{name: torch.empty_like(value, device=device) for name, value in _tensors_of(batch)},
            STEP: torch.zeros((), dtype=torch.int64, device=device),
            SCALE: torch.zeros(len(scale.numbers()), dtype=wide, device=device),
        }
        """By name, everything that a graph reads. It stays in its place: `load` writes to it."""
        self.host_documents_BT = batch.documents_BT
        self.tiles: dict[tuple[int | None, bool], StaticTiles] = {}
        if device.type == "cuda":
            for window, causal in masks:
                made = StaticTiles(form.rows * form.tokens, form.tiles, window, device, causal=causal)
                self.tiles[window, causal] = made
                self.memory[f"attention tables of window {window}"] = made.joined

    def load(self, batch: MicroBatch, scale: LossScale) -> None:
        """Copy another micro-batch of the same form, which is on the host."""
        for name, value in _tensors_of(batch):
            if value.shape != self.memory[name].shape:
                raise GraphError(
                    f"a graph for {name} of shape {list(self.memory[name].shape)} was given "
                    f"{list(value.shape)}. This is a bug in braid: please report it"
                )
            copy_to_(self.memory[name], value)
        assert isinstance(batch.step, int)
        self.memory[STEP].fill_(batch.step)
        numbers_K = torch.tensor(scale.numbers(), dtype=torch.float64).to(self.memory[SCALE].dtype)
        copy_to_(self.memory[SCALE], numbers_K)
        self.host_documents_BT = batch.documents_BT
        if self.tiles:
            runs_N = document_runs(batch.documents_BT).flatten()
            for tiles in self.tiles.values():
                tiles.load(runs_N)

    @property
    def batch(self) -> MicroBatch:
        """The micro-batch in this memory, whose step is on the device."""
        held: dict[str, Any] = {name: value for name, value in self.memory.items() if name in _FIELDS}
        return MicroBatch(**held, seed=self.seed)

    def context(self, totals: MicroBatchTotals) -> Context:
        """A new context, whose layers read this memory."""
        context = Context(
            batch=self.batch,
            groups=self.model.groups,
            totals=totals,
            host_documents_BT=self.host_documents_BT,
            dtype=self.model.dtype,
            caches={},
        )
        for (window, causal), tiles in self.tiles.items():
            spans = self._spans(window, causal=causal).with_tiles(tiles.tiles)
            context.set_spans(window, spans, causal=causal)
        return context

    def _spans(self, window: int | None, *, causal: bool) -> Spans:
        return spans_of(self.host_documents_BT, window, self.model.device, causal=causal)

    def scale(self) -> LossScale:
        return LossScale.of_numbers(self.memory[SCALE])


def _tensors_of(batch: MicroBatch) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a micro-batch by field, without the step, which is a number on the host."""
    return ((name, value) for name, value in vars(batch).items() if isinstance(value, Tensor) and name != STEP)
