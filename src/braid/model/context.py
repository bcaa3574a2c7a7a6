"""A micro-batch, and the context that holds its state while it passes through a model.

Modules keep nothing of a micro-batch. What layers share (rotary tables, document spans) is made once here;
what phases leave for one another (order of rows, losses, counts) is filed here under its layer.

Shapes: B rows, T tokens, C channels, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from braid.kernels.attention import Spans, spans_of
from braid.nn.dropout import keep_mask
from braid.nn.moe.dispatch import Order
from braid.nn.rotary import Rotary, rotary_tables
from braid.pattern import Layer


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
    def of_tokens(tokens_BT: Tensor) -> MicroBatch:
        """Rows of one document each, without labels: for generation and evaluation of logits."""
        zeros_BT = torch.zeros_like(tokens_BT)
        return MicroBatch(
            tokens_BT=tokens_BT,
            labels_BT=zeros_BT,
            loss_mask_BT=zeros_BT.bool(),
            positions_BT=torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT),
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
    expert_counts_E: dict[Layer, Tensor] = field(default_factory=dict)
    """How many assignments each expert of each MoE layer received, padding excluded."""
    aux: dict[Layer, Tensor] = field(default_factory=dict)
    """Each MoE layer's load-balancing loss, weighted."""
    _rotary: dict[tuple[int, float], Rotary] = field(default_factory=dict)
    _spans: dict[int | None, Spans] = field(default_factory=dict)

    def rotary(self, head_dim: int, base: float) -> Rotary:
        """The rotary tables, made for the first layer that asks."""
        if (head_dim, base) not in self._rotary:
            tables = rotary_tables(self.batch.positions_BT, head_dim, base, self.dtype)
            self._rotary[head_dim, base] = tables
        return self._rotary[head_dim, base]

    def spans(self, window: int | None) -> Spans:
        """The documents as attention needs them, cut for the first layer that asks."""
        if window not in self._spans:
            device = self.batch.tokens_BT.device
            self._spans[window] = spans_of(self.host_documents_BT, window, device)
        return self._spans[window]

    def valid_BT(self) -> Tensor:
        """True for tokens, False for padding."""
        return self.batch.documents_BT >= 0

    def keep_mask(self, layer: Layer, rate: float, channels: int) -> Tensor:
        """What a layer's dropout keeps."""
        batch = self.batch
        places_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
        return keep_mask(
            rate,
            seed=batch.seed,
            step=batch.step,
            layer=layer.stream,
            sample_B=batch.sample_B,
            position_T=places_T,
            channels=channels,
        )
