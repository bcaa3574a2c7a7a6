"""Head partition: which grouped heads a rank computes under tensor and context parallelism.

Heads come in groups that share something: keys and values in grouped-query attention, B and C in Mamba-2, query
and key in a gated delta net. A fused projection emits the same parts for every group in turn, some per head and
some shared.

tp ranks split the heads. If there are more tp ranks than groups, neighbours split the heads of one group and
replicate its shared parts. cp ranks split the heads of their tp rank while a mixer needs the whole sequence, as
in DeepSpeed-Ulysses (arXiv 2309.14509). If the heads of one group go to several cp ranks, the group is first
split into smaller groups: each gets some of the heads and a copy of the shared parts.

Shapes: B rows, T tokens, S = T / cp tokens of all tp ranks, G groups and H heads of this tp rank, g and h of
them (after the split) that this rank computes for the whole sequence, F channels of a group, D head channels.
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
    """Output channels of a fused projection that belong together."""

    name: str
    """Canonical name."""
    channels: int
    """Channels per head, or per group if the part is shared."""
    shared: bool = False
    """Whether the heads of a group share the part."""


@dataclass(frozen=True, kw_only=True)
class HeadPartition:
    """This rank's heads of a layer."""

    all_groups: int
    """Groups of the layer, over all ranks."""
    all_heads: int
    """Heads of the layer, over all ranks."""
    ranks: Groups

    def __post_init__(self) -> None:
        tp, cp = self.ranks.tp.size, self.ranks.cp.size
        assert tp % self.all_groups == 0 or self.all_groups % tp == 0
        assert self.all_heads % self.all_groups == 0
        assert self.all_heads % (tp * cp) == 0

    # -------------------------------------------------------------------------- tensor parallel

    @property
    def groups(self) -> int:
        """Groups of this tp rank; it may have only some of their heads."""
        return max(1, self.all_groups // self.ranks.tp.size)

    @property
    def heads(self) -> int:
        """Heads of this tp rank."""
        return self.all_heads // self.ranks.tp.size

    @property
    def holders(self) -> Group:
        """The tp ranks that split the heads of one group and replicate its shared parts."""
        return self.ranks.tp_run(max(1, self.ranks.tp.size // self.all_groups))

    def span(self, part: Part) -> RowSpan:
        """Offset and total size of this rank's channels of a part."""
        tp = self.ranks.tp
        if part.shared:
            first = tp.rank // self.holders.size * self.groups
            return RowSpan(first * part.channels, self.all_groups * part.channels)
        return RowSpan(tp.rank * self.heads * part.channels, self.all_heads * part.channels)

    def copies(self, part: Part) -> Group:
        """The ranks that replicate this rank's channels of a part."""
        return self.holders if part.shared else self.ranks.tp_run(1)

    def sizes(self, parts: Sequence[Part]) -> list[int]:
        """Channels of each part in a group."""
        return _sizes(parts, self.heads // self.groups)

    def slices(self, parts: Sequence[Part]) -> list[slice]:
        """The channels of each part within a group."""
        sizes = self.sizes(parts)
        return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    # ------------------------------------------------------------------------- context parallel

    @property
    def group_splits(self) -> int:
        """How many smaller groups each group is split into, so that cp ranks get equally many."""
        return math.lcm(self.groups, self.ranks.cp.size) // self.groups

    @property
    def core_groups(self) -> int:
        """Groups that this rank computes for the whole sequence."""
        return self.groups * self.group_splits // self.ranks.cp.size

    @property
    def core_heads(self) -> int:
        """Heads that this rank computes for the whole sequence."""
        return self.heads // self.ranks.cp.size

    def core_sizes(self, parts: Sequence[Part]) -> list[int]:
        """Channels of each part in a group after the split."""
        return _sizes(parts, self.core_heads // self.core_groups)

    def gather_sequence(self, x_BSGF: Tensor, parts: Sequence[Part]) -> Tensor:
        """All-to-all over cp: from all groups of some tokens to some groups of all tokens, x_BTgF."""
        return all_to_all(self._split_groups(x_BSGF, parts, 2), self.ranks.cp, split=2, join=1)

    def scatter_sequence(self, y_BThD: Tensor) -> Tensor:
        """All-to-all over cp: back to all heads of some tokens, y_BSHD."""
        return all_to_all(y_BThD, self.ranks.cp, split=1, join=2)

    def weights(self, w_GF: Tensor, parts: Sequence[Part]) -> Tensor:
        """The weights of the groups that this rank computes, w_gF; trailing dims are allowed."""
        return own_slice(self._split_groups(w_GF, parts, 0), self.ranks.cp, 0)

    def _split_groups(self, x: Tensor, parts: Sequence[Part], dim: int) -> Tensor:
        """Split every group into `group_splits`; `dim` is that of groups, the next one that of channels."""
        if self.group_splits == 1:
            return x
        pieces = zip(parts, x.split(self.sizes(parts), dim + 1), strict=True)
        return torch.cat([self._split_part(piece, part, dim) for part, piece in pieces], dim + 1)

    def _split_part(self, x: Tensor, part: Part, dim: int) -> Tensor:
        if part.shared:
            return x.repeat_interleave(self.group_splits, dim)
        return x.unflatten(dim + 1, (self.group_splits, -1)).flatten(dim, dim + 1)


def _sizes(parts: Sequence[Part], heads: int) -> list[int]:
    """Channels of each part in a group of `heads` heads."""
    return [part.channels if part.shared else heads * part.channels for part in parts]
