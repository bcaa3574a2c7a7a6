"""What to try where a run does not fit: changes of one choice each, estimated like the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from braid.choices import Recompute
from braid.config import Mesh, Run
from braid.errors import ConfigError
from braid.planning.estimate.stages import Estimate, estimate
from braid.planning.plan import plan

FACTORS = (2, 4, 8)
"""By how much a choice is raised."""
RECOMPUTE: tuple[Recompute, ...] = ("norm", "activation", "core", "full")
"""What is made again instead of kept, from the cheapest on. The last has all of the others."""
MOST = 5
"""Pieces of advice that are given, one for each choice."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of one choice."""

    field: str
    """As on the command line: `mesh.tp`, `world`."""
    value: object
    peak: int
    """Bytes that the rank that holds most would need."""


def advise(before: Estimate, limit: int) -> list[Advice]:
    """Changes that would need less: of each choice the least that fits into `limit` bytes, or where none fits
    the one that needs least. Those that fit come first."""
    found: dict[str, Advice] = {}
    for field, value, run, world in _changes(before.plan.run, before.plan.world):
        try:
            peak = estimate(plan(run, world), before.device).peak
        except ConfigError:
            continue
        best = found[field].peak if field in found else before.peak
        if peak < best and best > limit:
            found[field] = Advice(field=field, value=value, peak=peak)
    return sorted(found.values(), key=lambda each: (each.peak > limit, each.peak))[:MOST]


def _changes(run: Run, world: int) -> Iterator[tuple[str, object, Run, int]]:
    """Larger values of each choice that shares out memory. A micro-batch keeps its samples on any mesh: with
    more of tp or cp a rank has less of more rows, so what these save is weights; more ranks save both."""
    mesh, train = run.mesh, run.train
    if mesh.shard != "all":
        yield "mesh.shard", "all", replace(run, mesh=replace(mesh, shard="all")), world
    if mesh.replicate > 1:
        yield "mesh.replicate", 1, replace(run, mesh=replace(mesh, replicate=1)), world
    for name in RECOMPUTE if not train.recompute else RECOMPUTE[-1:]:
        if name not in train.recompute:
            yield "train.recompute", name, replace(run, train=replace(train, recompute=(name,))), world
    for factor in FACTORS:
        for axis in ("tp", "cp", "pp", "ep"):
            value = factor * int(getattr(mesh, axis))
            yield f"mesh.{axis}", value, replace(run, mesh=_with(mesh, axis, value)), world
        value = factor * train.micro_batches
        yield "train.micro_batches", value, replace(run, train=replace(train, micro_batches=value)), world
        yield "world", factor * world, run, factor * world


def _with(mesh: Mesh, axis: str, value: int) -> Mesh:
    return replace(mesh, **{axis: value})  # type: ignore[arg-type]
