"""The partition of a vocabulary over tensor-parallel ranks, padded to a multiple of their number."""

from __future__ import annotations

from torch import Tensor

from braid.distributed.collectives import ALONE, Group


class Vocabulary:
    """The partition of a vocabulary over the ranks of a group."""

    def __init__(self, ids: int, group: Group = ALONE) -> None:
        self.ids = ids
        """Vocabulary size, without padding."""
        self.group = group
        self.rows = -(-ids // group.size)
        """Rows per rank, with padding."""
        self.first = group.rank * self.rows
        self.held = min(max(ids - self.first, 0), self.rows)
        """Rows of this rank without padding. Only the last ranks have padding."""

    def local(self, ids: Tensor) -> Tensor:
        """The local row of each id; `rows` if another rank holds it."""
        if self.group.size == 1:
            return ids
        rows = ids - self.first
        return rows.where((rows >= 0) & (rows < self.rows), self.rows)
