"""Head partition for tensor parallelism: heads that come in groups, and the share of them that a rank has.

The heads of a group are neighbours and have something in common: B and C in Mamba-2, query and key in a delta
net. A projection gives every group the same parts, one after the other: some for each head, some in common.

tp ranks share the heads. Where they outnumber the groups, neighbours hold copies of what a group has in common
and share its heads. cp ranks share the heads of their tp rank for as long as these look at all tokens. Where
the heads of one group go to several cp ranks, the group is cut into smaller ones first: each has some of its
heads and a copy of what they have in common.

Shapes: B rows, T tokens, S of them that the tp ranks share (T / cp), G groups and H heads of this tp rank, g
and h of them (after the cut) that see all tokens on this rank, F channels of a group, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from braid.distributed.collectives import Group, Groups, all_to_all, own_slice
from braid.nn.canonical import RowSpan


class Part(NamedTuple):
    """Channels that a projection gives every group."""

    name: str
    """Its canonical name."""
    channels: int
    """Of each head, or of the group where its heads have the part in common."""
    common: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadPartition:
    """What one rank has of the heads of a layer."""

    all_groups: int
    """Groups of the layer."""
    all_heads: int
    """Heads of the layer."""
    ranks: Groups

    def __post_init__(self) -> None:
        tp, cp = self.ranks.tp.size, self.ranks.cp.size
        assert tp % self.all_groups == 0 or self.all_groups % tp == 0
        assert self.all_heads % self.all_groups == 0
        assert self.all_heads % (tp * cp) == 0

    # ------------------------------------------------------------------------- of this tp rank

    @property
    def groups(self) -> int:
        """Groups of this tp rank, whole or some of their heads."""
        return max(1, self.all_groups // self.ranks.tp.size)

    @property
    def heads(self) -> int:
        """Heads of this tp rank."""
        return self.all_heads // self.ranks.tp.size

    @property
    def holders(self) -> Group:
        """The tp ranks that share the heads of one group."""
        return self.ranks.tp_run(max(1, self.ranks.tp.size // self.all_groups))

    def span(self, part: Part) -> RowSpan:
        """Where this rank's channels of a part lie among those of all groups."""
        tp = self.ranks.tp
        if part.common:
            first = tp.rank // self.holders.size * self.groups
            return RowSpan(first * part.channels, self.all_groups * part.channels)
        return RowSpan(tp.rank * self.heads * part.channels, self.all_heads * part.channels)

    def copies(self, part: Part) -> Group:
        """The ranks that hold the same channels of a part."""
        return self.holders if part.common else self.ranks.tp_run(1)

    def sizes(self, parts: Sequence[Part]) -> list[int]:
        """How many channels of each part a group has."""
        return _sizes(parts, self.heads // self.groups)

    def places(self, parts: Sequence[Part]) -> list[slice]:
        """Where in the channels of a group each part lies."""
        sizes = self.sizes(parts)
        return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    # ---------------------------------------------------------- where heads look at all tokens

    @property
    def cuts(self) -> int:
        """Into how many groups each is cut, so that cp ranks get as many each."""
        return math.lcm(self.groups, self.ranks.cp.size) // self.groups

    @property
    def core_groups(self) -> int:
        """Groups that this rank computes."""
        return self.groups * self.cuts // self.ranks.cp.size

    @property
    def core_heads(self) -> int:
        """Heads that this rank computes."""
        return self.heads // self.ranks.cp.size

    def core_sizes(self, parts: Sequence[Part]) -> list[int]:
        """How many channels of each part a group has once it is cut."""
        return _sizes(parts, self.core_heads // self.core_groups)

    def all_tokens(self, x_BSGF: Tensor, parts: Sequence[Part]) -> Tensor:
        """From all groups of some tokens to some groups of all tokens, x_BTgF."""
        return all_to_all(self._cut(x_BSGF, parts, 2), self.ranks.cp, split=2, join=1)

    def own_tokens(self, y_BThD: Tensor) -> Tensor:
        """Back to all heads of some tokens, y_BSHD."""
        return all_to_all(y_BThD, self.ranks.cp, split=1, join=2)

    def weights(self, w_GF: Tensor, parts: Sequence[Part]) -> Tensor:
        """Weights of the groups that this rank computes, w_gF; there may be dims after the channels."""
        return own_slice(self._cut(w_GF, parts, 0), self.ranks.cp, 0)

    def _cut(self, x: Tensor, parts: Sequence[Part], dim: int) -> Tensor:
        """Every group as smaller ones; `dim` counts groups, the next one their channels."""
        if self.cuts == 1:
            return x
        pieces = zip(parts, x.split(self.sizes(parts), dim + 1), strict=True)
        return torch.cat([self._cut_part(piece, part, dim) for part, piece in pieces], dim + 1)

    def _cut_part(self, x: Tensor, part: Part, dim: int) -> Tensor:
        if part.common:
            return x.repeat_interleave(self.cuts, dim)
        return x.unflatten(dim + 1, (self.cuts, -1)).flatten(dim, dim + 1)


def _sizes(parts: Sequence[Part], heads: int) -> list[int]:
    """How many channels of each part a group of so many heads has."""
    return [part.channels if part.common else heads * part.channels for part in parts]
