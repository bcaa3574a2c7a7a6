"""Starting from a checkpoint (`--init`): settings are checked, and the origin of every tensor is planned.

`start_from` raises an error with all differences, or returns a plan that `state.load_state_weights` reads and
`plan_lines` prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from braid.architecture import Model
from braid.checkpoint import StoredTensor
from braid.errors import CheckpointError, ConfigError
from braid.lora import Lora
from braid.model.names import MODULES, split_module
from braid.nn.dtypes import DTYPES
from braid.planning.plan import Plan, canonical_names
from braid.schedule.graph import LANGUAGE
from braid.train import state as states
from braid.train import stored_run
from braid.train.encoder_checkpoint import saved_encoders
from braid.train.finetune import (
    check_settings,
    fresh_module,
    other_layers,
    pattern_problems,
    suggested_rules,
)
from braid.train.lora_weights import is_adapter
from braid.train.surgery import (
    FRESH,
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
    modules: Mapping[str, Path] = field(default_factory=dict)
    """Encoders that start from checkpoints of their own, by the name of the module in both."""


SAME_MODEL = InitOptions()
"""Everything must match."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start that has been checked."""

    plan: InitPlan
    record: dict[str, Any]
    """For the manifest: `from`, `rules`, `modules`, and the `allowed` settings with both values."""
    modules: Mapping[str, Path] = field(default_factory=dict)
    """Checkpoints of modules that do not start from that of the language model."""

    def loads(self, path: Path) -> Iterator[tuple[Path, InitPlan]]:
        """Each checkpoint with the plan of what is read from it; `path` is that of the language model. To a
        load, what comes from elsewhere is fresh: it stays as it is."""
        owner = {f"{MODULES}{name}.": own for name, own in self.modules.items()}
        for source in (path, *self.modules.values()):
            origins = {
                name: origin if owner.get(split_module(name)[0], path) == source else FRESH
                for name, origin in self.plan.origins.items()
            }
            yield source, replace(self.plan, origins=origins)


def start_from(path: Path, plan: Plan, options: InitOptions) -> Start:
    """Where the tensors of a planned run come from, or an error with everything that does not match."""
    modules = _module_checkpoints(plan, options)
    stored, every = stored_in(path, modules), canonical_names(plan)
    # Adapters of another run of the same shape go on; beside other weights they begin anew.
    begun = frozenset(name for name in every if is_adapter(name) and name not in stored)
    wanted = {name: shape for name, shape in every.items() if name not in begun}
    shapes = states.shapes_of(stored)
    allowed: dict[str, tuple[Any, Any]] = {}
    if transfer := _transfer(path, plan, shapes, wanted, options.rules, modules):
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
    _check_scale(path, plan.run.train.lora, planned)
    record: dict[str, Any] = {
        "from": str(path),
        "rules": [str(rule) for rule in options.rules],
        "allowed": {name: [str(value) for value in values] for name, values in allowed.items()},
    }
    record |= {"modules": {name: str(each) for name, each in modules.items()}} if modules else {}
    planned = replace(planned, origins={**planned.origins, **dict.fromkeys(begun, FRESH)})
    return Start(plan=planned, record=record, modules=modules)


def _check_scale(path: Path, lora: Lora, planned: InitPlan) -> None:
    """Refuse adapters that would be multiplied by another number than the one they were trained with."""
    if not any(is_adapter(name) and isinstance(origin, Stored) for name, origin in planned.origins.items()):
        return
    before = stored_run.describe(path).run.train.lora
    if before.rank and before.scale != lora.scale:
        raise CheckpointError(
            f"{path} has adapters that are multiplied by {before.scale:g}, which is train.lora.alpha / "
            f"train.lora.rank; the run multiplies them by {lora.scale:g}\n"
            "  rule  adapters go on as they were trained\n"
            f"  set   train.lora.alpha {before.scale * lora.rank:g}"
        )


def _module_checkpoints(plan: Plan, options: InitOptions) -> dict[str, Path]:
    """The checkpoints of `--init-modules`, each with the module that it is to be for."""
    found = {}
    for name, given in options.modules.items():
        path = states.resolve_checkpoint(given)
        if name not in plan.encoders:
            held = ", ".join(plan.encoders) or "none"
            raise ConfigError(f"--init-modules {name}={given}: the modules of the run are: {held}")
        if name not in (encoders := saved_encoders(path)):
            held = ", ".join(encoders) or "none"
            raise CheckpointError(
                f"--init-modules {name}={given}: the modules of this checkpoint are: {held}\n"
                f"  set   a checkpoint with a module {name}, or the same name for the module of the run"
            )
        found[name] = path
    return found


def stored_in(path: Path, modules: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """The weights of a checkpoint, those of some modules from checkpoints of their own."""
    prefixes = tuple(f"{MODULES}{name}." for name in modules)
    found = {name: each for name, each in states.stored_weights(path).items() if not name.startswith(prefixes)}
    for name, own in modules.items():
        every = states.stored_weights(own)
        found |= {each: every[each] for each in every if each.startswith(f"{MODULES}{name}.")}
    return found


def _transfer(
    path: Path,
    plan: Plan,
    stored: Shapes,
    wanted: Shapes,
    rules: Sequence[Rule],
    modules: Mapping[str, Path],
) -> Transfer | None:
    """The models of a checkpoint and of a run; None for a checkpoint without settings."""
    saved = stored_run.saved_models(path)
    for name, own in modules.items():
        encoder = saved_encoders(own)[name]
        if not any(each.startswith(f"{MODULES}{name}.projector.") for each in stored):
            # An encoder by itself says nothing of how its features are joined and projected.
            chosen = plan.run.modules[name].model
            encoder = replace(encoder, group=chosen.group, projector=chosen.projector)
        saved[name] = encoder
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
    stored, wanted = stored_in(path, start.modules), canonical_names(plan)
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
