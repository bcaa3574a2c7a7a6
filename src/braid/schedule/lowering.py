"""Lowering: from what a rank computes to the same list with its sharded weights gathered, released and reduced.

    F0.0 B0.0 F1.0 B1.0
    UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH

Nothing that computes or sends is moved. Lowering knows ops by their `Use` of units alone, so it serves lists of
whole segments and of single phases alike, training and evaluation. It does not know which rank of a stage it
lowers for: all ranks of a stage issue the same collectives in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from braid.schedule.lifetime import NOTHING, Use, Uses
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


POLICIES = MappingProxyType(
    {
        "none": Policy(),
        "optimizer": Policy(),
        "gradients": Policy(every=True),
        "all": Policy(keep=2, every=True),
    }
)
"""The policy of every strategy of sharding."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What lowering knows of a pipeline rank's weights."""

    units: Mapping[str, str]
    """All units, each with the name of the mesh that shares it."""
    uses: Uses
    policy: Policy


def uses_of_segments(units: Mapping[int, Sequence[str]]) -> Uses:
    """Where ops are about whole segments, whose units are given."""

    def uses(op: Op) -> Use:
        held = () if op.segment is None else tuple(units.get(op.segment, ()))
        if op.act is Act.F:
            return Use(reads=held)
        return Use(reads=held, grades=held) if op.act is Act.B else NOTHING

    return uses


def uses_of_phases(units: Mapping[str, Sequence[str]], *, unread: Collection[str] = ()) -> Uses:
    """Where ops are about phases, whose units are given by the names that ops have for them: the phase's own,
    and those of its drawers. Gradients that a `B` leaves to a `W` need no weights then; the backward of an
    `unread` phase never does."""

    def uses(op: Op) -> Use:
        held = () if op.phase is None else tuple(units.get(op.phase, ()))
        match op.act:
            case Act.F | Act.RECOMPUTE:
                return Use(reads=held)
            case Act.B:
                return Use(reads=() if op.phase in unread else held, grades=held)
            case Act.W:
                return Use(grades=held)
            case _:
                return NOTHING

    return uses


def lowered(schedule: Schedule, shardings: Sequence[Sharding]) -> Schedule:
    """The schedule with every rank's list lowered."""
    lists = (
        lower(ops, sharding, rank)
        for rank, (ops, sharding) in enumerate(zip(schedule.ops, shardings, strict=True))
    )
    return replace(schedule, ops=tuple(lists))


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
        for number, turn in enumerate(self.turns):
            for unit in turn.use.reads:
                self.reads[unit].append(number)
            for unit in turn.use.grades:
                self.grades[unit].append(number)
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
        for turn in self.turns[number : number + self.policy.lookahead + 1]:
            for unit in turn.use.reads:
                if unit not in self.gathered:
                    self.gathered.add(unit)
                    yield Op(act=Act.UNSHARD, unit=unit, collectives=(self._collective("gather", unit),))

    def _waits(self, use: Use) -> Iterator[Op]:
        for unit in use.reads:
            if unit not in self.waited:
                self.waited.add(unit)
                yield Op(act=Act.WAIT, unit=unit)

    def _gradients(self, number: int) -> Iterator[Op]:
        """Where the next addition to a gradient is another micro-batch's, or there is none."""
        micro_batch = self.turns[number].op.micro_batch
        for unit in self.turns[number].use.grades:
            later = [self.turns[each].op.micro_batch for each in _after(self.grades[unit], number)]
            if not later or (self.policy.every and micro_batch not in later):
                collective = self._collective("reduce", unit)
                yield Op(act=Act.REDUCE_GRAD, unit=unit, collectives=(collective,))
            elif later[0] != micro_batch:
                yield Op(act=Act.ACCUM, unit=unit)

    def _releases(self, number: int) -> Iterator[Op]:
        keep, lookahead = self.policy.keep, self.policy.lookahead
        for unit in self.turns[number].use.reads:
            later = _after(self.reads[unit], number)
            if not later or (keep is not None and later[0] - number > max(keep, lookahead + 1)):
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


def _after(numbers: Sequence[int], number: int) -> Sequence[int]:
    """Those that are greater, of numbers in order."""
    return numbers[bisect_right(numbers, number) :]
