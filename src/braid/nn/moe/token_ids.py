"""Token identities: what routing knows about the tokens of a micro-batch besides their hidden states.

A row is one sequence, which may pack several documents. Ranks may split the tokens of rows equally; decisions
about whole rows are then made on gathered rows, and each rank takes its slice.

Shapes: B rows, T tokens of a row that this rank has, N = B · T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_gather_no_grad, own_slice


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of this rank at one MoE layer."""

    sample_B: Tensor
    """Global index of each row's sample."""
    position_T: Tensor
    """Position of each token in the full row."""
    padding_BT: Tensor | None = None
    """Padding mask: True is padding. None if there is none."""
    padding_count: int | None = None
    """Number of padding tokens, if the host knows it; computing it synchronizes with the device."""
    global_tokens: int | None = None
    """Tokens of the micro-batch over all ranks, without padding. None: those of this rank."""
    global_rows: int | None = None
    """Rows of the micro-batch over all ranks. None: those of this rank."""
    layer: int = 0
    seed: int = 0
    step: int | Tensor = 0
    training: bool = False
    """Whether jitter, sinkhorn and capacity apply."""

    @staticmethod
    def one_row(tokens: int, device: torch.device) -> Tokens:
        """A single sequence without padding, not in training."""
        position_T = torch.arange(tokens, device=device)
        return Tokens(sample_B=torch.zeros(1, dtype=torch.int64, device=device), position_T=position_T)

    @property
    def rows(self) -> int:
        return len(self.sample_B)

    @property
    def row_tokens(self) -> int:
        return len(self.position_T)

    @property
    def count(self) -> int:
        """Tokens of this rank without padding."""
        padding = self.padding_count
        if padding is None:
            padding = 0 if self.padding_BT is None else int(self.padding_BT.sum())
        return self.rows * self.row_tokens - padding

    @property
    def total_tokens(self) -> int:
        """Tokens of the micro-batch over all ranks, without padding."""
        return self.count if self.global_tokens is None else self.global_tokens

    @property
    def total_rows(self) -> int:
        """Rows of the micro-batch over all ranks."""
        return self.rows if self.global_rows is None else self.global_rows

    def valid_N(self) -> Tensor:
        """False for padding."""
        if self.padding_BT is None:
            return torch.ones(self.rows * self.row_tokens, dtype=torch.bool, device=self.sample_B.device)
        return ~self.padding_BT.flatten()


def whole_rows(x_N: Tensor, rows: int, group: Group) -> Tensor:
    """All-gather per-token values into full rows, without gradients."""
    return all_gather_no_grad(by_row(x_N.detach(), rows), group, dim=1).flatten(0, 1)


def own_part(x_N: Tensor, rows: int, group: Group) -> Tensor:
    """This rank's slice of per-token values of full rows."""
    return own_slice(by_row(x_N, rows), group, dim=1).flatten(0, 1)


def by_row(x_N: Tensor, rows: int) -> Tensor:
    """Per-token values in rows, of which there may be none."""
    return x_N.unflatten(0, (rows, len(x_N) // max(rows, 1)))
