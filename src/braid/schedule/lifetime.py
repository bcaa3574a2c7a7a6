"""The life of sharded weights in a step: its rules, without a process.

    sharded ── UNSHARD ──► gathering ── WAIT ──► ready ── RESHARD ──► sharded

An op computes with units that are ready. What it adds to a unit's gradient is owed from then on: `ACCUM` puts
it with what is owed already, `REDUCE_GRAD` pays. Before one of them nothing of another micro-batch is added:
ranks would sum other addends than without a schedule. At `FINISH` every unit is sharded and nothing is owed.

The rules hold twice: `prove` follows a list of ops before anything runs, and the engine keeps a `Lifetime`
while it runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Op, Schedule


class LifetimeError(RuntimeError):
    """A list of ops, or whoever runs it, treats sharded weights as it must not: a mistake in braid."""

    def __init__(self, rule: Rule, why: str) -> None:
        super().__init__(why)
        self.rule = rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What an op does with units."""

    reads: tuple[str, ...] = ()
    """Units whose weights it computes with."""
    grades: tuple[str, ...] = ()
    """Units to whose gradients it adds. For that alone they need not be gathered."""

    def __bool__(self) -> bool:
        return bool(self.reads or self.grades)


NOTHING = Use()
"""What an op does that no unit is about."""

Uses = Callable[[Op], Use]
"""What each op of a list does with units."""


class Figures(NamedTuple):
    """How much a list of ops moves and holds."""

    gathers: int
    """`UNSHARD` ops."""
    reductions: int
    """`REDUCE_GRAD` ops."""
    peak: int
    """Units that are gathered, or being gathered, at the same time."""


