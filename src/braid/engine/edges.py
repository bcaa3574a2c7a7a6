"""Edges of a rank: rows that pass between modules in one step, as the plan of every transfer says.

    SEND    on the side that has rows: post them. A rank on both sides posts its receives with them.
    RECV    wait for the rows; a rank that only receives posts here.

Forward, rows go from the encoder to the language model; backward, their gradients take the way back.

Shapes: N rows of this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from braid.distributed.collectives import ALONE, Group
from braid.distributed.transfer import EdgeChannel, PendingTransfer, post
from braid.topology.transfer import Transfer

Direction = Literal["F", "B"]


@dataclass(kw_only=True)
class EdgeLinks:
    """The transfers of one step, for one rank."""

    groups: Mapping[EdgeChannel, Group]
    """The communicator of each edge and direction. An edge within one rank needs none."""
    transfers: Mapping[tuple[str, int], Transfer]
    """What this rank sends and receives forward, by edge and micro-batch. Backward the roles are swapped."""
    reads: Collection[tuple[Direction, str]]
    """Directions and edges on whose receiving side this rank is: it calls `receive` once per micro-batch."""
    no_rows: Callable[[], Tensor]
    """An empty tensor, of 0 x C, for what a rank posts that has nothing to send."""
    _pending: dict[tuple[Direction, str, int], PendingTransfer] = field(default_factory=dict)
    """Posted, and not yet read or not yet known to have left."""
    _read: set[tuple[Direction, str, int]] = field(default_factory=set)
    """Those of them that were read."""

    def send(
        self, direction: Direction, edge: str, micro_batch: int, rows_NC: Tensor, bound: int | None
    ) -> None:
        """Post this rank's rows. With a `bound`, wait until at most so many micro-batches are on their way."""
        if bound is not None and (earlier := self._pending.get((direction, edge, micro_batch - bound))):
            earlier.finish()
        self._post(direction, edge, micro_batch, rows_NC)

    def receive(self, direction: Direction, edge: str, micro_batch: int) -> Tensor:
        """The rows that this rank reads."""
        key = (direction, edge, micro_batch)
        if key not in self._pending:  # it has none to send
            self._post(direction, edge, micro_batch, self.no_rows())
        pending = self._pending[key]
        rows_NC = pending.wait()
        pending.rows_NC = rows_NC[:0]  # whoever asked holds them now
        self._read.add(key)
        return rows_NC

    def finish(self) -> None:
        """Wait for everything that may be in flight."""
        for pending in self._pending.values():
            pending.finish()
        self._pending.clear()
        self._read.clear()

    def _release(self) -> None:
        """Let go of buffers that nobody needs any more: few micro-batches of a step are in flight at a time."""
        for key, pending in list(self._pending.items()):
            if (key in self._read or key[:2] not in self.reads) and pending.is_completed():
                del self._pending[key]
                self._read.discard(key)

    def _post(self, direction: Direction, edge: str, micro_batch: int, rows_NC: Tensor) -> None:
        self._release()
        planned = self.transfers[edge, micro_batch]
        planned = planned if direction == "F" else planned.backward()
        group = self.groups.get((direction, edge), ALONE)
        self._pending[direction, edge, micro_batch] = post(rows_NC, planned, group, micro_batch)
