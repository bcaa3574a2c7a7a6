"""Candidates as planning, `estimate` and `predict` see them, simulated in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from braid.config import Run
from braid.errors import ConfigError
from braid.planning.estimate import estimate
from braid.planning.plan import plan, training_flops
from braid.timing.calibration import Calibration
from braid.timing.links import Cluster
from braid.timing.meter import ClusterMeter
from braid.timing.predict import unmeasured
from braid.timing.search.choices import Choice, Space
from braid.timing.search.pipeline import counted
from braid.timing.step import Stepper


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all candidates of a search share."""

    space: Space
    cluster: Cluster
    calibration: Calibration
    load: float = 1.0
    """How many times its share the slowest rank of the experts has."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A candidate that was simulated."""

    choice: Choice
    run: Run
    dp: int
    rows: int
    """Of a rank in a micro-batch."""
    seconds: float
    """Of a step."""
    low: float
    high: float
    """The ends of its range."""
    mfu: float
    limited_by: tuple[str, float]
    """The largest part of the step, and its share."""
    peak: int
    """Bytes of memory."""


def timed(setting: Setting, choice: Choice, run: Run | None = None) -> Timed:
    """Simulate a candidate, or the run that it stands for. Of a long step, the op lists of a shorter one tell
    its time and its peak; `predict` derives it from them too."""
    world = setting.space.world
    whole = setting.space.run_of(choice) if run is None else run
    few = counted(choice.micro_batches, choice.mesh.pp)
    samples = whole.train.batch_samples // choice.micro_batches * few
    train = replace(whole.train, micro_batches=few, batch_samples=samples)
    short = plan(replace(whole, train=train), world)
    made = replace(short, run=whole, step_tokens=whole.train.batch_samples * whole.data.sequence_tokens)
    meter = ClusterMeter(made, setting.cluster, setting.calibration)
    stepper = Stepper(made, load=setting.load)
    if unknown := unmeasured(made, meter, stepper.held):
        raise ConfigError("\n".join(["no time can be given:", *unknown]))
    step = stepper.step(meter)
    parts = step.stations[step.limiting]
    largest = max(parts, key=lambda name: parts[name])
    flops = training_flops(made) * whole.train.batch_samples
    return Timed(
        choice=choice,
        run=whole,
        dp=made.axes.dp,
        rows=made.micro_batch_samples // made.axes.dp,
        seconds=step.seconds,
        low=stepper.seconds(replace(meter, side=-1.0)),
        high=stepper.seconds(replace(meter, side=1.0)),
        mfu=flops / (step.seconds * world * setting.calibration.peak_flops),
        limited_by=(largest, parts[largest] / step.seconds),
        peak=estimate(short).peak,
    )


class Simulator:
    """Simulates candidates in processes of its own, or in this one. Processes start at once, so that they have
    loaded what they need when there is something to simulate."""

    def __init__(self, setting: Setting, processes: int) -> None:
        self._timed = partial(timed, setting)
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
            for _ in range(processes):
                self._pool.submit(_loaded)

    def timed(self, choices: Sequence[Choice]) -> list[Timed]:
        """In the order of the candidates."""
        run_all = map if self._pool is None else self._pool.map
        return list(run_all(self._timed, choices))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _loaded() -> None:
    """Runs in a process once it has imported this module."""
