"""Candidates as planning, `estimate` and `predict` see them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from braid.config import Run
from braid.errors import ConfigError
from braid.planning.estimate import counted_by_station, estimate
from braid.planning.plan import draft
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
    sample_flops: int = field(init=False)
    """FLOPs of one sequence in a step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_flops", self.space.sample_flops())


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
    model = whole.model if run is not None else setting.space.model_cut(choice)
    short = draft(replace(whole, train=train, model=model), world)
    made = replace(short, run=whole, step_tokens=whole.train.batch_samples * whole.data.sequence_tokens)
    meter = ClusterMeter(made, setting.cluster, setting.calibration)
    held = counted_by_station(short, "cuda")
    stepper = Stepper(made, load=setting.load, counted=held)
    if unknown := unmeasured(made, meter, stepper.held):
        raise ConfigError("\n".join(["no time can be given:", *unknown]))
    step = stepper.step(meter)
    parts = step.stations[step.limiting]
    largest = max(parts, key=lambda name: parts[name])
    flops = setting.sample_flops * whole.train.batch_samples
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
        peak=estimate(short, counted=held).peak,
    )
