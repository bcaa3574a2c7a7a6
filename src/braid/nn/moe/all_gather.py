"""The all-gather token dispatcher: every rank receives all tokens and computes those of its experts.

Combine is a reduce-scatter, which sums the partial outputs of all ranks. A token is sent once, however many
experts it has, but to all ranks. All ranks must have equally many tokens.

Shapes: P ranks, N tokens of each, S slots of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_gather, all_gather_no_grad, reduce_scatter
from braid.nn.moe.dispatch_plan import DispatchPlan, Slots


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGather:
    """Tokens are sent as they are, and arrive sorted by rank."""

    group: Group
    """The ranks that together hold all experts; for expert choices."""
    dispatch_group: Group
    """The same ranks with a communicator of their own, for the tokens."""
    local_experts: int
    """Experts per rank."""
    etp: int
    """Ranks with shards of the same experts; they are neighbours in the group."""

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        recv_order = self._received_slots(slots).order(self.local_experts)
        return DispatchPlan(recv_order=recv_order, counts_E=recv_order.counts_E)

    def _received_slots(self, slots: Slots) -> Slots:
        """The slots of all ranks' tokens; those of other ranks' experts are dropped."""
        experts_NS = slots.experts_NS
        if slots.kept_NS is not None:
            experts_NS = torch.where(slots.kept_NS, experts_NS, -1)
        first = self.group.rank // self.etp * self.local_experts
        experts_NS = all_gather_no_grad(experts_NS, self.group)
        local_NS = (experts_NS >= first) & (experts_NS < first + self.local_experts)
        padding = slots.padding
        if padding is not None:
            padding = padding._replace(sequences=self.group.size * padding.sequences)
        return Slots(experts_NS - first, local_NS, None, padding)

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        return (
            all_gather(x, self.dispatch_group, dim=0),
            all_gather(probs, self.dispatch_group, dim=0),
            dispatch_plan,
        )

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return reduce_scatter(y, self.dispatch_group, dim=0)
