"""The lifetime of sharded weights within a step: a state machine per unit, checked without running anything.

    sharded ── UNSHARD ──► gathering ── WAIT ──► ready ── RESHARD ──► sharded

Compute ops need their units ready. A gradient that an op adds to a unit is pending until `ACCUM` adds it to the
accumulated gradient or `REDUCE_GRAD` reduces it. One of the two must come before another micro-batch adds to
the unit: otherwise `.grad` would sum the two in the compute dtype, and the result would depend on the schedule.
At `FINISH` every unit is sharded and no gradient is pending.

`lifetime_faults` checks the op lists of a schedule before anything runs; the engine drives a `Lifetime` while
it runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Op, Schedule


class LifetimeError(RuntimeError):
    """An action on sharded weights that their state does not allow. A bug in braid."""

    def __init__(self, rule: Rule, why: str) -> None:
        super().__init__(why)
        self.rule = rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The units that an op uses."""

    reads: tuple[str, ...] = ()
    """Units whose weights it computes with."""
    grads: tuple[str, ...] = ()
    """Units whose gradients it adds to. This alone does not need them gathered."""

    def __bool__(self) -> bool:
        return bool(self.reads or self.grads)


NO_USE = Use()

Uses = Callable[[Op], Use]
"""The units that each op of a list uses."""


class UnitStats(NamedTuple):
    """Communication and memory of a list of ops."""

    gathers: int
    """`UNSHARD` ops."""
    reductions: int
    """`REDUCE_GRAD` ops."""
    peak: int
    """The most units that are gathered or being gathered at the same time."""


class _WeightState(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    READY = "ready"


class _GradState(Enum):
    NONE = "no gradient"
    PENDING = "a pending gradient"
    ACCUMULATED = "an accumulated gradient"


class Lifetime:
    """The state of every unit within one step. Methods are actions; one that violates a rule raises."""

    def __init__(self, units: Iterable[str], *, resident: bool = False) -> None:
        """With `resident`, weights are always ready: no op gathers or frees them."""
        self._initial = _WeightState.READY if resident else _WeightState.SHARDED
        self._weights = dict.fromkeys(units, self._initial)
        self._gradients = dict.fromkeys(self._weights, _GradState.NONE)
        self._added_by: dict[str, int | None] = {}
        self._gathers = self._reductions = self._gathered = self._peak = 0

    @property
    def stats(self) -> UnitStats:
        """Of the step so far."""
        return UnitStats(self._gathers, self._reductions, self._peak)

    def unshard(self, unit: str) -> None:
        self._require(unit, "UNSHARD", _WeightState.SHARDED)
        self._weights[unit] = _WeightState.GATHERING
        self._gathers += 1
        self._gathered += 1
        self._peak = max(self._peak, self._gathered)

    def wait(self, unit: str) -> None:
        """Allowed again once the unit is ready."""
        self._require(unit, "WAIT", _WeightState.GATHERING, _WeightState.READY)
        self._weights[unit] = _WeightState.READY

    def use(self, use: Use, micro_batch: int | None = None) -> None:
        """A compute op is about to run."""
        for unit in use.reads:
            self._require(unit, "computing", _WeightState.READY)
        for unit in use.grads:
            self._require_unit(unit, "computing")
            before = self._added_by.get(unit)
            if self._gradients[unit] is _GradState.PENDING and before != micro_batch:
                pending = f"which has a pending gradient of micro-batch {before}: ACCUM or REDUCE_GRAD first"
                adding = f"adding to {unit} for micro-batch {micro_batch}"
                raise LifetimeError(Rule.ACCUMULATED, f"{adding}, {pending}")
            self._gradients[unit], self._added_by[unit] = _GradState.PENDING, micro_batch

    def reshard(self, unit: str) -> None:
        """Allowed while gathering: the executor then waits for the all-gather first."""
        self._require(unit, "RESHARD", _WeightState.GATHERING, _WeightState.READY)
        self._weights[unit] = _WeightState.SHARDED
        self._gathered -= 1

    def accumulate(self, unit: str) -> None:
        self._require_grad(unit, "ACCUM", _GradState.PENDING)
        self._gradients[unit] = _GradState.ACCUMULATED

    def reduce(self, unit: str) -> None:
        self._require_grad(unit, "REDUCE_GRAD", _GradState.PENDING, _GradState.ACCUMULATED)
        self._gradients[unit] = _GradState.NONE
        self._reductions += 1

    def finish(self) -> None:
        gathered = [f"{u} is {w.value}" for u, w in self._weights.items() if w is not self._initial]
        unreduced = [f"{u} has {g.value}" for u, g in self._gradients.items() if g is not _GradState.NONE]
        if gathered or unreduced:
            rule = Rule.RESHARDED if gathered else Rule.REDUCED
            raise LifetimeError(rule, f"FINISH too early: {', '.join(gathered + unreduced)}")

    def _require_unit(self, unit: str, action: str) -> None:
        if unit not in self._weights:
            known = ", ".join(self._weights)
            raise LifetimeError(Rule.EXISTS, f"{action} with {unit}, which is not a unit: there are {known}")

    def _require(self, unit: str, action: str, *allowed: _WeightState) -> None:
        self._require_unit(unit, action)
        if (state := self._weights[unit]) not in allowed:
            needed = " or ".join(each.value for each in allowed)
            rule = Rule.UNSHARDED if action in ("computing", "WAIT") else Rule.RESHARDED
            raise LifetimeError(rule, f"{action} with {unit}, which is {state.value}: it must be {needed}")

    def _require_grad(self, unit: str, action: str, *allowed: _GradState) -> None:
        self._require_unit(unit, action)
        if (state := self._gradients[unit]) not in allowed:
            why = f"{action} with {unit}, which has {state.value}: no op has added to it since"
            raise LifetimeError(Rule.REDUCED, why)


def uses_of(schedule: Schedule) -> Uses:
    """The units that each op of a schedule in phases uses. A `W` adds to gradients without reading weights; a
    frozen segment has no gradients to add to."""
    recompute = frozenset(schedule.recompute)
    by_op: dict[tuple[Act, int, str], Use] = {}
    for segment, phases in enumerate(schedule.phases):
        for phase in phases:
            units, name = phase.units, phase.name
            by_op[Act.F, segment, name] = Use(reads=units)
            reads = units if phase.backward_reads else ()
            grads = phase.grad_units if schedule.trains[segment] else ()
            by_op[Act.B, segment, name] = Use(reads=reads, grads=grads)
            by_op[Act.RECOMPUTE, segment, name] = Use(reads=phase.replayed_units(recompute) or ())
            for bucket in phase.buckets:
                by_op[Act.W, segment, bucket] = Use(grads=grads)

    def uses(op: Op) -> Use:
        if op.phase is None or op.segment is None:
            return NO_USE
        return by_op.get((op.act, op.segment, op.phase), NO_USE)

    return uses


def lifetime_faults(schedule: Schedule) -> Iterator[Fault]:
    """The first rule that each rank's list violates."""
    uses = uses_of(schedule)
    for rank, ops in enumerate(schedule.ops):
        lifetime = Lifetime(schedule.units(rank), resident=schedule.weights == "resident")
        place, finished = 0, False
        try:
            for place, op in enumerate(ops):  # noqa: B007
                finished = follow(lifetime, op, uses(op), finished)
            if not finished:
                place = len(ops)
                raise LifetimeError(Rule.FINISHED, "the list ends without FINISH")
        except LifetimeError as error:
            op = ops[place] if place < len(ops) else Op(act=Act.FINISH)
            yield Fault(rank=rank, place=place, op=op, rule=error.rule, why=str(error))


def sum_faults(schedule: Schedule) -> Iterator[Fault]:
    """Units that several stages use without summing their gradients once, and other sums."""
    holders = _holders(schedule)
    for rank, ops in enumerate(schedule.ops):
        needed = [unit for unit, ranks in holders.items() if rank in ranks]
        for place, op in enumerate(ops):
            if op.act is not Act.SUM_COPIES:
                continue
            summed = [(each.communicator, list(each.members)) for each in op.collectives]
            if [name for name in needed if summed == [(name, holders[name])]]:
                needed.remove(op.collectives[0].communicator)
            else:
                why = "it is not a unit of these ranks, or has been summed before"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.SUMMED, why=why)
        for unit in needed:
            op, why = Op(act=Act.SUM_COPIES), f"ranks {holders[unit]} hold {unit}, and do not sum its gradients"
            yield Fault(rank=rank, place=len(ops), op=op, rule=Rule.SUMMED, why=why)


