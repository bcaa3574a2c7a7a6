"""The input of an encoder: projected patches with their positions, and prefix tokens between them.

    x = patch · W + b + position        for a patch
    x = prefix[j]                       for the j-th class or register token of an item

Tokens are split over tp · cp ranks, and each tp rank has copies of all weights: no collective is needed.

Shapes: t tokens of this rank, n prefix tokens among them, I numbers of a patch, C hidden channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from braid.distributed.collectives import Group, Groups
from braid.encoders import Encoder
from braid.nn.canonical import Canonical, under
from braid.nn.cost import INDEX_BYTES, Cost, Workload
from braid.nn.embedding import lookup
from braid.nn.linear import Linear
from braid.nn.position_table import TAPS, Taps, tap_sum
from braid.nn.work import Work, moved


class PrefixPlaces(NamedTuple):
    """Which tokens are prefix tokens, and which of them."""

    token_n: Tensor
    """Indices among this rank's tokens."""
    row_n: Tensor


class PatchEmbedding(nn.Module):
    """A linear layer, with a table of positions and prefix tokens if the encoder has them."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden, self.copies = encoder.hidden, groups.tp
        self.tokens: Group = groups.tp_cp
        self.projection = Linear(
            encoder.input, hidden, bias=encoder.input_bias, copies=groups.tp, device=device, dtype=dtype
        )
        self.positions: nn.Parameter | None = None
        self.prefix: nn.Parameter | None = None
        if encoder.positions is not None:
            entries = encoder.positions.rows * encoder.positions.columns
            self.positions = nn.Parameter(torch.empty(entries, hidden, device=device, dtype=dtype))
        if encoder.prefix:
            self.prefix = nn.Parameter(torch.empty(encoder.prefix, hidden, device=device, dtype=dtype))

    def forward(self, patches_1tI: Tensor, taps: Taps | None, prefix: PrefixPlaces | None) -> Tensor:
        x_1tC: Tensor = self.projection(patches_1tI)
        if self.positions is not None:
            assert taps is not None
            x_1tC = x_1tC + tap_sum(self.positions, taps)
        if self.prefix is not None:
            assert prefix is not None
            tokens_nC = lookup(self.prefix, prefix.row_n[None])[0]
            x_1tC = x_1tC[0].index_put((prefix.token_n,), tokens_nC)[None]
        return x_1tC

    def canonical(self) -> dict[str, Canonical]:
        tensors = under("", "projection", self.projection.canonical())
        for name, weight in (("positions", self.positions), ("prefix", self.prefix)):
            if weight is not None:
                shape = tuple(weight.shape)
                tensors[name] = Canonical(parameter=name, shape=shape, fill="table", copies=self.copies)
        return tensors

    def cost(self, workload: Workload) -> Cost:
        """Saves the patches, the taps of every token, and the places of prefix tokens."""
        tokens, hidden = workload.local_tokens(self.tokens), self.projection.channels_out
        cost = Cost(kept=tokens * self.projection.channels_in * workload.narrow)
        if self.positions is not None:
            # Backward sums in a wide dtype: all entries, those of one tap, and the weighted gradient.
            summed = (2 * len(self.positions) + tokens) * hidden * workload.wide
            cost += Cost(kept=tokens * TAPS * (INDEX_BYTES + workload.wide), passing=summed)
        if self.prefix is not None:
            places = -(-workload.items * len(self.prefix) // self.tokens.size)
            cost += Cost(kept=2 * places * INDEX_BYTES)
        return cost

    def flops(self, tokens: int) -> int:
        return self.projection.flops(tokens)

    def work(self, workload: Workload) -> Work:
        """The product, whose input needs no gradient; positions, one tap after another in float32; and prefix
        tokens in their places."""
        tokens, n, w = workload.local_tokens(self.tokens), workload.narrow, workload.wide
        entries = tokens * self.projection.channels_out
        work = replace(self.projection.work(workload, tokens), backward=())
        if self.positions is not None:
            table = len(self.positions) * self.projection.channels_out * w
            taps = moved(entries * (2 * n + 6 * w), entries * (n + 3 * w) + 4 * table, launches=(6, 14))
            work += taps.times(TAPS) + moved(entries * (4 * n + 2 * w), launches=3)
        if self.prefix is not None:
            work += moved(2 * entries * n, 3 * entries * n, launches=(6, 14))
        return work
