"""Lowering: from what a rank computes to the same list with its sharded weights gathered, released and reduced.

    F0.0 B0.0 F1.0 B1.0
    UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH

Nothing that computes or sends is moved. Lowering knows ops by their `Use` of units alone, in training as in
evaluation. It does not know which rank of a stage it lowers for: all ranks of a stage issue the same
collectives in the same order.
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
    """When weights come and go. Ops are counted that use units: messages, for one, do not count."""

    lookahead: int = 1
    """How many ops before its use the gather of a unit begins."""
    keep: int | None = None
    """A unit stays gathered where it is used again at most so many ops later, or where it would have to be
    gathered again at once; with None, until the last use of the step."""
    every: bool = False
    """Whether gradients are reduced after every micro-batch, and not once in a step."""
    gathers: bool = True
    """Whether weights are gathered and released at all. Where a process is alone it has all of them; then only
    gradients have ops: those of each micro-batch join the ones before them."""


POLICIES: Mapping[Strategy, Policy] = MappingProxyType(
    {
        "none": Policy(),
        "optimizer": Policy(),
        "gradients": Policy(every=True),
        "all": Policy(keep=2, every=True),
    }
)
"""The policy of every strategy of sharding."""

ALONE = Policy(gathers=False)
"""The policy of a process that shares its weights with nobody."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What lowering knows of a pipeline rank's weights."""

    units: Mapping[str, str]
    """All units, each with the name of the mesh that shares it."""
    uses: Uses
    policy: Policy


def lowered(schedule: Schedule, meshes: Mapping[str, str], policy: Policy) -> Schedule:
    """The schedule in phases with every rank's list lowered. `meshes` are the meshes of all units."""
    sharding = Sharding(units=meshes, uses=uses_of(schedule), policy=policy)
    lists = (lower(ops, sharding, rank) for rank, ops in enumerate(schedule.ops))
    weights: Literal["resident", "sharded"] = "sharded" if policy.gathers else "resident"
    return replace(schedule, ops=tuple(lists), weights=weights)


def lower(ops: Ops, sharding: Sharding, rank: int = 0) -> Ops:
    """The list of a pipeline rank with UNSHARD, WAIT, RESHARD, ACCUM, REDUCE_GRAD and FINISH placed.

    Where messages stand between two ops that use units, sends go first, for somebody waits for them; then
    comes what follows from the earlier op, then what the later ones need, so that gathers and receives are
    under way together.
    """
    return tuple(_Lowering(ops, sharding, rank).run())


class _Turn(NamedTuple):
    """An op that uses units, and what follows it up to the next one."""

    op: Op
    use: Use
    sends: Ops
    rest: Ops


class _Lowering:
    """One list on its way."""

    def __init__(self, ops: Ops, sharding: Sharding, rank: int) -> None:
        self.sharding, self.policy, self.rank = sharding, sharding.policy, rank
        self.before, self.turns = _turns(ops, sharding.uses)
        self.reads: dict[str, list[int]] = defaultdict(list)
        """The turns that read each unit."""
        self.grades: dict[str, list[int]] = defaultdict(list)
        """The turns that add to its gradient."""
        self.last_of: dict[tuple[str, int | None], int] = {}
        """The last turn of each micro-batch that adds to a unit's gradient."""
        for number, turn in enumerate(self.turns):
            for unit in turn.use.reads if self.policy.gathers else ():
                self.reads[unit].append(number)
            for unit in turn.use.grades:
                self.grades[unit].append(number)
                self.last_of[unit, turn.op.micro_batch] = number
        self.gathered: set[str] = set()
        self.waited: set[str] = set()

    def run(self) -> Iterator[Op]:
        rest = self.before
        for number, turn in enumerate(self.turns):
            yield from self._begin_gathers(number)
            yield from rest
            yield from self._waits(turn.use)
            yield turn.op
            yield from turn.sends
            yield from self._gradients(number)
            yield from self._releases(number)
            rest = turn.rest
        closing = next((place for place, op in enumerate(rest) if op.act is Act.SUM_COPIES), len(rest))
        yield from (*rest[:closing], Op(act=Act.FINISH), *rest[closing:])

    def _begin_gathers(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        for turn in self.turns[number : number + self.policy.lookahead + 1]:
            for unit in turn.use.reads:
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
        """Where the next addition to a gradient is another micro-batch's, or there is none."""
        micro_batch = self.turns[number].op.micro_batch
        for unit in self.turns[number].use.grades:
            later = _next_after(self.grades[unit], number)
            if later is None or (self.policy.every and self.last_of[unit, micro_batch] == number):
                collectives = (self._collective("reduce", unit),) if self.policy.gathers else ()
                yield Op(act=Act.REDUCE_GRAD, unit=unit, collectives=collectives)
            elif self.turns[later].op.micro_batch != micro_batch:
                yield Op(act=Act.ACCUM, unit=unit)

    def _releases(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        keep, lookahead = self.policy.keep, self.policy.lookahead
        for unit in self.turns[number].use.reads:
            later = _next_after(self.reads[unit], number)
            if later is None or (keep is not None and later - number > max(keep, lookahead + 1)):
                self.gathered.discard(unit)
                self.waited.discard(unit)
                yield Op(act=Act.RESHARD, unit=unit)

    def _collective(self, what: str, unit: str) -> Collective:
        """Among ranks of this stage alone."""
        communicator = f"{self.sharding.units[unit]}.{self.rank}"
        return Collective(communicator=communicator, label=f"{what}({unit})", members=(self.rank,))


def _turns(ops: Ops, uses: Uses) -> tuple[Ops, list[_Turn]]:
    """What stands before the first op that uses units, and from there on turn by turn."""
    found = [(place, use) for place, op in enumerate(ops) if (use := uses(op))]
    if not found:
        return ops, []
    turns = []
    ends = [*(place for place, _ in found[1:]), len(ops)]
    for (place, use), end in zip(found, ends, strict=True):
        first = next((each for each in range(place + 1, end) if not ops[each].act.sends), end)
        turns.append(_Turn(ops[place], use, ops[place + 1 : first], ops[first:end]))
    return ops[: found[0][0]], turns


def _next_after(numbers: Sequence[int], number: int) -> int | None:
    """The first that is greater, of numbers in order."""
    place = bisect_right(numbers, number)
    return numbers[place] if place < len(numbers) else None
