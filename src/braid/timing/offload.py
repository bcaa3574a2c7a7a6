"""Activation offload by predicted seconds: where its copies stand, and how much of it hides behind computation.

`decided` replaces `train.offload auto` by that share. Places follow from the seconds of each kind of block on a
device (`with_times`), without those of collectives: what takes longer has its copies a little earlier than need
be. What hides is found by simulating steps: a share of the blocks hides if the step is hardly longer than
without offload.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from braid.choices import AUTO
from braid.config import Run
from braid.errors import ConfigError
from braid.planning.estimate.offload import moved
from braid.planning.estimate.weights import counted_by_station, part_of
from braid.planning.plan import Plan, check
from braid.schedule import Act, Op
from braid.schedule.offload import block_of, blocks_of, chosen
from braid.schedule.offload_times import HEAD, Times, words_of
from braid.timing.calibration import Calibration, load, missing, missing_link, seconds, shipped
from braid.timing.links import Cluster, clusters, filled, load_cluster
from braid.timing.meter import ClusterMeter
from braid.timing.peaks import device_name
from braid.timing.predict import calibration_for
from braid.timing.seconds import Station, stations_of
from braid.timing.split import short_draft
from braid.timing.step import Stepper

LEAST = 0.01
"""By which share of its seconds a step may be longer if what it offloads hides."""


def times_on(run: Run, world: int, device: str) -> Run:
    """`with_times` on a device, by the name that its driver gives it, if it is a known one."""
    name = device_name(device)
    return with_times(run, world, load(name)) if name in shipped() else run


def with_times(run: Run, world: int, calibration: Calibration) -> Run:
    """A run that offloads, with the times of its blocks, if it has none and the calibration knows them."""
    given = run.train.offload_times or not run.train.offload or run.modules
    if given or missing_link(calibration) or check(run, world):
        return run
    made = short_draft(run, world)
    stations = stations_of(made, counted_by_station(made, "cuda"), 1.0)
    if any(
        missing(work, calibration)
        for each in stations
        for kind in each.works.values()
        for work in kind.values()
    ):
        return run
    return replace(run, train=replace(run.train, offload_times=words_of(_times(made, stations, calibration))))


def _times(plan: Plan, stations: list[Station], calibration: Calibration) -> dict[str, Times]:
    """Microseconds of each kind of block: of the one that takes longest to copy."""
    spent: dict[tuple[int | None, bool], float] = defaultdict(float)
    sizes: dict[int, int] = {}
    for held in stations:
        for op in plan.schedule.ops[held.number]:
            if op.micro_batch == 0 and op.act in (Act.F, Act.B, Act.RECOMPUTE):
                block = _block(plan, held, op)
                spent[block, op.act is Act.F] += _seconds(held, op, calibration)
        for segment in plan.schedule.segments_of(held.number):
            module = held.module_of(segment)
            for phase in plan.schedule.phases[segment]:
                if phase.block is not None and block_of(phase) in blocks_of(plan.schedule.phases[segment]):
                    sizes[phase.block] = moved(module.costs[module.name_of(part_of(phase))])
    link, found = calibration.host_link, dict[str, Times]()
    for each in plan.layout.blocks:
        size, kind = sizes.get(each.index, 0), str(each)
        known = Times(
            forward=_microseconds(spent[each.index, True]),
            backward=_microseconds(spent[each.index, False]),
            out=_microseconds(size / link["to_host"]),
            back=_microseconds(size / link["to_device"]),
        )
        found[kind] = max(found.get(kind, known), known, key=lambda times: times.out)
    found[HEAD] = Times(round(spent[None, True] * 1e6), round(spent[None, False] * 1e6), 0, 0)
    return found


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


def _block(plan: Plan, held: Station, op: Op) -> int | None:
    """The block that an op runs a phase of; None for the head, and what else is outside of blocks."""
    phase = held.phases[op.segment or 0, op.phase or ""]
    return None if phase.depth is not None else phase.block


def _seconds(held: Station, op: Op, calibration: Calibration) -> float:
    pieces = held.timed(op).pieces
    return sum(seconds(piece, way, calibration) for piece, way in pieces) * calibration.sustained


@dataclass(frozen=True)
class Decided:
    """A run without the word `auto` in `train.offload`, and what was decided, if it had it."""

    run: Run
    reasons: tuple[str, ...] = ()


def decided_on(run: Run, world: int, device: str | None) -> Decided:
    """`decided` on a device, by the name that its driver gives it; None: there is none. Ranks are connected as
    in the shipped cluster of such devices."""
    if run.train.offload != AUTO or device is None:
        return decided(run, world, None)
    known = (load_cluster(name) for name in clusters())
    cluster = next((each for each in known if each.device == device_name(device)), None)
    if cluster is None:
        return _undecided(run, f"braid ships no cluster of {device}")
    return decided(run, world, cluster)


def decided(
    run: Run,
    world: int,
    cluster: Cluster | None,
    calibration: Calibration | None = None,
    *,
    load: float = 1.0,
    device: str = "cuda",
) -> Decided:
    """The run with the share that hides on a cluster in the place of `auto`; 0 if nobody knows."""
    if run.train.offload != AUTO:
        return Decided(run)
    if run.modules:
        return _undecided(run, "it is for runs without modules: set a share")
    if cluster is None:
        return _undecided(run, "no GPU decides; `braid plan --cluster` names one")
    if unknown := missing_link(calibration_for(cluster, calibration)):
        return _undecided(run, unknown[0])
    if check(_sharing(run, 0.0), world):  # its own problems come first
        return Decided(_sharing(run, 0.0))
    share = hidden_offload(run, world, cluster, calibration, load=load, device=device)
    what = f"{share:g} of the blocks" if share else "no block"
    why = f"train.offload auto: {what}, by predicted seconds on {cluster.device}"
    return Decided(_sharing(run, share), (why,))


def _undecided(run: Run, why: str) -> Decided:
    return Decided(_sharing(run, 0.0), (f"train.offload auto: nothing is offloaded, {why}",))


def _sharing(run: Run, share: float) -> Run:
    regions = run.train.offload_regions if share else ()
    return replace(run, train=replace(run.train, offload=share, offload_regions=regions))


def hidden_offload(
    run: Run,
    world: int,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    load: float = 1.0,
    device: str = "cuda",
) -> float:
    """The largest `train.offload`, in hundredths, with which a step is hardly longer than without."""
    cluster, known = filled(cluster, world), calibration_for(cluster, calibration)
    if unknown := missing_link(known):
        raise ConfigError(unknown[0])
    run = with_times(replace(run, train=replace(run.train, offload=1.0)), world, known)

    def step(share: float) -> float:
        made = short_draft(_sharing(run, share), world)
        counted = counted_by_station(made, device)
        return Stepper(made, load=load, counted=counted).short_seconds(ClusterMeter(made, cluster, known))

    made = short_draft(run, world)
    shares, before = list[float](), None
    for hundredths in range(1, 101):
        blocks = [len(chosen(phases, hundredths / 100)) for phases in made.schedule.phases]
        if blocks != before and any(blocks):
            shares.append(hundredths / 100)
        before = blocks
    kept, hidden, slow = step(0.0), 0, len(shares)
    while hidden < slow:  # more takes no less time
        middle = (hidden + slow) // 2
        hidden, slow = (middle + 1, slow) if step(shares[middle]) <= (1 + LEAST) * kept else (hidden, middle)
    if hidden == len(shares):
        return 1.0 if shares else 0.0
    return round(shares[hidden] - 0.01, 2) if hidden else 0.0
