"""The simulated timeline of a step: segments take time in proportion to their FLOPs on a rank.

The unit of time is the shortest forward of a segment of the language model. Encoders take the time of the
fullest micro-batch: every sample has as many items and patches as its module allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from braid.planning.modules import ModulePlan, whole_encoder
from braid.planning.plan import Plan, backward_flops, inner_phases, phase_flops, whole_model
from braid.schedule import Act, Costs, Op, Timeline, simulate
from braid.schedule.graph import LANGUAGE
from braid.schedule.simulate import PHASES

PhaseCosts = Mapping[str, float]
"""The duration of the forward of each phase, by name or kind."""


def simulated_timeline(plan: Plan) -> Timeline:
    """When each op of a step runs. A backward takes twice as long as its forward, a message no time."""
    costs = _language_costs(plan)
    if not plan.encoders:
        phases = {name: each for own in costs for name, each in own.items()}
        return simulate(plan.schedule, Costs(phases=phases, partly_frozen=_partly_frozen(plan, costs)))
    unit = _flops_per_unit(plan, costs)
    for encoder in plan.encoders.values():
        costs += _encoder_costs(plan, encoder, unit)
    return simulate(plan.schedule, Costs(phases=tuple(costs), partly_frozen=_partly_frozen(plan, costs)))


def _language_costs(plan: Plan) -> list[PhaseCosts]:
    """The costs of each segment of the language model. If its schedule interleaves phases, they have the
    simulator's fixed costs: FLOPs are known per block, not per phase."""
    if plan.run.mesh.overlap or plan.run.mesh.schedule != "auto":
        return [PHASES for _ in plan.layout.segments]
    flops = phase_flops(plan)
    unit = min((sum(segment.values()) for segment in flops if segment), default=1)
    return [{phase: count / unit for phase, count in segment.items()} for segment in flops]


def _partly_frozen(plan: Plan, costs: Sequence[PhaseCosts]) -> dict[int, float]:
    """The backward of each segment that is a single phase with frozen units: as long as the backwards of the
    phases that it combines."""
    owners = [LANGUAGE] * len(plan.layout.segments)
    owners += [name for name, each in plan.encoders.items() for _ in each.segments]
    tokens = {LANGUAGE: plan.run.data.sequence_tokens}
    tokens |= {name: each.module.most_patches for name, each in plan.encoders.items()}
    found: dict[int, float] = {}
    for segment, (phases, owner) in enumerate(zip(plan.schedule.phases, owners, strict=True)):
        if [phase.kind for phase in phases] != ["segment"] or not phases[0].frozen:
            continue
        model = whole_model(plan) if owner == LANGUAGE else whole_encoder(plan.encoders[owner])
        own = inner_phases(plan)[segment]
        forward = max(1, sum(model.phase_flops(phase, tokens[owner]) for phase in own))
        backward = backward_flops(model, own, tokens[owner])
        found[segment] = costs[segment]["segment"] * backward / forward
    return found


def _flops_per_unit(plan: Plan, costs: Sequence[PhaseCosts]) -> float:
    """FLOPs of a rank of the language model in a unit of time."""
    flops = sum(segment.forward for segment in plan.schedule.graph.segments[: len(costs)])
    units = sum(
        Costs(phases=own).of(Op(act=Act.F, segment=segment, phase=phase.name))
        for segment, own in enumerate(costs)
        for phase in plan.schedule.phases[segment]
    )
    return flops / units


def _encoder_costs(plan: Plan, encoder: ModulePlan, unit: float) -> Iterator[PhaseCosts]:
    """The costs of each segment of an encoder: its FLOPs on a rank, divided over its phases."""
    model, patches = whole_encoder(encoder), encoder.module.most_patches
    for segment in encoder.segments:
        flops = {phase.name: model.phase_flops(phase, patches) for phase in plan.schedule.phases[segment]}
        forward = plan.schedule.graph.segments[segment].forward / unit
        yield {name: forward * count / max(sum(flops.values()), 1) for name, count in flops.items()}
