"""How far encoders may be ahead of the language model: how long a step takes and what it holds, by choice.

An encoder that shares ranks with the language model encodes `ahead` micro-batches before it waits for their
gradients. More of them mean fewer and longer rounds, so less waiting, and more activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from braid.planning.estimate.stages import Estimate, estimate
from braid.planning.plan import Plan, plan
from braid.planning.timeline import simulated_timeline
from braid.planning.trained import EVERYTHING
from braid.schedule import segment_peaks


@dataclass(frozen=True, kw_only=True)
class AheadChoice:
    """A step of the run with some value of `ahead`, simulated and estimated."""

    ahead: dict[str, int]
    """Micro-batches that each module may be ahead."""
    chosen: bool
    """Whether the run is planned so."""
    makespan: float
    """In units of the language model alone."""
    over_busiest: float
    """Makespan over the work of the busiest ranks, which no schedule can be shorter than."""
    idle: float
    """The idle share of all ranks' time."""
    peak: int
    """Peak memory in bytes, over all ranks."""


def ahead_choices(chosen: Estimate) -> Iterator[AheadChoice]:
    """The plan as it is, and with the least, twice the least and all micro-batches ahead, in the order of
    `ahead`. Modules that share no rank with the language model have no choice."""
    run, world = chosen.plan.run, chosen.plan.world
    # A frozen language model has no step of its own; its lists are those of a trained one.
    alone = plan(replace(run, modules={}, trained=run.trained or EVERYTHING), world)
    length = simulated_timeline(alone).makespan
    in_rounds = [edge.name for edge in chosen.edges if _shares_ranks(chosen.plan, edge.name)]
    own = {edge.name: edge.in_flight for edge in chosen.edges}
    found = {tuple(own.values()): chosen}
    if in_rounds:
        lead, every = segment_peaks(alone.schedule)[0], run.train.micro_batches
        for ahead in {min(each, every) for each in (lead, 2 * lead, every)}:
            wanted = own | dict.fromkeys(in_rounds, ahead)
            if tuple(wanted.values()) not in found:
                modules = {
                    name: replace(module, ahead=ahead if name in in_rounds else 0)
                    for name, module in run.modules.items()
                }
                found[tuple(wanted.values())] = estimate(
                    plan(replace(run, modules=modules), world), chosen.device
                )
    for values, result in sorted(found.items(), key=lambda item: item[0]):
        timeline = simulated_timeline(result.plan)
        yield AheadChoice(
            ahead=dict(zip(own, values, strict=True)),
            chosen=result is chosen,
            makespan=timeline.makespan / length,
            over_busiest=timeline.makespan / max(timeline.busy),
            idle=timeline.bubble,
            peak=result.peak,
        )


def _shares_ranks(made: Plan, name: str) -> bool:
    return not set(made.grid.ranks).isdisjoint(made.encoders[name].grid.ranks)
