"""Where the `|` of a pipeline go by predicted time: the slowest rank computes as briefly as it can.

A block takes the seconds that its ops take in a micro-batch, as `predict` times them in the plan that is cut:
recomputation and collectives that the compute stream waits for are in, exchanges that another micro-batch hides
are not. The embedding counts for the first segment; final norm, head and MTP depths for the last.

Placements that do not fit into memory are left out. What ranks hold is estimated for the best placement; those
that need too much may not have as many blocks of these kinds again; and so on until all fit.

The result is a pattern, so it is data like a placement by hand: saved with the run, and executed as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from braid.config import Run
from braid.pattern import Layout, compact, cut_into, joined
from braid.planning import split
from braid.planning.estimate import counted_by_station, estimate
from braid.planning.plan import Plan, draft
from braid.planning.split import Costs, State
from braid.schedule import DUAL_PIPE_V
from braid.schedule.phases import Stream
from braid.schedule.views import phase_of, stream_of
from braid.timing.calibration import Calibration
from braid.timing.links import Cluster, filled
from braid.timing.meter import ClusterMeter
from braid.timing.predict import calibration_for
from braid.timing.seconds import Meter, OpTimes, Station, stations_of
from braid.timing.step import shorter

UNITS_PER_SECOND = 10**12
"""Costs are whole numbers, of picoseconds."""
MOST_TRIED = 12
"""Placements that are planned and estimated until one fits."""


@dataclass(frozen=True, kw_only=True)
class SplitByTime:
    """A run that is cut by predicted time."""

    run: Run
    seconds: float
    """That the slowest rank computes in a micro-batch."""
    before: float
    """The same with the cut that the run had before."""
    before_fits: bool
    """Whether that cut fits into the memory that was given."""
    fits: bool
    """Whether it fits into the memory that was given. If none of those tried does, it is the fastest of all."""


def split_by_time(
    run: Run,
    world: int,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    load: float = 1.0,
    limit: int | None = None,
    device: str = "cuda",
) -> SplitByTime:
    """The run with the `|` that leave the slowest rank least to compute, among the placements with one segment
    per rank (two with DualPipeV) whose ranks need no more than `limit` bytes."""
    made = short_draft(run, world)
    meter = ClusterMeter(made, filled(cluster, world), calibration_for(cluster, calibration))
    stations = stations_of(made, counted_by_station(made, device), load)
    return cut_by_time(run, made, meter, stations, limit=limit, device=device)


def cut_by_time(
    run: Run,
    made: Plan,
    meter: Meter,
    stations: Sequence[Station],
    *,
    limit: int | None = None,
    device: str = "cuda",
    tries: int = MOST_TRIED,
) -> SplitByTime:
    """The same for a run that was planned; `made` may have fewer micro-batches. `tries` are the placements that
    are planned and estimated at most."""
    costs, pp, folded = costs_of(made, meter, stations), run.mesh.pp, run.mesh.schedule == DUAL_PIPE_V
    sizes_before = [len(segment.blocks) for segment in made.layout.segments]
    before = max(_loads(costs, sizes_before, made.schedule.holder)) / UNITS_PER_SECOND
    holder = (*range(pp), *(reversed(range(pp)) if folded else ()))
    before_fits = limit is None or estimate(made, device).peak <= limit
    whole, memory = joined(made.layout), _Memory(joined(made.layout))
    first: SplitByTime | None = None
    for _ in range(tries):
        sizes = split.best(costs, pp, folded=folded, allowed=memory.allowed)
        if sizes is None:
            break
        cut = replace(run, model=replace(run.model, pattern=compact(cut_into(whole, sizes))))
        seconds = max(_loads(costs, sizes, holder)) / UNITS_PER_SECOND
        found = SplitByTime(run=cut, seconds=seconds, before=before, before_fits=before_fits, fits=True)
        if limit is None or not memory.excluded(short_draft(cut, made.world), limit, device):
            return found
        first = first or found
    assert first is not None, "there is no rule against the first placement"
    return replace(first, fits=False)


def short_draft(run: Run, world: int) -> Plan:
    """A draft with as few micro-batches as tell the time and the memory of a step."""
    train = run.train
    few = None if run.modules else shorter(run.mesh.pp, train.micro_batches)
    if few is None or train.batch_samples % train.micro_batches:
        return draft(run, world)
    samples = few * train.batch_samples // train.micro_batches
    return draft(replace(run, train=replace(train, micro_batches=few, batch_samples=samples)), world)


def costs_of(plan: Plan, meter: Meter, stations: Sequence[Station]) -> Costs:
    """What the blocks of a plan, and the ends of its pipeline, compute in a micro-batch, in picoseconds."""
    times, stream, phase_for = OpTimes(plan, meter, stations), stream_of(plan.schedule), phase_of(plan.schedule)
    blocks, first, last = [0.0] * len(plan.layout.blocks), 0.0, 0.0
    for station, ops in enumerate(plan.schedule.ops):
        for op in ops:
            if op.micro_batch != 0 or not op.act.computes:
                continue
            if plan.run.mesh.overlap and stream(op) is Stream.COMMUNICATION:
                continue
            phase, seconds = phase_for(op), times.seconds(station, op)
            assert phase is not None
            if phase.depth is not None or phase.kind in ("final_norm", "head"):
                last += seconds
            elif phase.block is None:
                first += seconds
            else:
                blocks[phase.block] += seconds
    whole = [round(UNITS_PER_SECOND * each) for each in (*blocks, first, last)]
    return Costs(blocks=tuple(whole[:-2]), first=whole[-2], last=whole[-1])


def _loads(costs: Costs, sizes: Sequence[int], holder: Sequence[int]) -> list[int]:
    """What each rank computes in a micro-batch, if its segments have these numbers of blocks."""
    ends = [0, *accumulate(sizes)]
    segments = [sum(costs.blocks[start:end]) for start, end in pairwise(ends)]
    segments[0] += costs.first
    segments[-1] += costs.last
    loads = [0] * (max(holder) + 1)
    for rank, own in zip(holder, segments, strict=True):
        loads[rank] += own
    return loads


class _Memory:
    """The loads of ranks that are known not to fit: numbers of blocks of each kind, in front and behind."""

    def __init__(self, layout: Layout) -> None:
        names = [str(block) for block in layout.blocks]
        self.count, self.kinds = len(names), list(dict.fromkeys(names))
        self.before = [[0, *accumulate(name == kind for name in names)] for kind in self.kinds]
        """For each kind, how many blocks of it come before each place."""
        self.unfit: dict[int, list[tuple[list[int], list[int]]]] = {}

    def allowed(self, rank: int, before: State, after: State) -> bool:
        """Whether a rank has fewer blocks of a kind than each load of it that is known not to fit."""
        if rank not in self.unfit:
            return True
        front, behind = (before[0], after[0]), (self.count - after[1], self.count - before[1])
        return not any(
            self._holds(front, most) and self._holds(behind, last) for most, last in self.unfit[rank]
        )

    def _holds(self, place: State, load: Sequence[int]) -> bool:
        """Whether the blocks between two places are at least as many of each kind."""
        start, end = place
        return all(sums[end] - sums[start] >= most for sums, most in zip(self.before, load, strict=True))

    def excluded(self, plan: Plan, limit: int, device: str) -> bool:
        """Whether ranks of a plan need more than `limit`; their loads are remembered."""
        found = False
        for stage, each in zip(plan.stages, estimate(plan, device).stages, strict=True):
            if each.memory.peak > limit:
                found = True
                own = [[str(block) for block in segment.blocks] for segment in stage.segments]
                loads = [[names.count(kind) for kind in self.kinds] for names in (*own, [])]
                self.unfit.setdefault(stage.rank, []).append((loads[0], loads[1]))
        return found
