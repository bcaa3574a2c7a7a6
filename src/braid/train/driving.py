"""Where ranks share weights and a schedule goes into phases: the schedule gathers, releases and reduces by ops
of its own, and FSDP2's hooks have a rest until the step is done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from braid.config import Run
from braid.engine.sharding import Driver, lowered, named_units
from braid.model.language import LanguageModel
from braid.schedule import Schedule
from braid.schedule.lifetime import Uses


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
    rank = model.groups.pp.rank
    meshes = {name: unit.mesh for name, unit in units.items()}
    own, uses = lowered(schedule, rank, meshes, run.mesh.shard, tied=run.model.tied)
    lists = tuple(own if each == rank else () for each in range(schedule.pp))
    return Driving(driver=Driver(model, units), schedule=replace(schedule, ops=lists), uses=uses)