class _WeightState(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    READY = "ready"


class _Gradient(Enum):
    NONE = "nothing"
    FRESH = "what an op has added"
    ACCUMULATED = "what is accumulated"


class Lifetime:
    """Where every unit stands within one step. Each method is an action; one that breaks a rule raises."""

    def __init__(self, units: Iterable[str], *, resident: bool = False) -> None:
        """With `resident`, weights are there all the time: nothing gathers or releases them."""
        self._resting = _WeightState.READY if resident else _WeightState.SHARDED
        self._weights = dict.fromkeys(units, self._resting)
        self._gradients = dict.fromkeys(self._weights, _Gradient.NONE)
        self._added_by: dict[str, int | None] = {}
        self._gathers = self._reductions = self._gathered = self._peak = 0

    @property
    def figures(self) -> Figures:
        """Of the step so far."""
        return Figures(self._gathers, self._reductions, self._peak)

    def gathering(self, unit: str) -> bool:
        """Whether it is on its way."""
        return self._weights[unit] is _WeightState.GATHERING

    def unshard(self, unit: str) -> None:
        self._require(unit, "UNSHARD", _WeightState.SHARDED)
        self._weights[unit] = _WeightState.GATHERING
        self._gathers += 1
        self._gathered += 1
        self._peak = max(self._peak, self._gathered)

    def wait(self, unit: str) -> None:
        """Once it is ready there is nothing to wait for."""
        self._require(unit, "WAIT", _WeightState.GATHERING, _WeightState.READY)
        self._weights[unit] = _WeightState.READY

    def use(self, use: Use, micro_batch: int | None = None) -> None:
        """An op is about to run, for a micro-batch."""
        for unit in use.reads:
            self._require(unit, "computing", _WeightState.READY)
        for unit in use.grades:
            self._known(unit, "computing")
            before = self._added_by.get(unit)
            if self._gradients[unit] is _Gradient.FRESH and before != micro_batch:
                owed = f"which owes what was added for micro-batch {before}: ACCUM or REDUCE_GRAD first"
                raise LifetimeError(Rule.ACCUMULATED, f"adding to {unit} for micro-batch {micro_batch}, {owed}")
            self._gradients[unit], self._added_by[unit] = _Gradient.FRESH, micro_batch

    def reshard(self, unit: str) -> None:
        """During a gather it first waits for it."""
        self._require(unit, "RESHARD", _WeightState.GATHERING, _WeightState.READY)
        self._weights[unit] = _WeightState.SHARDED
        self._gathered -= 1

    def accumulate(self, unit: str) -> None:
        self._owes(unit, "ACCUM", _Gradient.FRESH)
        self._gradients[unit] = _Gradient.ACCUMULATED

    def reduce(self, unit: str) -> None:
        self._owes(unit, "REDUCE_GRAD", _Gradient.FRESH, _Gradient.ACCUMULATED)
        self._gradients[unit] = _Gradient.NONE
        self._reductions += 1

    def finish(self) -> None:
        held = [f"{u} is {w.value}" for u, w in self._weights.items() if w is not self._resting]
        owed = [f"{u} owes {g.value}" for u, g in self._gradients.items() if g is not _Gradient.NONE]
        if left := held + owed:
            rule = Rule.RESHARDED if held else Rule.REDUCED
            raise LifetimeError(rule, f"FINISH with leftovers: {', '.join(left)}")

    def _known(self, unit: str, action: str) -> None:
        if unit not in self._weights:
            known = ", ".join(self._weights)
            raise LifetimeError(Rule.EXISTS, f"{action} with {unit}, which is no unit: there are {known}")

    def _require(self, unit: str, action: str, *allowed: _WeightState) -> None:
        self._known(unit, action)
        if (weights := self._weights[unit]) not in allowed:
            needed = " or ".join(each.value for each in allowed)
            rule = Rule.UNSHARDED if action in ("computing", "WAIT") else Rule.RESHARDED
            raise LifetimeError(rule, f"{action} with {unit}, which is {weights.value}: it has to be {needed}")

    def _owes(self, unit: str, action: str, *allowed: _Gradient) -> None:
        self._known(unit, action)
        if (gradient := self._gradients[unit]) not in allowed:
            why = f"{action} with {unit}, which owes {gradient.value}: no op has added to it"
            raise LifetimeError(Rule.REDUCED, why)


def uses_of(schedule: Schedule) -> Uses:
    """What each op of a schedule in phases does with units. Gradients that a `B` leaves to a `W` need no
    weights then."""
    recompute = frozenset(schedule.recompute)
    found: dict[tuple[Act, int, str], Use] = {}
    for segment, phases in enumerate(schedule.phases):
        for phase in phases:
            units, name = phase.units, phase.name
            found[Act.F, segment, name] = Use(reads=units)
            found[Act.B, segment, name] = Use(reads=units if phase.backward_reads else (), grades=units)
            found[Act.RECOMPUTE, segment, name] = Use(reads=phase.replayed_units(recompute) or ())
            for bucket in phase.buckets:
                found[Act.W, segment, bucket] = Use(grades=units)

    def uses(op: Op) -> Use:
        if op.phase is None or op.segment is None:
            return NOTHING
        return found.get((op.act, op.segment, op.phase), NOTHING)

    return uses


def prove(ops: Iterable[Op], units: Iterable[str], uses: Uses, *, resident: bool = False) -> Figures:
    """Follow a list to its end, or raise where it breaks a rule."""
    lifetime, finished = Lifetime(units, resident=resident), False
    for op in ops:
        finished = _step(lifetime, op, uses(op), finished)
    if not finished:
        raise LifetimeError(Rule.FINISHED, "the list ends without FINISH")
    return lifetime.figures


def lifetime_faults(schedule: Schedule) -> Iterator[Fault]:
    """The first rule that each rank's list breaks."""
    uses = uses_of(schedule)
    for rank, ops in enumerate(schedule.ops):
        lifetime = Lifetime(schedule.units(rank), resident=schedule.weights == "resident")
        place, finished = 0, False
        try:
            for place, op in enumerate(ops):  # noqa: B007
                finished = _step(lifetime, op, uses(op), finished)
            if not finished:
                place = len(ops)
                raise LifetimeError(Rule.FINISHED, "the list ends without it")
        except LifetimeError as error:
            op = ops[place] if place < len(ops) else Op(act=Act.FINISH)
            yield Fault(rank=rank, place=place, op=op, rule=error.rule, why=str(error))


def _step(lifetime: Lifetime, op: Op, use: Use, finished: bool) -> bool:
    """One op; whether the list has come to FINISH."""
    if finished and (op.act.shards or use):
        raise LifetimeError(Rule.FINISHED, f"{op} comes after FINISH")
    if op.act is Act.SUM_COPIES and not finished:
        raise LifetimeError(Rule.FINISHED, f"{op} sums gradients that are not reduced yet")
    if op.act.shards:
        follow(lifetime, op)
        return finished or op.act is Act.FINISH
    if use:
        lifetime.use(use, op.micro_batch)
    return finished


def follow(lifetime: Lifetime, op: Op) -> None:
    """Do what an op says about units; nothing where it is about none."""
    if op.act is Act.FINISH:
        lifetime.finish()
    elif op.act.shards:
        if op.unit is None:
            raise LifetimeError(Rule.COMPLETE, f"{op} names no unit")
        actions = {
            Act.UNSHARD: lifetime.unshard,
            Act.WAIT: lifetime.wait,
            Act.RESHARD: lifetime.reshard,
            Act.ACCUM: lifetime.accumulate,
            Act.REDUCE_GRAD: lifetime.reduce,
        }
        actions[op.act](op.unit)
