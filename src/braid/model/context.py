"""A micro-batch, and the context that holds its state while it passes through a model.

Modules keep nothing of a micro-batch. What layers share (rotary tables, document spans) is made once here;
what phases leave for one another (order of rows, losses, counts) is filed here under its layer.

A rank is given whole rows. Mixers see all T tokens of them; between layers a rank holds t of them, the slice
that `Context.mine` takes.

Shapes: B rows, T tokens, t tokens of this rank, C channels, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

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
"""What a mixer remembers of the tokens it has seen."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a model is given: rows of tokens, and who they are."""

    tokens_BT: Tensor
    labels_BT: Tensor
    """What each token should predict; anything where the loss is masked."""
    loss_mask_BT: Tensor
    """True where a token's prediction counts."""
    positions_BT: Tensor
    """A token's place in its document, from 0."""
    documents_BT: Tensor
    """A token's document: runs of equal ids are documents, and negative ids are padding."""
    sample_B: Tensor
    """The global number of each row's sample: random masks follow it."""
    step: int = 0
    seed: int = 0
    training: bool = True
    """Whether random masks apply."""

    @staticmethod
    def of_tokens(tokens_BT: Tensor, start: int = 0) -> MicroBatch:
        """Rows of one document each, without labels, the first token at position `start`: for generation."""
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
        """The same micro-batch with its tensors on `device`."""
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
class Whole:
    """A micro-batch over all ranks that share it: what its means divide by."""

    tokens: int
    """Tokens that are not padding."""
    rows: int

    @staticmethod
    def of(documents_BT: Tensor) -> Whole:
        """A micro-batch that one process has to itself, with documents on the host."""
        return Whole(tokens=int((documents_BT >= 0).sum()), rows=len(documents_BT))


class Context:
    """The state of one micro-batch in one model. Made by `LanguageModel.prepare`.

    Not a dataclass: FSDP2 copies those that a module is given, and what is filed in a copy is lost.
    """

    def __init__(
        self,
        *,
        batch: MicroBatch,
        groups: Groups,
        whole: Whole,
        host_documents_BT: Tensor,
        dtype: torch.dtype,
        caches: Mapping[Layer, Cache],
    ) -> None:
        self.batch = batch
        """This rank's rows of the micro-batch, on the model's device."""
        self.groups = groups
        """The ranks that share the micro-batch."""
        self.whole = whole
        """The micro-batch over all its ranks."""
        self.host_documents_BT = host_documents_BT
        """The batch's documents on the host, where spans are cut."""
        self.dtype = dtype
        """Dtype of the activations."""
        self.caches = caches
        """For generation: what each mixer remembers of the tokens before this micro-batch."""
        self.dispatch_plans: dict[Layer, DispatchPlan] = {}
        """Where each MoE layer's rows go, and how they return."""
        self.balances: dict[Layer, Balance] = {}
        """What each MoE layer's router did to its experts: weighted losses, and counts."""
        self.earlier_E: Mapping[Layer, Tensor] = {}
        """For each MoE layer, the favourites of the step's earlier micro-batches."""
        self.deviations: dict[Layer, Tensor] | None = None
        """Where layers write down how far the mixing of their streams is from doubly stochastic."""
        self.recording: Recording | None = None
        """Where routers write down what they decide."""
        self.replay: Recording | None = None
        """Decisions that routers repeat instead of making their own."""
        self._rotary: dict[tuple[int, float, Yarn | None], Rotary] = {}
        self._spans: dict[int | None, Spans] = {}

    def rotary(self, rope_dim: int, base: float, scaling: Yarn | None) -> Rotary:
        """The rotary tables, made for the first layer that asks."""
        key = (rope_dim, base, scaling)
        if key not in self._rotary:
            self._rotary[key] = rotary_tables(self.batch.positions_BT, rope_dim, base, self.dtype, scaling)
        return self._rotary[key]

    def spans(self, window: int | None) -> Spans:
        """The documents as attention needs them, cut for the first layer that asks."""
        if window not in self._spans:
            device = self.batch.tokens_BT.device
            self._spans[window] = spans_of(self.host_documents_BT, window, device)
        return self._spans[window]

    def documents(self) -> Tensor | None:
        """The documents of every row; None where each row is a single one, which mixers compute faster."""
        host_BT = self.host_documents_BT
        return None if bool((host_BT == host_BT[:, :1]).all()) else self.batch.documents_BT

    def mine(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens between layers, out of whole rows."""
        return own_slice(x_BT, self.groups.tp_cp, dim=1)

    def tokens(self, layer: Layer) -> Tokens:
        """Who this rank's tokens are, for the router of a layer."""
        batch, padding = self.batch, self._padding
        return Tokens(
            sample_B=batch.sample_B,
            place_T=self._places_T,
            padding_BT=self.mine(batch.documents_BT) < 0 if padding else None,
            padding_count=padding,
            shared_tokens=self.whole.tokens,
            shared_rows=self.whole.rows,
            layer=layer.stream,
            seed=batch.seed,
            step=batch.step,
            training=batch.training,
        )

    @cached_property
    def _padding(self) -> int:
        """How many of this rank's tokens are none."""
        return int((self.mine(self.host_documents_BT) < 0).sum())

    @cached_property
    def _places_T(self) -> Tensor:
        """The place in its row of each of this rank's tokens; with caches, rows go on where they stand."""
        if self.caches:
            return self.batch.positions_BT[0]
        place_T = torch.arange(self.batch.tokens_BT.shape[1], device=self.batch.tokens_BT.device)
        return own_slice(place_T, self.groups.tp_cp, dim=0)

    def keep_mask(self, layer: Layer, rate: float, channels: int) -> Tensor:
        """What a layer's dropout keeps."""
        batch = self.batch
        return keep_mask(
            rate,
            seed=batch.seed,
            step=batch.step,
            layer=layer.stream,
            sample_B=batch.sample_B,
            position_T=self._places_T,
            channels=channels,
        )
