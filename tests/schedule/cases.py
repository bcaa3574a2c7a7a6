"""Phases of models that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterable

from braid.model.declaration import Form, chains, units
from braid.pattern import Layout, cut, joined, parse
from braid.schedule import Chain, Op, Ops, Rule, parse_op
from braid.schedule.lifetime import Lifetime, LifetimeError, UnitStats, Uses, follow


def cut_for(text: str, pp: int = 1) -> Layout:
    """The layers of a pattern as so many pipeline ranks hold them."""
    layout = parse(text)
    return joined(layout) if pp == 1 else cut(layout, pp)


def fine(text: str, pp: int = 1, **form: bool) -> tuple[Chain, ...]:
    """A chain for each segment, blocks with experts in phases that can run beside each other."""
    return chains(cut_for(text, pp), Form(fine=True, **form))


def meshes(text: str, pp: int = 1, **form: bool) -> dict[str, str]:
    """The mesh of each unit of the model."""
    return {unit.path: unit.mesh for unit in units(cut_for(text, pp), Form(**form))}


def coarse(text: str, pp: int = 1, **form: bool) -> tuple[Chain, ...]:
    """A chain for each segment, every block as one phase."""
    return chains(cut_for(text, pp), Form(**form))


def prove(ops: Iterable[Op], units: Iterable[str], uses: Uses, *, resident: bool = False) -> UnitStats:
    """Follow a list to its end, or raise at the first op that violates a rule of `lifetime`."""
    lifetime, finished = Lifetime(units, resident=resident), False
    for op in ops:
        finished = follow(lifetime, op, uses(op), finished)
    if not finished:
        raise LifetimeError(Rule.FINISHED, "the list ends without FINISH")
    return lifetime.stats


def parse_ops(text: str) -> Ops:
    """Ops separated by blanks."""
    return tuple(parse_op(word) for word in text.split())


def compute_ops(ops: Iterable[Op]) -> Ops:
    """The ops that compute: the order that papers draw."""
    return tuple(op for op in ops if op.act.computes)
