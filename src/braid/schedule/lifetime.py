"""The life of sharded weights in a step: its rules, without a process.

    sharded ── UNSHARD ──► gathering ── WAIT ──► ready ── RESHARD ──► sharded

An op computes with units that are ready. What it adds to a unit's gradient is owed from then on: `ACCUM` puts
it with what is owed already, `REDUCE_GRAD` pays. Before one of them nothing of another micro-batch is added:
ranks would sum other addends than without a schedule. At `FINISH` every unit is sharded and nothing is owed.

The rules hold twice: `prove` follows a list of ops before anything runs, and the engine keeps a `Lifetime`
while it runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from braid.schedule.ops import Act, Op


class LifetimeError(RuntimeError):
    """A list of ops, or whoever runs it, treats sharded weights as it must not: a mistake in braid."""


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


class _Weights(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    READY = "ready"


class _Gradient(Enum):
    NONE = "nothing"
    FRESH = "what an op has added"
    ACCUMULATED = "what is accumulated"


class Lifetime:
    """Where every unit stands within one step. Each method is an action; one that breaks a rule raises."""

    def __init__(self, units: Iterable[str]) -> None:
        self._weights = dict.fromkeys(units, _Weights.SHARDED)
        self._gradients = dict.fromkeys(self._weights, _Gradient.NONE)
        self._added_by: dict[str, int | None] = {}
        self._gathers = self._reductions = self._peak = 0

    @property
    def figures(self) -> Figures:
        """Of the step so far."""
        return Figures(self._gathers, self._reductions, self._peak)

    def gathering(self, unit: str) -> bool:
        """Whether it is on its way."""
        return self._weights[unit] is _Weights.GATHERING

    def unshard(self, unit: str) -> None:
        self._require(unit, "UNSHARD", _Weights.SHARDED)
        self._weights[unit] = _Weights.GATHERING
        self._gathers += 1
        gathered = sum(weights is not _Weights.SHARDED for weights in self._weights.values())
        self._peak = max(self._peak, gathered)

    def wait(self, unit: str) -> None:
        """Once it is ready there is nothing to wait for."""
        self._require(unit, "WAIT", _Weights.GATHERING, _Weights.READY)
        self._weights[unit] = _Weights.READY

    def use(self, use: Use, micro_batch: int | None = None) -> None:
        """An op is about to run, for a micro-batch."""
        for unit in use.reads:
            self._require(unit, "computing", _Weights.READY)
        for unit in use.grades:
            self._known(unit, "computing")
            before = self._added_by.get(unit)
            if self._gradients[unit] is _Gradient.FRESH and before != micro_batch:
                owed = f"which owes what was added for micro-batch {before}: ACCUM or REDUCE_GRAD first"
                raise LifetimeError(f"adding to {unit} for micro-batch {micro_batch}, {owed}")
            self._gradients[unit], self._added_by[unit] = _Gradient.FRESH, micro_batch

    def reshard(self, unit: str) -> None:
        """During a gather it first waits for it."""
        self._require(unit, "RESHARD", _Weights.GATHERING, _Weights.READY)
        self._weights[unit] = _Weights.SHARDED

    def accumulate(self, unit: str) -> None:
        self._owes(unit, "ACCUM", _Gradient.FRESH)
        self._gradients[unit] = _Gradient.ACCUMULATED

    def reduce(self, unit: str) -> None:
        self._owes(unit, "REDUCE_GRAD", _Gradient.FRESH, _Gradient.ACCUMULATED)
        self._gradients[unit] = _Gradient.NONE
        self._reductions += 1

    def finish(self) -> None:
        held = [f"{u} is {w.value}" for u, w in self._weights.items() if w is not _Weights.SHARDED]
        owed = [f"{u} owes {g.value}" for u, g in self._gradients.items() if g is not _Gradient.NONE]
        if left := held + owed:
            raise LifetimeError(f"FINISH with leftovers: {', '.join(left)}")

    def _known(self, unit: str, action: str) -> None:
        if unit not in self._weights:
            raise LifetimeError(f"{action} with {unit}, which is no unit: there are {', '.join(self._weights)}")

    def _require(self, unit: str, action: str, *allowed: _Weights) -> None:
        self._known(unit, action)
        if (weights := self._weights[unit]) not in allowed:
            needed = " or ".join(each.value for each in allowed)
            raise LifetimeError(f"{action} with {unit}, which is {weights.value}: it has to be {needed}")

    def _owes(self, unit: str, action: str, *allowed: _Gradient) -> None:
        self._known(unit, action)
        if (gradient := self._gradients[unit]) not in allowed:
            raise LifetimeError(f"{action} with {unit}, which owes {gradient.value}: no op has added to it")


def prove(ops: Iterable[Op], units: Iterable[str], uses: Uses) -> Figures:
    """Follow a list to its end, or raise where it breaks a rule."""
    lifetime, finished = Lifetime(units), False
    for op in ops:
        if finished and (op.act.shards or uses(op)):
            raise LifetimeError(f"{op} comes after FINISH")
        follow(lifetime, op)
        lifetime.use(uses(op), op.micro_batch)
        finished = finished or op.act is Act.FINISH
    if not finished:
        raise LifetimeError("the list ends without FINISH")
    return lifetime.figures


def follow(lifetime: Lifetime, op: Op) -> None:
    """Do what an op says about units; nothing where it is about none."""
    if op.act is Act.FINISH:
        lifetime.finish()
    elif op.act.shards:
        assert op.unit is not None, f"{op} names no unit"
        actions = {
            Act.UNSHARD: lifetime.unshard,
            Act.WAIT: lifetime.wait,
            Act.RESHARD: lifetime.reshard,
            Act.ACCUM: lifetime.accumulate,
            Act.REDUCE_GRAD: lifetime.reduce,
        }
        actions[op.act](op.unit)
