"""Who the tokens of a micro-batch are: all that routing may know of them besides their channels.

Shapes: B rows, T tokens of a row, N = B · T. A row is one sequence, packed documents and all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens that meet one MoE layer."""

    sample_B: Tensor
    """The global number of each row's sample."""
    place_T: Tensor
    """Each token's place in its row, from 0."""
    padding_BT: Tensor | None = None
    """The padding mask: True is padding. None where there is no padding."""
    padding_count: int | None = None
    """How many are padding, where the host knows; otherwise the device is asked."""
    layer: int = 0
    """Number of the layer."""
    seed: int = 0
    step: int = 0
    training: bool = False
    """Whether jitter, sinkhorn and capacity apply."""

    @staticmethod
    def one_row(tokens: int, device: torch.device) -> Tokens:
        """A single sequence without padding, not in training."""
        place_T = torch.arange(tokens, device=device)
        return Tokens(sample_B=torch.zeros(1, dtype=torch.int64, device=device), place_T=place_T)

    @property
    def rows(self) -> int:
        return len(self.sample_B)

    @property
    def row_tokens(self) -> int:
        return len(self.place_T)

    @property
    def count(self) -> int:
        """Tokens that are not padding."""
        padding = self.padding_count
        if padding is None:
            padding = 0 if self.padding_BT is None else int(self.padding_BT.sum())
        return self.rows * self.row_tokens - padding

    def valid_N(self) -> Tensor:
        """False for padding."""
        if self.padding_BT is None:
            return torch.ones(self.rows * self.row_tokens, dtype=torch.bool, device=self.sample_B.device)
        return ~self.padding_BT.flatten()
