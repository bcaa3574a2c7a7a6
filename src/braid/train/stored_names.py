"""Names of tensors in a checkpoint whose patterns have the same layers in other brackets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from braid.model.names import regrouped_names, renamed
from braid.pattern import parse
from braid.planning.plan import Plan
from braid.schedule.graph import LANGUAGE
from braid.train.module_state import ModuleState
from braid.train.stored_run import saved_models

Renames = Mapping[str, Mapping[str, str]]
"""For each module, the names that its layers have in a checkpoint of a pattern with other brackets."""


def renames_in(path: Path, plan: Plan) -> Renames:
    saved = saved_models(path)
    layouts = {LANGUAGE: plan.layout, **{name: each.layout for name, each in plan.encoders.items()}}
    return {
        name: regrouped_names(layout, parse(saved[name].pattern)) or {}
        for name, layout in layouts.items()
        if name in saved
    }


def stored_name(name: str, module: ModuleState, renames: Renames) -> str:
    """The name in a checkpoint of a tensor of a module."""
    return module.prefix + renamed(name, renames.get(module.name, {}))


def stored_tensor_name(name: str, plan: Plan, renames: Renames) -> str:
    """The same of a tensor by its full name."""
    module, prefix = next(
        ((module, each.prefix) for module, each in plan.encoders.items() if name.startswith(each.prefix)),
        (LANGUAGE, ""),
    )
    return prefix + renamed(name[len(prefix) :], renames.get(module, {}))
