"""KV cache storage: a tensor of all tokens so far, with amortized appends.

Shapes: B rows, T new tokens, S tokens so far, P allocated tokens, `_` further dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class TokenBuffer:
    """A growable tensor of tokens; its capacity doubles when full. Detached from autograd."""

    data_BP_: Tensor
    """The allocation, of which the first `tokens` are in use."""
    tokens: int = 0

    @staticmethod
    def new(batch: int, *dims: int, device: torch.device, dtype: torch.dtype) -> TokenBuffer:
        """An empty buffer; `dims` are those after rows and tokens."""
        return TokenBuffer(data_BP_=torch.empty(batch, 0, *dims, device=device, dtype=dtype))

    def append(self, new_BT_: Tensor) -> Tensor:
        """Append tokens; returns all tokens so far, [B, S, _]."""
        total = self.tokens + new_BT_.shape[1]
        if total > self.data_BP_.shape[1]:
            grown = self.data_BP_.new_empty(len(new_BT_), 2 * total, *new_BT_.shape[2:])
            grown[:, : self.tokens] = self.data_BP_[:, : self.tokens]
            self.data_BP_ = grown
        self.data_BP_[:, self.tokens : total] = new_BT_.detach()
        self.tokens = total
        return self.data_BP_[:, :total]
