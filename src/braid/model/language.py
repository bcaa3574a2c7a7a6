"""The language model: embedding, stack, final norm, head, loss.

Shapes: B rows, T tokens, N = B · T, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture
from braid.kernels import Kernels
from braid.model.context import Context, MicroBatch
from braid.model.stack import Stack
from braid.nn.canonical import Canonical, under
from braid.nn.embedding import Embedding, check_ids
from braid.nn.init import initialize
from braid.nn.linear import Linear
from braid.nn.loss import cross_entropy
from braid.nn.norm import norm
from braid.pattern import Layout


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What a micro-batch costs, before anybody divides."""

    loss_sum: Tensor
    """Cross-entropy, summed over the tokens that count."""
    token_count: Tensor
    """How many count."""
    aux: dict[str, Tensor]
    """Further losses by name: weighted, and means over the micro-batch rather than sums."""

    def share(self, step_tokens: int) -> Tensor:
        """This micro-batch's part of the step's loss, where the whole step counts `step_tokens` tokens. The
        parts of all micro-batches add up to the loss of the step; where no token counts, that is zero."""
        means = sum(self.aux.values(), torch.zeros_like(self.loss_sum))
        return (self.loss_sum + means * self.token_count) / max(step_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Weights of a model."""

    total: int
    active: int
    """Those that one token meets: of the routed experts, only as many as it visits."""


class LanguageModel(nn.Module):
    """A model of the next token. Weights are uninitialised until `initialize` or a checkpoint fills them."""

    def __init__(
        self,
        shape: architecture.Model,
        layout: Layout,
        kernels: Kernels,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layout.mtp:
            raise ValueError(f"the pattern has {len(layout.mtp)} MTP depths: they cannot be built yet")
        self.shape = shape
        self.layout = layout
        self.kernels = kernels
        self.embedding = Embedding(shape.vocab, shape.hidden, device=device, dtype=dtype)
        self.stack = Stack(layout, shape, kernels, device=device, dtype=dtype)
        self.final_norm = norm(shape.norm, shape.hidden, shape.norm_eps, device=device, dtype=dtype)
        self.head = None if shape.tied else Linear(shape.hidden, shape.vocab, device=device, dtype=dtype)

    # ------------------------------------------------------------------------------------ forward

    def prepare(self, batch: MicroBatch) -> Context:
        """The context of a micro-batch, which should still be on the host: ids are checked there."""
        check_ids(batch.tokens_BT, self.shape.vocab)
        weight = self.embedding.weight
        return Context(
            batch=batch.to(weight.device), host_documents_BT=batch.documents_BT.cpu(), dtype=weight.dtype
        )

    def forward(self, batch: MicroBatch) -> Losses:
        return self.losses(self.prepare(batch))

    def losses(self, context: Context) -> Losses:
        """Run a prepared micro-batch."""
        batch = context.batch
        logits_NV = self.logits(context).flatten(0, 1)
        loss_sum, count = cross_entropy(logits_NV, batch.labels_BT.flatten(), batch.loss_mask_BT.flatten())
        aux = {"load_balance": torch.stack(list(context.aux.values())).sum()} if context.aux else {}
        return Losses(loss_sum=loss_sum, token_count=count, aux=aux)

    def logits(self, context: Context) -> Tensor:
        """Scores of every next token, for every token."""
        x_BTC = self.embedding(context.batch.tokens_BT)
        x_BTC = self.final_norm(self.stack(x_BTC, context))
        return F.linear(x_BTC, self.embedding.weight) if self.head is None else self.head(x_BTC)

    # -------------------------------------------------------------------------------------- facts

    def canonical(self) -> dict[str, Canonical]:
        """Every tensor of a checkpoint of this model, by its canonical name, and where it lives."""
        tensors = under("embedding", "embedding", self.embedding.canonical())
        tensors |= under("", "stack", self.stack.canonical())
        tensors |= under("final_norm", "final_norm", self.final_norm.canonical())
        return tensors if self.head is None else tensors | under("head", "head", self.head.canonical())

    def initialize(self, seed: int, into: Mapping[str, Tensor] | None = None) -> None:
        """Set every weight to where a run with this seed starts; or, by parameter name, copies that somebody
        keeps in a wider dtype."""
        parameters = dict(self.named_parameters()) if into is None else into
        layers = len(self.layout.layers)
        initialize(parameters, self.canonical(), seed=seed, std=self.shape.init_std, layers=layers)

    def size(self) -> Size:
        """How many weights there are, and how many of them one token meets."""
        routed = sum(prod(t.shape) for name, t in self.canonical().items() if ".moe.experts." in name)
        total = sum(parameter.numel() for parameter in self.parameters())
        idle = 0 if self.shape.moe is None else routed * (1 - self.shape.moe.top_k / self.shape.moe.experts)
        return Size(total=total, active=round(total - idle))

    def decaying(self) -> frozenset[str]:
        """Names of the parameters that weight decay applies to: the matrices."""
        return frozenset(tensor.parameter for tensor in self.canonical().values() if tensor.decays)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the forward pass of one row. Training takes three times as many."""
        return self.stack.flops(tokens) + 2 * tokens * self.shape.hidden * self.shape.vocab
