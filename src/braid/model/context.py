"""A micro-batch, and the context that holds its state while it passes through a model.

Modules keep nothing of a micro-batch. What layers share (rotary tables, document spans) is made once here;
what phases leave for one another (order of rows, losses, counts) is filed here under its layer.

Shapes: B rows, T tokens, C channels, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from braid.architecture import Yarn
from braid.kernels.attention import Spans, spans_of
from braid.nn.attention import AttentionCache
from braid.nn.delta_net import DeltaNetCache
from braid.nn.dropout import keep_mask
from braid.nn.latent_attention import LatentCache
from braid.nn.mamba2 import Mamba2Cache
from braid.nn.moe.balance import Balance
from braid.nn.moe.dispatch import Order
from braid.nn.moe.replay import Recording
from braid.nn.moe.tokens import Tokens
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
            tokens_BT=self.tokens_BT.to(device, non_blocking=True),
            labels_BT=self.labels_BT.to(device, non_blocking=True),
            loss_mask_BT=self.loss_mask_BT.to(device, non_blocking=True),
            positions_BT=self.positions_BT.to(device, non_blocking=True),
            documents_BT=self.documents_BT.to(device, non_blocking=True),
            sample_B=self.sample_B.to(device, non_blocking=True),
        )


@dataclass(kw_only=True)
class Context:
    """The state of one micro-batch in one model. Made by `LanguageModel.prepare`."""

    batch: MicroBatch
    """On the model's device."""
    host_documents_BT: Tensor
    """The batch's documents on the host, where spans are cut."""
    dtype: torch.dtype
    """Dtype of the activations."""
    orders: dict[Layer, Order] = field(default_factory=dict)
    """How each MoE layer sorted its rows."""
    balances: dict[Layer, Balance] = field(default_factory=dict)
    """What each MoE layer's router did to its experts: weighted losses, and counts."""
    earlier_E: Mapping[Layer, Tensor] = field(default_factory=dict)
    """For each MoE layer, the favourites of the step's earlier micro-batches."""
    recording: Recording | None = None
    """Where routers write down what they decide."""
    replay: Recording | None = None
    """Decisions that routers repeat instead of making their own."""
    caches: Mapping[Layer, Cache] = field(default_factory=dict)
    """For generation: what each mixer remembers of the tokens before this micro-batch."""
    _rotary: dict[tuple[int, float, Yarn | None], Rotary] = field(default_factory=dict)
    _spans: dict[int | None, Spans] = field(default_factory=dict)

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

    def tokens(self, layer: Layer) -> Tokens:
        """Who the tokens are, for the router of a layer."""
        batch, padding = self.batch, int((self.host_documents_BT < 0).sum())
        return Tokens(
            sample_B=batch.sample_B,
            place_T=self._places_T(),
            padding_BT=batch.documents_BT < 0 if padding else None,
            padding_count=padding,
            layer=layer.stream,
            seed=batch.seed,
            step=batch.step,
            training=batch.training,
        )

    def _places_T(self) -> Tensor:
        """Each token's place in its row; with caches, rows go on where they stand."""
        if self.caches:
            return self.batch.positions_BT[0]
        return torch.arange(self.batch.tokens_BT.shape[1], device=self.batch.tokens_BT.device)

    def keep_mask(self, layer: Layer, rate: float, channels: int) -> Tensor:
        """What a layer's dropout keeps."""
        batch = self.batch
        return keep_mask(
            rate,
            seed=batch.seed,
            step=batch.step,
            layer=layer.stream,
            sample_B=batch.sample_B,
            position_T=self._places_T(),
            channels=channels,
        )
