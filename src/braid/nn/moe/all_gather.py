"""The all-gather dispatcher: every rank sees all tokens and takes those of its experts; what ranks make of a
token is summed on the way back.

A token travels once however many experts it visits, but it travels to all ranks. They must have equally many.

Shapes: P ranks, N tokens of each, S slots of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_gather, all_gather_no_grad, reduce_scatter
from braid.nn.moe.dispatch_plan import DispatchPlan, RowPlaces, Slots


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGather:
    """Tokens leave as they are, and arrive by rank."""

    group: Group
    """The ranks that together have all experts."""
    travel: Group
    """The same ranks, for tokens on their way."""
    held: int
    """Experts that each of them has."""
    slices: int
    """Ranks that have a slice of the same experts: neighbours in the group."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        arriving = self._arriving(slots).order(self.held)
        return DispatchPlan(arriving=arriving, counts_E=arriving.counts_E)

    def _arriving(self, slots: Slots) -> Slots:
        """The slots of all ranks; those of other ranks' experts are not kept."""
        experts_NS = slots.experts_NS
        if slots.kept_NS is not None:
            experts_NS = torch.where(slots.kept_NS, experts_NS, -1)
        first = self.group.rank // self.slices * self.held
        experts_NS = all_gather_no_grad(experts_NS, self.group)
        here_NS = (experts_NS >= first) & (experts_NS < first + self.held)
        places = slots.places and RowPlaces(self.group.size * slots.places.sequences, slots.places.capacity)
        return Slots(experts_NS - first, here_NS, None, places)

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        return all_gather(x, self.travel, dim=0), all_gather(probs, self.travel, dim=0), dispatch_plan

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return reduce_scatter(y, self.travel, dim=0)
