"""A micro-batch and its context: the per-micro-batch state of a forward pass.

Modules are stateless, so several micro-batches can be in flight. The context computes what layers share (rotary
tables, document spans) once, and stores what phases pass to later ones (dispatch plans, balance losses, expert
counts) by layer.

Every rank receives full rows. Mixers see all T tokens; between layers, sequence and context parallelism leave a
rank t of them, the slice that `Context.local_slice` takes.

Shapes: B rows, T tokens, t tokens of this rank, C channels, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.architecture import Yarn
from braid.distributed.collectives import Groups, own_slice
from braid.kernels.attention import Spans, spans_of
from braid.kernels.host import to_device
from braid.nn.attention import AttentionCache
from braid.nn.delta_net import DeltaNetCache
from braid.nn.dropout import keep_mask
from braid.nn.latent_attention import LatentCache
from braid.nn.mamba2 import Mamba2Cache
from braid.nn.moe.balance import Balance
from braid.nn.moe.dispatch_plan import DispatchPlan
from braid.nn.moe.replay import Recording
from braid.nn.moe.token_ids import Tokens
from braid.nn.rotary import Rotary, rotary_tables
from braid.pattern import Layer

Cache = AttentionCache | LatentCache | Mamba2Cache | DeltaNetCache
"""KV cache or recurrent state of a mixer."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of packed documents, whatever their tokens are."""

    positions_BT: Tensor
    """Position of a token in its document, from 0."""
    documents_BT: Tensor
    """Document id of a token: a run of equal ids is one document, negative ids are padding."""
    sample_B: Tensor
    """Global index of each row's sample. Dropout and jitter are seeded with it, independently of batch and
    rank."""
    step: int | Tensor = 0
    """A CUDA graph reads it from the device, in each replay anew: masks of an int would repeat."""
    seed: int = 0
    training: bool = True
    """Whether dropout, jitter and expert capacity apply."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch(PackedRows):
    """The input of a language model."""

    tokens_BT: Tensor
    labels_BT: Tensor
    """The next token of each token; arbitrary where the loss is masked."""
    loss_mask_BT: Tensor
    """True where a prediction contributes to the loss."""

    @staticmethod
    def of_tokens(tokens_BT: Tensor, start: int = 0) -> MicroBatch:
        """A micro-batch for generation: one document per row, no labels, first token at position `start`."""
        zeros_BT = torch.zeros_like(tokens_BT)
        return MicroBatch(
            tokens_BT=tokens_BT,
            labels_BT=zeros_BT,
            loss_mask_BT=zeros_BT.bool(),
            positions_BT=(torch.arange(tokens_BT.shape[1]) + start).to(tokens_BT.device).expand_as(tokens_BT),
            documents_BT=zeros_BT,
            sample_B=torch.arange(len(tokens_BT), device=tokens_BT.device),
            training=False,
        )

    def to(self, device: torch.device) -> MicroBatch:
        return replace(
            self,
            tokens_BT=to_device(self.tokens_BT, device),
            labels_BT=to_device(self.labels_BT, device),
            loss_mask_BT=to_device(self.loss_mask_BT, device),
            positions_BT=to_device(self.positions_BT, device),
            documents_BT=to_device(self.documents_BT, device),
            sample_B=to_device(self.sample_B, device),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatchTotals:
    """Sizes of a micro-batch over all its ranks: the denominators of mean losses."""

    tokens: int
    """Tokens without padding."""
    rows: int

    @staticmethod
    def of(documents_BT: Tensor) -> MicroBatchTotals:
        """The totals of a micro-batch on a single rank; `documents_BT` is on the host."""
        return MicroBatchTotals(tokens=int((documents_BT >= 0).sum()), rows=len(documents_BT))


class StackContext:
    """The state of one micro-batch in a stack of blocks, whatever its tokens are.

    Not a dataclass: FSDP2 copies dataclasses among a module's arguments, and writes to a copy would be lost.
    """

    def __init__(
        self,
        *,
        batch: PackedRows,
        groups: Groups,
        totals: MicroBatchTotals,
        host_documents_BT: Tensor,
        dtype: torch.dtype,
        caches: Mapping[Layer, Cache],
    ) -> None:
        self.batch = batch
        """This rank's rows of the micro-batch, on the model's device."""
        self.groups = groups
        """Process groups of this rank."""
        self.totals = totals
        self.host_documents_BT = host_documents_BT
        """Documents on the host, so that computing spans does not synchronize with the device."""
        self.dtype = dtype
        """Dtype of the activations."""
        self.caches = caches
        """Generation: the cache of each mixer. Empty in training."""
        self.dispatch_plans: dict[Layer, DispatchPlan] = {}
        self.balances: dict[Layer, Balance] = {}
        """Auxiliary losses and expert counts of each MoE layer."""
        self.earlier_E: Mapping[Layer, Tensor] = {}
        """For each MoE layer, `Balance.raw_counts_E` summed over the step's earlier micro-batches."""
        self.deviations: dict[Layer, Tensor] | None = None
        """If not None, layers report here how far their hyper-connection is from doubly stochastic."""
        self.recording: Recording | None = None
        """If not None, routers record their decisions here."""
        self.replay: Recording | None = None
        """If not None, routers replay these decisions."""
        self._rotary: dict[tuple[int, float, Yarn | None], Rotary] = {}
        self._spans: dict[tuple[int | None, bool], Spans] = {}

    def rotary(self, rope_dim: int, base: float, scaling: Yarn | None) -> Rotary:
        """The rotary tables; computed on first use and shared by layers."""
        key = (rope_dim, base, scaling)
        if key not in self._rotary:
            self._rotary[key] = rotary_tables(self.batch.positions_BT, rope_dim, base, self.dtype, scaling)
        return self._rotary[key]

    def spans(self, window: int | None, *, causal: bool = True) -> Spans:
        """The document spans for attention; computed on first use and shared by layers."""
        key = (window, causal)
        if key not in self._spans:
            device = self.batch.positions_BT.device
            self._spans[key] = spans_of(self.host_documents_BT, window, device, causal=causal)
        return self._spans[key]

    def set_spans(self, window: int | None, spans: Spans, *, causal: bool = True) -> None:
        """Have layers use these spans, instead of those that would be computed."""
        self._spans[window, causal] = spans

    @cached_property
    def documents(self) -> Tensor | None:
        """The document ids; None if every row is a single document, for which mixers have a fast path."""
        host_BT = self.host_documents_BT
        return None if bool((host_BT == host_BT[:, :1]).all()) else self.batch.documents_BT

    def shared(self) -> Iterator[Tensor]:
        """The tensors of the micro-batch that layers share, as far as they have been computed."""
        yield from (each for each in vars(self.batch).values() if isinstance(each, Tensor))
        yield from (table for rotary in self._rotary.values() for table in rotary)
        for spans in self._spans.values():
            yield from spans.tensors()

    def local_slice(self, x_BT: Tensor) -> Tensor:
        """The tokens of full rows that this rank holds between layers."""
        return own_slice(x_BT, self.groups.tp_cp, dim=1)

    def tokens(self, layer: Layer) -> Tokens:
        """The identities of this rank's tokens, for the router of a layer."""
        batch, padding = self.batch, self._padding_count
        return Tokens(
            sample_B=batch.sample_B,
            position_T=self._positions_T,
            padding_BT=self.local_slice(batch.documents_BT) < 0 if padding else None,
            padding_count=padding,
            global_tokens=self.totals.tokens,
            global_rows=self.totals.rows,
            layer=layer.stream,
            seed=batch.seed,
            step=batch.step,
            training=batch.training,
        )

    @cached_property
    def _padding_count(self) -> int:
        return int((self.local_slice(self.host_documents_BT) < 0).sum())

    @cached_property
    def _positions_T(self) -> Tensor:
        """Positions of this rank's tokens in their rows. With caches, rows continue where the caches end."""
        if self.caches:
            return self.batch.positions_BT[0]
        tokens, device = self.batch.positions_BT.shape[1], self.batch.positions_BT.device
        position_T = torch.arange(tokens, device=device)
        return own_slice(position_T, self.groups.tp_cp, dim=0)

    def keep_mask(self, layer: Layer, rate: float, channels: int) -> Tensor:
        """The dropout mask of a layer: True is kept."""
        batch = self.batch
        return keep_mask(
            rate,
            seed=batch.seed,
            step=batch.step,
            layer=layer.stream,
            sample_B=batch.sample_B,
            position_T=self._positions_T,
            channels=channels,
        )


class Context(StackContext):
    """The state of one micro-batch in a language model; see `LanguageModel.prepare`."""

    batch: MicroBatch

    def __init__(self, *, placeholders: Mapping[str, Tensor] = MappingProxyType({}), **held: Any) -> None:
        super().__init__(**held)
        self.placeholders = placeholders
        """For every module, the indices of its placeholders among this rank's tokens."""
