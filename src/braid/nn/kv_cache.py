"""KV cache: what is kept of every token so far, a tensor that grows by appending.

Shapes: B rows, T new tokens, S tokens so far, P places for tokens, `_` further dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class TokenStore:
    """Doubles its places when they are full, so that appending costs little. Gradients do not pass."""

    places_BP_: Tensor
    """Room for tokens, of which the first `tokens` are taken."""
    tokens: int = 0

    @staticmethod
    def new(batch: int, *dims: int, device: torch.device, dtype: torch.dtype) -> TokenStore:
        """A store without tokens, for tensors of these further dims."""
        return TokenStore(places_BP_=torch.empty(batch, 0, *dims, device=device, dtype=dtype))

    def append(self, new_BT_: Tensor) -> Tensor:
        """Take in the next tokens; returns all of them so far, [B, S, _]."""
        total = self.tokens + new_BT_.shape[1]
        if total > self.places_BP_.shape[1]:
            grown = self.places_BP_.new_empty(len(new_BT_), 2 * total, *new_BT_.shape[2:])
            grown[:, : self.tokens] = self.places_BP_[:, : self.tokens]
            self.places_BP_ = grown
        self.places_BP_[:, self.tokens : total] = new_BT_.detach()
        self.tokens = total
        return self.places_BP_[:, :total]
