"""Starting from a checkpoint (`--init`): settings are checked, and the origin of every tensor is planned.

`start_from` raises an error with all differences, or returns a plan that `state.load_state_weights` reads and
`plan_lines` prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from braid.architecture import Model
from braid.errors import CheckpointError
from braid.model.names import split_module
from braid.nn.dtypes import DTYPES
from braid.planning.plan import Plan, canonical_names
from braid.schedule.graph import LANGUAGE
from braid.train import state as states
from braid.train.finetune import (
    check_settings,
    fresh_module,
    other_layers,
    pattern_problems,
    suggested_rules,
)
from braid.train.surgery import (
    NO_EFFECT,
    InitPlan,
    Rule,
    Shapes,
    Stored,
    Transfer,
    accepting_rules,
    check_plan,
    parse_rules,
    plan_by_name,
    plan_init,
    with_fresh_modules,
)


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How a run starts from a checkpoint that is not exactly its model."""

    rules: Sequence[Rule] = ()
    """What maps tensors that differ."""
    allow: Sequence[str] = ()
    """Names of model settings that may differ, although that changes what the weights compute."""


SAME_MODEL = InitOptions()
"""Everything must match."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start that has been checked."""

    plan: InitPlan
    record: dict[str, Any]
    """For the manifest: `from`, `rules`, and the `allowed` settings with both values."""


def start_from(path: Path, plan: Plan, options: InitOptions) -> Start:
    """Where the tensors of a planned run come from, or an error with everything that does not match."""
    shapes, wanted = states.shapes_of(states.stored_weights(path)), canonical_names(plan)
    allowed: dict[str, tuple[Any, Any]] = {}
    if transfer := _transfer(path, plan, shapes, wanted, options.rules):
        models = transfer.saved, transfer.chosen
        try:
            allowed = check_settings(path, *models, options.rules, options.allow, transfer.loaded)
        except CheckpointError as error:
            raise CheckpointError("\n".join([str(error), *_tensors_too(transfer)])) from error
        planned = plan_init(transfer)
    elif options.rules or options.allow:
        raise CheckpointError(
            f"{path} has no model settings, which rules and allowed settings refer to: leave --init-rules and "
            "--init-allow out"
        )
    else:
        note = f"{path} has no model settings: only names and shapes of its tensors are checked"
        planned = with_fresh_modules(replace(plan_by_name(wanted), notes=(note,)), shapes)
    others = accepting_rules(planned, shapes, wanted)
    hints = [] if transfer is None else [f"set   {_command(options.rules, others)}"]
    check_plan(str(path), planned, shapes, wanted, hints=hints)
    record = {
        "from": str(path),
        "rules": [str(rule) for rule in options.rules],
        "allowed": {name: [str(value) for value in values] for name, values in allowed.items()},
    }
    return Start(
        plan=planned,
        record=record | {"allowed": {name: [str(v) for v in pair] for name, pair in allowed.items()}},
    )


def _transfer(path: Path, plan: Plan, stored: Shapes, wanted: Shapes, rules: Sequence[Rule]) -> Transfer | None:
    """The models of a checkpoint and of a run; None for a checkpoint without settings."""
    saved = states.saved_models(path)
    language = saved.get(LANGUAGE)
    if not isinstance(language, Model):
        return None
    held = {split_module(name)[0] for name in stored}
    both = [name for name, each in plan.encoders.items() if name in saved and each.prefix in held]
    return Transfer(
        saved=language,
        chosen=plan.run.model,
        stored=stored,
        wanted=wanted,
        rules=rules,
        modules={name: (saved[name], plan.run.modules[name].model) for name in both},
    )


def _tensors_too(transfer: Transfer) -> Iterator[str]:
    """What a refusal of settings says of tensors that would be refused next, with the rules that it names."""
    named = suggested_rules(transfer.saved, transfer.chosen)
    useful = [rule for rule in transfer.rules if rule.name in named or rule.name not in NO_EFFECT]
    rules = (*useful, *parse_rules([name for name in named if name not in {rule.name for rule in useful}]))
    if any(pattern_problems(*transfer.layouts, rules)):
        return
    others = [name for name, models in transfer.loaded.items() if other_layers(*models)]
    rules += parse_rules([fresh_module(name) for name in others])
    planned = plan_init(replace(transfer, rules=rules))
    if accepting := accepting_rules(planned, transfer.stored, transfer.wanted):
        yield f"tensors of other shapes or names need a rule, too\n  set   {_command(rules, accepting)}"


def _command(rules: Sequence[Rule], others: Sequence[str]) -> str:
    """The option with all rules, as a shell takes it."""
    return shlex.join(["--init-rules", *map(str, rules), *others])


def plan_lines(path: Path, plan: Plan, start: Start) -> Iterator[str]:
    """The plan as text: every tensor and its origin, with changes of dtype; then what is left out."""
    stored, wanted = states.stored_weights(path), canonical_names(plan)
    main = torch.promote_types(DTYPES[plan.run.train.dtype], torch.float32)
    width = max(map(len, wanted))
    for name, origin in start.plan.origins.items():
        change = ""
        if isinstance(origin, Stored) and stored[origin.name].dtype != main:
            change = f", {_dtype(stored[origin.name].dtype)} -> {_dtype(main)}"
        yield f"{name:<{width}}  {list(wanted[name])!s:<14} <- {origin}{change}"
    used = {origin.name for origin in start.plan.origins.values() if isinstance(origin, Stored)}
    for name in sorted(stored.keys() - used):
        yield f"{'(none)':<{width}}  {'':<14} <- {name}, left out"
    yield from start.plan.notes
    for name, (before, now) in start.record["allowed"].items():
        yield f"{name}: {before} -> {now}, allowed"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
