"""Token ids: who the tokens of a micro-batch are, all that routing may know of them besides their channels.

A row is one sequence, packed documents and all. Its tokens may be split over ranks, of which each has an equal
slice; what concerns whole rows is then decided on whole rows, and each rank takes its part.

Shapes: B rows, T tokens of a row that this rank has, N = B · T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_gather_no_grad, own_slice


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens that meet one MoE layer on this rank."""

    sample_B: Tensor
    """The global number of each row's sample."""
    place_T: Tensor
    """Each token's place in its row, which counts from 0 on the rank that has the row's beginning."""
    padding_BT: Tensor | None = None
    """The padding mask: True is padding. None where there is no padding."""
    padding_count: int | None = None
    """How many are padding, where the host knows; otherwise the device is asked."""
    shared_tokens: int | None = None
    """Tokens of the micro-batch that are not padding, on all ranks that share it. None: those here."""
    shared_rows: int | None = None
    """Rows of the micro-batch, on all ranks that share it. None: those here."""
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
        """Tokens here that are not padding."""
        padding = self.padding_count
        if padding is None:
            padding = 0 if self.padding_BT is None else int(self.padding_BT.sum())
        return self.rows * self.row_tokens - padding

    @property
    def count_everywhere(self) -> int:
        """Tokens of the whole micro-batch that are not padding."""
        return self.count if self.shared_tokens is None else self.shared_tokens

    @property
    def rows_everywhere(self) -> int:
        """Rows of the whole micro-batch."""
        return self.rows if self.shared_rows is None else self.shared_rows

    def valid_N(self) -> Tensor:
        """False for padding."""
        if self.padding_BT is None:
            return torch.ones(self.rows * self.row_tokens, dtype=torch.bool, device=self.sample_B.device)
        return ~self.padding_BT.flatten()


def whole_rows(x_N: Tensor, rows: int, group: Group) -> Tensor:
    """One entry for each token of the whole rows, out of what each rank of the group has for its own; without
    gradients."""
    return all_gather_no_grad(x_N.detach().unflatten(0, (rows, -1)), group, dim=1).flatten(0, 1)


def own_part(x_N: Tensor, rows: int, group: Group) -> Tensor:
    """This rank's entries, out of those for whole rows."""
    return own_slice(x_N.unflatten(0, (rows, -1)), group, dim=1).flatten(0, 1)
