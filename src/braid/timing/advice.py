"""Advice for a faster step: changes of one option that keep the model and the samples of a step.

Each candidate names the parts of the step that it could shorten. Those that could shorten it most are planned
and predicted like the run itself, but their schedules are not verified; the memory of the best is estimated. In
a pipeline, the cut by predicted time (`split`) is always one of them. A change of the mesh that changes dp
changes the micro-batches with it, so that a rank has as many rows in each.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, get_args

from braid.choices import Recompute, Strategy
from braid.config import Mesh, Run
from braid.planning.estimate import estimate
from braid.planning.plan import Plan, check
from braid.schedule import DUAL_PIPE_V
from braid.timing.meter import ClusterMeter
from braid.timing.predict import Prediction, unmeasured
from braid.timing.split import cut_by_time, short_draft
from braid.timing.step import BUBBLE, HOST, Stepper

MOST_TRIED, LEAST_TRIED, MOST_OPS = 12, 6, 250_000
"""Candidates that are planned and predicted: fewer for long lists, so that it takes seconds."""
LEAST_GAIN = 0.005
"""Changes that save a smaller share of the step are left out."""
MOST_ADVICE = 3
MOST_CUTS = 3
"""Cuts by time that are estimated until one fits."""
MOST_UNFIT = 2
"""Changes that save more time than these, but do not fit."""
_WEIGHTS = ("dp_cp", "edp")
_TOKENS = ("ep", "ep_etp")
_COMPUTE = ("products", "attention", "scans", "memory")


@dataclass(frozen=True, kw_only=True)
class TimeAdvice:
    """A change, and what comes of it."""

    changes: Mapping[str, object]
    """Options as on the command line: `mesh.pp`, and `train.micro_batches` if it has to follow."""
    seconds: float
    """Of a step after the change."""
    gain: float
    """Seconds that a step takes less."""
    peak: int
    """Bytes of the rank that needs most, after the change."""
    cost: int
    """Bytes that it needs more."""
    fits: bool | None
    """Whether the peak fits into the memory of the device; None if that is not known."""

    @property
    def options(self) -> str:
        """The change as options of a command."""
        return " ".join(_option(field, value) for field, value in self.changes.items())


class _Candidate(NamedTuple):
    """A change to try."""

    bound: float
    """Seconds of the parts that it could shorten."""
    changes: dict[str, object]
    run: Run


def advise(prediction: Prediction, *, device: str = "cuda", limit: int | None = None) -> list[TimeAdvice]:
    """The changes that save most time: up to three that fit into `limit` bytes, and those that would save more
    but do not fit."""
    world, least = prediction.plan.world, LEAST_GAIN * prediction.seconds
    before = estimate(prediction.stepper.plans[0], device).peak
    most = limit if limit is not None and before <= limit else None
    tried = [
        (seconds, short, each.changes)
        for each in _promising(prediction, device, most)
        for short in [_Short(each.run, world)]
        if (seconds := short.seconds(prediction)) is not None and seconds < prediction.seconds - least
    ]
    found, left = list[TimeAdvice](), Counter({True: MOST_ADVICE, False: MOST_UNFIT})
    for seconds, short, changes in sorted(tried, key=lambda one: one[0]):
        peak = short.peak(device)
        fits = None if limit is None else peak <= limit
        usable = fits is not False
        if left[usable]:
            left[usable] -= 1
            gain = prediction.seconds - seconds
            found.append(
                TimeAdvice(
                    changes=changes, seconds=seconds, gain=gain, peak=peak, cost=peak - before, fits=fits
                )
            )
        if not left[True]:
            break
    return found


class _Short:
    """A run, planned with as few micro-batches as its step follows from."""

    def __init__(self, run: Run, world: int) -> None:
        self.run, self.world = run, world

    @cached_property
    def plan(self) -> Plan:
        return short_draft(self.run, self.world)

    def seconds(self, prediction: Prediction) -> float | None:
        """The step of the run, timed as another one was; None if its work was not measured."""
        plan = self.plan
        meter = ClusterMeter(plan, prediction.cluster, prediction.calibration)
        stepper = Stepper(plan, load=prediction.load_factor, micro_batches=self.run.train.micro_batches)
        return None if unmeasured(plan, meter, stepper.held) else stepper.seconds(meter)

    def peak(self, device: str) -> int:
        return estimate(self.plan, device).peak


# -------------------------------------------------------------------------------------------- candidates


def _promising(prediction: Prediction, device: str, limit: int | None) -> list[_Candidate]:
    """The candidates that could save most, if that is enough to tell of, and that can be planned. `limit`: the
    bytes that another cut may need."""
    ops = sum(map(len, prediction.stepper.plans[-1].schedule.ops))
    count = min(MOST_TRIED, max(LEAST_TRIED, MOST_OPS // ops))
    likely = [each for each in _candidates(prediction) if each.bound > LEAST_GAIN * prediction.seconds]
    world = prediction.plan.world
    legal = (each for each in sorted(likely, key=lambda each: -each.bound) if not check(each.run, world))
    cut = list(_other_cut(prediction, device, limit))
    return [*cut, *islice(legal, count - len(cut))]


def _other_cut(prediction: Prediction, device: str, limit: int | None) -> Iterator[_Candidate]:
    """The pipeline cut by predicted time, if that is another cut. It costs little to find."""
    run, plan, short = prediction.plan.run, prediction.plan, prediction.stepper.plans[0]
    if run.modules or run.mesh.pp == 1 or len(plan.layout.segments) != run.mesh.pp * (1 + _is_v(run)):
        return
    found = cut_by_time(
        run, short, prediction.meter, prediction.stepper.held, limit=limit, device=device, tries=MOST_CUTS
    )
    if found.seconds < found.before:
        bound = prediction.parts.get(BUBBLE, 0.0)
        yield _Candidate(bound, {"model.pattern": found.run.model.pattern}, found.run)


def _is_v(run: Run) -> bool:
    return run.mesh.schedule == DUAL_PIPE_V


def _candidates(prediction: Prediction) -> Iterator[_Candidate]:
    """Changes of one option, each with what it could save at most, roughly."""
    parts, plan, run = prediction.parts, prediction.plan, prediction.plan.run
    train, count = run.train, run.train.micro_batches

    def saving(names: Iterable[str], share: float = 1.0) -> float:
        return share * sum(parts.get(name, 0.0) for name in names)

    for name, value, targets in _mesh_changes(plan, prediction.cluster.ranks_per_node):
        changed, more = _same_rows(run, replace(run.mesh, **{name: value}))  # type: ignore[arg-type]
        yield _Candidate(saving(targets), {f"mesh.{name}": value, **more}, changed)
    whole = not {"full", "block"}.isdisjoint(train.recompute)
    for regions in _less_recompute(train.recompute):
        changed = replace(run, train=replace(train, recompute=regions))
        yield _Candidate(saving(_COMPUTE, 0.3 if whole else 0.1), {"train.recompute": regions}, changed)
    for fewer, targets in ((2 * count, (BUBBLE,)), (count // 2, (HOST, *_WEIGHTS, "memory"))):
        changed = replace(run, train=replace(train, micro_batches=fewer))
        yield _Candidate(saving(targets, 0.5), {"train.micro_batches": fewer}, changed)


def _mesh_changes(plan: Plan, near: int) -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Options of the mesh, values to try, and the parts of a step that these could shorten. `near`: the ranks
    of a machine."""
    mesh, experts = plan.run.mesh, plan.run.model.moe is not None
    shared = (("tp", ("tp",)), ("cp", ("cp",)), ("pp", (BUBBLE, "pp")), ("ep", _TOKENS), ("etp", _TOKENS))
    for name, families in shared:
        if (value := int(getattr(mesh, name))) > 1:
            yield name, value // 2, families
    for name in ("tp", "pp", "ep") if experts else ("tp", "pp"):
        yield name, 2 * int(getattr(mesh, name)), _WEIGHTS
    for strategy in get_args(Strategy)[1:]:
        if strategy != mesh.shard:
            yield "shard", strategy, _WEIGHTS if mesh.shard != "none" else (*_WEIGHTS, "optimizer")
    if mesh.replicate == 1 and mesh.shard != "none":
        shards = max(1, near // mesh.tp)
        yield "replicate", max(1, plan.axes.dp * plan.axes.cp // shards), _WEIGHTS
    if experts and mesh.dispatcher != "deep_ep":
        yield "dispatcher", "deep_ep", _TOKENS
    yield "overlap", not mesh.overlap, (BUBBLE,) if mesh.overlap else _TOKENS
    if mesh.overlap and mesh.schedule == "auto":
        yield "delay_weights", not mesh.delay_weights, _TOKENS
    if mesh.pp > 1:
        yield "schedule", "dual_pipe_v" if mesh.schedule == "auto" else "auto", (BUBBLE, *_TOKENS)


def _same_rows(run: Run, mesh: Mesh) -> tuple[Run, dict[str, object]]:
    """The run on another mesh, with micro-batches that leave a rank as many rows, if there can be."""
    old, new = (each.tp * each.cp * each.pp for each in (run.mesh, mesh))
    count = run.train.micro_batches * new // old
    changed = replace(run, mesh=mesh)
    if new == old or count < 1 or run.train.batch_samples % count:
        return changed, {}
    return replace(changed, train=replace(run.train, micro_batches=count)), {"train.micro_batches": count}


def _less_recompute(regions: tuple[Recompute, ...]) -> Iterator[tuple[Recompute, ...]]:
    """Fewer recomputed regions: without each of them, and without any."""
    if "full" in regions or "block" in regions:
        yield "norm", "activation", "core"
    for name in regions if len(regions) > 1 else ():
        yield tuple(each for each in regions if each != name)
    if regions:
        yield ()


def _option(field: str, value: object) -> str:
    words = map(str, value if isinstance(value, tuple) else (value,))
    return shlex.join([f"--{field.replace('_', '-')}", *words])
