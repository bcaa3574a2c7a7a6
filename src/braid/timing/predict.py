"""predict(plan, cluster) -> Prediction: how long a step takes, with a range, and what would narrow it.

The step is simulated with every figure at its likely value, and at the slow and the fast end of its range:
ranges move together. What a calibration does not know is listed, and then there are no seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.planning.estimate.weights import Counted
from braid.planning.plan import Plan, training_flops
from braid.schedule import Timeline
from braid.timing.calibration import Calibration, load, missing, missing_link
from braid.timing.links import Cluster, filled, missing_calls, span
from braid.timing.meter import HOST, ClusterMeter
from braid.timing.seconds import Station
from braid.timing.step import BUBBLE, Stepper, StepTime

_ADVICE = MappingProxyType(
    {
        "network": "measure the network: `braid calibrate` under a launcher on 2 nodes",
        "node": "measure collectives: `braid calibrate` under a launcher on the GPUs of a node",
        HOST: "measure the link to the host: `braid calibrate` on a GPU",
        "sustained": "measure the device: `braid calibrate` on one of them",
    }
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The time of a step of a plan on a cluster."""

    plan: Plan
    cluster: Cluster
    calibration: Calibration
    step: StepTime
    low: float
    high: float
    """Seconds of the step at the ends of the range."""
    wider: Mapping[str, float]
    """By which share each class that could be measured lengthens the step, if it is at its slow end."""
    stepper: Stepper
    meter: ClusterMeter
    """What the step was timed with."""
    load_factor: float

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.plan.step_tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """FLOPs of the model on one rank; recomputation does not count."""
        samples = self.plan.run.train.batch_samples
        return training_flops(self.plan) * samples / (self.seconds * self.plan.world)

    @property
    def mfu(self) -> float:
        return self.flops_per_second / self.calibration.peak_flops

    @property
    def parts(self) -> dict[str, float]:
        """What the step is spent on, on a rank of the station that computes longest; the largest first."""
        found = self.step.stations[self.step.limiting]
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def timeline(self) -> Timeline:
        """When each op of the step runs on one rank of each station, in seconds."""
        return self.stepper.timeline(self.meter)

    @property
    def limited_by(self) -> str:
        """The largest part."""
        return next(iter(self.parts), BUBBLE)

    @property
    def narrowed_by(self) -> str:
        """What would narrow the range most; empty if nothing would by much."""
        widest = max(self.wider, key=lambda name: self.wider[name])
        return _ADVICE[widest] if self.wider[widest] > 0.01 else ""


def predict(
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    load_factor: float = 1.0,
    metered: Callable[[Plan, Cluster, Calibration], ClusterMeter] = ClusterMeter,
    counted: Sequence[Sequence[Counted]] | None = None,
) -> Prediction:
    """The time of a step. `calibration` defaults to that of the cluster's device; `load_factor` is how many
    times its share the slowest rank of the experts has; `metered` makes the meter; `counted` is what stations
    hold on a GPU, if that is known already."""
    known, cluster = calibration_for(cluster, calibration), filled(cluster, plan.world)
    likely, stepper = metered(plan, cluster, known), Stepper(plan, load=load_factor, counted=counted)
    if unknown := unmeasured(plan, likely, stepper.held):
        raise ConfigError("\n".join(["no time can be given:", *unknown]))
    step, short = stepper.step(likely), stepper.short_seconds(likely)
    return Prediction(
        plan=plan,
        cluster=cluster,
        calibration=known,
        step=step,
        low=stepper.seconds(replace(likely, side=-1.0)),
        high=stepper.seconds(replace(likely, side=1.0)),
        wider={
            name: stepper.short_seconds(replace(likely, side=1.0, only=name)) / short - 1 for name in _ADVICE
        },
        stepper=stepper,
        meter=likely,
        load_factor=load_factor,
    )


def calibration_for(cluster: Cluster, given: Calibration | None) -> Calibration:
    """That of the cluster's device. One that is given must be of the same device: another device's seconds are
    no measurements of this one."""
    own = load(cluster.device)
    if given is None or given.device == own.device:
        return own if given is None else given
    raise ConfigError(
        [
            Problem(
                field="calibration",
                value=given.device,
                rule=f"must be of the device of the cluster {cluster.name}, {own.device}",
                remedy=f"a calibration of {own.device}, or a cluster file whose device is {given.device}",
            )
        ]
    )


def unmeasured(plan: Plan, meter: ClusterMeter, stations: Iterable[Station]) -> list[str]:
    """What the calibration has no seconds for, each once."""
    found = dict.fromkeys(missing_link(meter.calibration) if any(plan.schedule.offloaded) else [])
    for station in (each for each in stations if each.original is None):
        for part in station.works.values():
            for work in part.values():
                found |= dict.fromkeys(missing(work, meter.calibration))
        for module, calls in station.calls_by_module.items():
            grid = plan.grid if module not in plan.encoders else plan.encoders[module].grid
            families = dict.fromkeys(call.family for call in calls)
            spans = {family: span(grid, family, meter.cluster.domain) for family in families}
            found |= dict.fromkeys(missing_calls(calls, spans, meter.calibration))
    return list(found)
