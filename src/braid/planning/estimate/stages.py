"""estimate(plan) -> Estimate: peak memory and collective traffic of every pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from braid.model.language import LanguageModel
from braid.nn.cost import Call, Workload
from braid.planning.estimate.memory import Memory, Step, memory_of
from braid.planning.estimate.moments import activations
from braid.planning.estimate.rank import first_rank, model_of, workload_of
from braid.planning.estimate.weights import copy_calls, held_units, peak_gathered, sharding_calls
from braid.planning.plan import Plan
from braid.schedule import Act, live_peaks


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """Estimate for the rank of a pipeline stage with the largest shards; uneven shards make others smaller."""

    stage: int
    layers: str
    """The pattern of its layers."""
    weights: int
    """Parameters of this rank before FSDP sharding."""
    live: int
    """Maximum number of live micro-batches."""
    memory: Memory
    calls: tuple[Call, ...]
    """Collectives of one step, identical ones merged."""
    sends: int
    """Bytes sent to other stages in one step."""

    @property
    def sent(self) -> dict[str, int]:
        """Bytes sent by the rank in one step, by group family."""
        totals: dict[str, int] = {}
        for call in self.calls:
            totals[call.family] = totals.get(call.family, 0) + call.sent
        return totals | ({"pp": totals.get("pp", 0) + self.sends} if self.sends else {})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimates of all stages of a plan."""

    plan: Plan
    device: str
    """`cuda` or `cpu`."""
    stages: tuple[StageEstimate, ...]

    @property
    def peak(self) -> int:
        """Peak memory in bytes, over all stages."""
        return max(stage.memory.peak for stage in self.stages)


def estimate(plan: Plan, device: str = "cuda") -> Estimate:
    """Memory and communication of every stage of a plan on a `device` (`cuda` or `cpu`)."""
    live, workload = live_peaks(plan.schedule), workload_of(plan, device)
    stages = (_stage(plan, stage, live[stage], workload, device) for stage in range(plan.axes.pp))
    return Estimate(plan=plan, device=device, stages=tuple(stages))


def _stage(plan: Plan, stage: int, live: int, workload: Workload, device: str) -> StageEstimate:
    run, model = plan.run, model_of(plan, first_rank(plan, stage), device)
    costs, units, ops = model.costs(workload), held_units(model, plan, stage), plan.schedule.ops[stage]
    micro_batches, segments = run.train.micro_batches, plan.stages[stage].segments
    step = Step(
        single=plan.grid.size == 1,
        strategy=run.mesh.shard,
        micro_batches=micro_batches,
        activations=activations(plan, stage, costs),
        gathered=peak_gathered(units, ops),
        whole=any(phase.kind == "segment" for phases in plan.schedule.phases for phase in phases),
    )
    calls = [call for cost in costs.values() for call in cost.times(micro_batches).calls]
    if plan.grid.size > 1:
        calls += sharding_calls(units, ops)
        calls += copy_calls(model, plan)
    return StageEstimate(
        stage=stage,
        layers="|".join(str(segment) for segment in segments),
        weights=sum(parameter.numel() for parameter in model.parameters()),
        # `live_peaks` counts forwards of segments; a micro-batch has one for each segment of the rank.
        live=-(-live // plan.schedule.virtual),
        memory=memory_of(units, costs, step),
        calls=tuple(_merge(calls)),
        sends=_sends(plan, stage, workload, model),
    )


def _merge(calls: Iterable[Call]) -> Iterable[Call]:
    """Merge identical calls, in the order of their first occurrence."""
    totals: dict[Call, int] = {}
    for call in calls:
        kind = call._replace(times=0)
        totals[kind] = totals.get(kind, 0) + call.times
    return (kind._replace(times=times) for kind, times in totals.items())


def _sends(plan: Plan, stage: int, workload: Workload, model: LanguageModel) -> int:
    """Bytes of activations and their gradients that the schedule sends to other stages."""
    count = sum(op.act in (Act.SEND_F, Act.SEND_B) for op in plan.schedule.ops[stage])
    return count * workload.local_tokens(model.groups.tp_cp) * prod(model.shape.stream) * workload.narrow
