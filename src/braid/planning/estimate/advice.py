"""Advice for a run that does not fit: changes of a single option, each estimated like the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from braid.choices import Recompute
from braid.config import Mesh, Run
from braid.errors import ConfigError
from braid.planning.estimate.stages import Estimate, estimate
from braid.planning.plan import plan

FACTORS = (2, 4, 8)
"""Multiples of an option that are tried."""
RECOMPUTE: tuple[Recompute, ...] = ("norm", "activation", "core", "full")
"""Recompute options in order of increasing cost; `full` includes all others."""
MAX_ADVICE = 5


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of one option."""

    field: str
    """As on the command line: `mesh.tp`, `world`."""
    value: object
    peak: int
    """Peak memory in bytes after the change."""


def advise(before: Estimate, limit: int) -> list[Advice]:
    """Changes that lower the peak: for each option the smallest change that fits into `limit` bytes, or the one
    with the lowest peak if none fits. Changes that fit come first."""
    best: dict[str, Advice] = {}
    for field, value, run, world in _changes(before.plan.run, before.plan.world):
        try:
            peak = estimate(plan(run, world), before.device).peak
        except ConfigError:
            continue
        lowest = best[field].peak if field in best else before.peak
        if peak < lowest and lowest > limit:
            best[field] = Advice(field=field, value=value, peak=peak)
    return sorted(best.values(), key=lambda advice: (advice.peak > limit, advice.peak))[:MAX_ADVICE]


def _changes(run: Run, world: int) -> Iterator[tuple[str, object, Run, int]]:
    """Larger values of each option that distributes memory. At a fixed world size, raising tp or cp lowers dp:
    a rank holds a smaller part of more sequences, so only weights get smaller; more ranks reduce both."""
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