def _holders(schedule: Schedule) -> dict[str, list[int]]:
    """For each trained unit that several stages hold, the ranks of these stages."""
    stages: dict[str, set[tuple[int, ...]]] = {}
    for segment, stations in enumerate(schedule.graph.stations):
        for phase in schedule.phases[segment] if schedule.trains[segment] else ():
            for unit in phase.grad_units:
                stages.setdefault(unit, set()).add(stations)
    return {
        unit: sorted(rank for stations in held_by for rank in stations)
        for unit, held_by in stages.items()
        if len(held_by) > 1
    }


_ACTIONS = MappingProxyType(
    {
        Act.UNSHARD: Lifetime.unshard,
        Act.WAIT: Lifetime.wait,
        Act.RESHARD: Lifetime.reshard,
        Act.ACCUM: Lifetime.accumulate,
        Act.REDUCE_GRAD: Lifetime.reduce,
    }
)
"""What each op on a unit does."""


def follow(lifetime: Lifetime, op: Op, use: Use, finished: bool) -> bool:
    """Apply one op of a list, and return whether FINISH has come."""
    if finished and (op.act.shards or use):
        raise LifetimeError(Rule.FINISHED, f"{op} comes after FINISH")
    if op.act is Act.SUM_COPIES and not finished:
        raise LifetimeError(Rule.FINISHED, f"{op} sums gradients that are not reduced yet")
    if op.act is Act.FINISH:
        lifetime.finish()
        return True
    if op.act.shards:
        if op.unit is None:
            raise LifetimeError(Rule.COMPLETE, f"{op} names no unit")
        _ACTIONS[op.act](lifetime, op.unit)
    elif use is not NO_USE and use:
        lifetime.use(use, op.micro_batch)
    return finished
