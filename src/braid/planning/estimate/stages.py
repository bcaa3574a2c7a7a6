"""estimate(plan) -> Estimate: memory and communication of every pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from braid.model.language import LanguageModel
from braid.nn.cost import Call, Portion
from braid.planning.estimate.memory import Memory, Step, memory_of
from braid.planning.estimate.moments import activations
from braid.planning.estimate.rank import first_rank, model_of, portion_of
from braid.planning.estimate.weights import copy_calls, held_units, most_gathered, sharding_calls
from braid.planning.plan import Plan
from braid.schedule import Act, live_peaks


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """One rank of a pipeline stage, the one that holds most; the others hold as much or a little less."""

    stage: int
    layers: str
    """The pattern of its layers."""
    weights: int
    """Weights that its layers compute with on this rank, sharded or not."""
    live: int
    """Micro-batches under way at the same time."""
    memory: Memory
    calls: tuple[Call, ...]
    """Collective calls in one step, equal ones together."""
    sends: int
    """Bytes that it sends to other stages in one step."""

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that leave the rank in one step, by family."""
        totals: dict[str, int] = {}
        for call in self.calls:
            totals[call.family] = totals.get(call.family, 0) + call.sent
        return totals | ({"pp": totals.get("pp", 0) + self.sends} if self.sends else {})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Every stage of a plan."""

    plan: Plan
    device: str
    """`cuda` or `cpu`."""
    stages: tuple[StageEstimate, ...]

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(stage.memory.peak for stage in self.stages)


def estimate(plan: Plan, device: str = "cuda") -> Estimate:
    """What every stage of a plan holds and sends, where its ranks compute on a `device`."""
    live, portion = live_peaks(plan.schedule), portion_of(plan, device)
    stages = (_stage(plan, stage, live[stage], portion, device) for stage in range(plan.axes.pp))
    return Estimate(plan=plan, device=device, stages=tuple(stages))


def _stage(plan: Plan, stage: int, live: int, portion: Portion, device: str) -> StageEstimate:
    run, model = plan.run, model_of(plan, first_rank(plan, stage), device)
    costs, units, ops = model.costs(portion), held_units(model, plan, stage), plan.schedule.ops[stage]
    micro_batches, segments = run.train.micro_batches, plan.stages[stage].segments
    step = Step(
        alone=plan.world == 1,
        strategy=run.mesh.shard,
        micro_batches=micro_batches,
        activations=activations(plan, stage, costs),
        gathered=most_gathered(units, ops),
        whole=any(phase.kind == "segment" for phases in plan.schedule.phases for phase in phases),
    )
    calls = [call for cost in costs.values() for call in cost.times(micro_batches).calls]
    if plan.world > 1:
        calls += sharding_calls(units, ops)
        calls += copy_calls(model, plan)
    return StageEstimate(
        stage=stage,
        layers="|".join(str(segment) for segment in segments),
        weights=sum(parameter.numel() for parameter in model.parameters()),
        # A live forward is that of one segment; a rank with several holds as many parts of a micro-batch.
        live=-(-live // plan.schedule.virtual),
        memory=memory_of(units, costs, step),
        calls=tuple(_together(calls)),
        sends=_sends(plan, stage, portion, model),
    )


def _together(calls: Iterable[Call]) -> Iterable[Call]:
    """Equal calls as one, in the order in which they come first."""
    totals: dict[Call, int] = {}
    for call in calls:
        kind = call._replace(times=0)
        totals[kind] = totals.get(kind, 0) + call.times
    return (kind._replace(times=times) for kind, times in totals.items())


def _sends(plan: Plan, stage: int, portion: Portion, model: LanguageModel) -> int:
    """Activations and their gradients, as the schedule sends them to other stages."""
    count = sum(op.act in (Act.SEND_F, Act.SEND_B) for op in plan.schedule.ops[stage])
    return count * portion.places(model.groups.tp_cp) * prod(model.shape.stream) * portion.narrow
