"""Where ranks share weights and a schedule goes into phases: the schedule gathers, releases and reduces by ops
of its own, and FSDP2's hooks have a rest until the step is done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from braid.config import Run
from braid.engine.sharding import Driver, named_units, units_of_phases
from braid.model.language import LanguageModel
from braid.schedule import Schedule
from braid.schedule.lifetime import Uses
from braid.schedule.lowering import POLICIES, Sharding, lower, uses_of_phases


@dataclass(frozen=True, kw_only=True)
class Driving:
    """Who drives the weights of a model, and the schedule that says how."""

    driver: Driver
    schedule: Schedule
    """With the ops about units, for this rank alone."""
    uses: Uses


def driving(model: LanguageModel, schedule: Schedule, run: Run) -> Driving | None:
    """None where nobody need drive: weights are not shared, or ops are about whole segments."""
    units = named_units(model, model.units()) if schedule.phases else {}
    if not units:
        return None
    rank, moe = model.groups.pp.rank, run.model.moe
    phases = [phase for segment in schedule.phases for phase in segment]
    latent = moe is not None and bool(moe.latent)
    uses = uses_of_phases(units_of_phases(units, phases, tied=run.model.tied, latent=latent), unread={"embed"})
    meshes = {name: unit.mesh for name, unit in units.items()}
    sharding = Sharding(units=meshes, uses=uses, policy=POLICIES[run.mesh.shard])
    own = lower(schedule.ops[rank], sharding, rank)
    lists = tuple(own if each == rank else () for each in range(schedule.pp))
    return Driving(driver=Driver(model, units), schedule=replace(schedule, ops=lists), uses=uses)
