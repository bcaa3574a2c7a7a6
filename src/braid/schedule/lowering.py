"""Lowering: inserts the FSDP ops (unshard, reshard, gradient accumulation and reduction) into a compute
schedule.

    F0.0 B0.0 F1.0 B1.0
    UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH

Compute ops and messages keep their order. Lowering depends only on the `Use` of units by each op, in training
and evaluation alike. All ranks of a stage get the same list, so they issue the same collectives in the same
order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from braid.choices import Strategy
from braid.schedule.lifetime import Use, Uses, uses_of
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When units are unsharded, resharded and reduced. Distances count the ops that use units; messages do not
    count."""

    lookahead: int = 1
    """Prefetch distance: how many ops ahead of its use the all-gather of a unit starts."""
    keep: int | None = None
    """A unit stays unsharded if its next use is at most this many ops away, or so close that its prefetch would
    start at once. None: until its last use in the step."""
    reduce_every: bool = False
    """Whether gradients are reduced after every micro-batch instead of once per step."""
    gathers: bool = True
    """Whether weights are sharded at all. A single process holds all of them, and only accumulates
    gradients."""


POLICIES: Mapping[Strategy, Policy] = MappingProxyType(
    {
        "none": Policy(),
        "optimizer": Policy(),
        "gradients": Policy(reduce_every=True),
        "all": Policy(keep=2, reduce_every=True),
    }
)
"""The policy of each sharding strategy: none, ZeRO-1, ZeRO-2 and ZeRO-3."""

RESIDENT = Policy(gathers=False)
"""The policy of a single process, which keeps all weights."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What lowering knows about the weights of a pipeline rank."""

    units: Mapping[str, str]
    """The mesh that each unit is sharded over."""
    uses: Uses
    policy: Policy


def lowered(schedule: Schedule, meshes: Mapping[str, str], policy: Policy) -> Schedule:
    """Lower every rank's list of a schedule in phases. `meshes` maps each unit to its mesh."""
    sharding = Sharding(units=meshes, uses=uses_of(schedule), policy=policy)
    lists = (lower(ops, sharding, rank) for rank, ops in enumerate(schedule.ops))
    weights: Literal["resident", "sharded"] = "sharded" if policy.gathers else "resident"
    return replace(schedule, ops=tuple(lists), weights=weights)


def lower(ops: Ops, sharding: Sharding, rank: int = 0) -> Ops:
    """Insert UNSHARD, WAIT, RESHARD, ACCUM, REDUCE_GRAD and FINISH into the list of a pipeline rank.

    Between two ops that use units the order is: sends, since a peer waits for them; reductions and reshards of
    the earlier op; all-gathers for the later ones; receives. So all-gathers overlap with receives.
    """
    return tuple(_Lowering(ops, sharding, rank).run())


class _Slot(NamedTuple):
    """An op that uses units, and the ops up to the next such op."""

    op: Op
    use: Use
    sends: Ops
    """Sends directly behind it."""
    rest: Ops


class _Lowering:
    """The state of lowering one list."""

    def __init__(self, ops: Ops, sharding: Sharding, rank: int) -> None:
        self.sharding, self.policy, self.rank = sharding, sharding.policy, rank
        self.before, self.slots = _slots(ops, sharding.uses)
        self.reads: dict[str, list[int]] = defaultdict(list)
        """The slots that read each unit."""
        self.grads: dict[str, list[int]] = defaultdict(list)
        """The slots that add to the gradient of each unit."""
        self.last_of: dict[tuple[str, int | None], int] = {}
        """The last slot of each micro-batch that adds to the gradient of a unit."""
        for number, slot in enumerate(self.slots):
            for unit in slot.use.reads if self.policy.gathers else ():
                self.reads[unit].append(number)
            for unit in slot.use.grads:
                self.grads[unit].append(number)
                self.last_of[unit, slot.op.micro_batch] = number
        self.gathered: set[str] = set()
        self.waited: set[str] = set()

    def run(self) -> Iterator[Op]:
        rest = self.before
        for number, slot in enumerate(self.slots):
            yield from self._begin_gathers(number)
            yield from rest
            yield from self._waits(slot.use)
            yield slot.op
            yield from slot.sends
            yield from self._gradients(number)
            yield from self._releases(number)
            rest = slot.rest
        # Copies are summed after their gradients are reduced, hence after FINISH.
        end = next((place for place, op in enumerate(rest) if op.act is Act.SUM_COPIES), len(rest))
        yield from (*rest[:end], Op(act=Act.FINISH), *rest[end:])

    def _begin_gathers(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        for slot in self.slots[number : number + self.policy.lookahead + 1]:
            for unit in slot.use.reads:
                if unit not in self.gathered:
                    self.gathered.add(unit)
                    yield Op(act=Act.UNSHARD, unit=unit, collectives=(self._collective("gather", unit),))

    def _waits(self, use: Use) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        for unit in use.reads:
            if unit not in self.waited:
                self.waited.add(unit)
                yield Op(act=Act.WAIT, unit=unit)

    def _gradients(self, number: int) -> Iterator[Op]:
        """Accumulate or reduce a gradient that no further op of the same micro-batch adds to next."""
        micro_batch = self.slots[number].op.micro_batch
        for unit in self.slots[number].use.grads:
            later = _next_after(self.grads[unit], number)
            if later is None or (self.policy.reduce_every and self.last_of[unit, micro_batch] == number):
                collectives = (self._collective("reduce", unit),) if self.policy.gathers else ()
                yield Op(act=Act.REDUCE_GRAD, unit=unit, collectives=collectives)
            elif self.slots[later].op.micro_batch != micro_batch:
                yield Op(act=Act.ACCUM, unit=unit)

    def _releases(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        keep, lookahead = self.policy.keep, self.policy.lookahead
        for unit in self.slots[number].use.reads:
            later = _next_after(self.reads[unit], number)
            if later is None or (keep is not None and later - number > max(keep, lookahead + 1)):
                self.gathered.discard(unit)
                self.waited.discard(unit)
                yield Op(act=Act.RESHARD, unit=unit)

    def _collective(self, what: str, unit: str) -> Collective:
        """A collective within this stage: its only member among the pipeline ranks is this one."""
        communicator = f"{self.sharding.units[unit]}.{self.rank}"
        return Collective(communicator=communicator, label=f"{what}({unit})", members=(self.rank,))


def _slots(ops: Ops, uses: Uses) -> tuple[Ops, list[_Slot]]:
    """The ops before the first that uses units, and the slots from there on."""
    users = [(place, use) for place, op in enumerate(ops) if (use := uses(op))]
    if not users:
        return ops, []
    slots = []
    ends = [*(place for place, _ in users[1:]), len(ops)]
    for (place, use), end in zip(users, ends, strict=True):
        first = next((each for each in range(place + 1, end) if not ops[each].act.sends), end)
        slots.append(_Slot(ops[place], use, ops[place + 1 : first], ops[first:end]))
    return ops[: users[0][0]], slots


def _next_after(numbers: Sequence[int], number: int) -> int | None:
    """The first greater number in an ascending sequence."""
    place = bisect_right(numbers, number)
    return numbers[place] if place < len(numbers) else None
