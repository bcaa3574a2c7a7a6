"""Which parameters a phase adds to the gradients of, where a process is alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from braid.config import Run
from braid.engine.sharding import units_of_phases
from braid.model import nodes
from braid.model.language import LanguageModel
from braid.schedule import Phase


def parameters_of_phases(model: LanguageModel, phases: Iterable[Phase], run: Run) -> dict[str, tuple[str, ...]]:
    """The names of the parameters of each phase, by its own name. What sums rows that have returned from
    experts is its phase's alone: that adds to it long before the rest of its block is through."""
    phases = list(phases)
    paths = {module: path for path, module in model.named_modules()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    beside = {
        phase.name: tuple(names.pop(each) for each in nodes.weights_that_join(model, phase))
        for phase in phases
        if phase.joins
    }
    meshes, held = {}, {}
    for unit in model.units():  # inner units come first
        path = paths[unit.module]
        meshes[path] = unit.mesh
        held[path] = [names.pop(each) for each in unit.module.parameters() if each in names]
    used = units_of_phases(meshes, phases, tied=run.model.tied)
    found = {name: tuple(each for path in units for each in held[path]) for name, units in used.items()}
    return found | beside
