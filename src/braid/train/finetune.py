"""Fine-tuning checks: compares a run's model settings with those of the checkpoint it starts from.

Matching tensor names and shapes do not make the same model. With another RoPE base, norm epsilon, attention
window or top-k the same weights compute another function, and training silently starts from a worse loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from braid.architecture import SHAPE_OF, Model, Trunk
from braid.config import flatten
from braid.errors import CheckpointError, ConfigError, Problem
from braid.model.names import MODULES, symbols
from braid.pattern import Kind, Layout, parse
from braid.train.surgery import Rule, block_sources

FREE_SETTINGS = (
    # Initialisation, which the checkpoint's weights replace.
    "model.init_std",
    # Noise and token dropping, which apply in training only.
    "model.dropout",
    "model.moe.jitter",
    "model.moe.capacity_factor",
    "model.moe.drop",
    "model.moe.pad_to_capacity",
    # Auxiliary losses, and the step size of selection biases.
    "model.mtp_loss",
    "model.moe.aux_loss",
    "model.moe.sequence_aux_loss",
    "model.moe.global_aux_loss",
    "model.moe.z_loss",
    "model.moe.selection_bias_rate",
    # Precision, like `train.dtype`.
    "model.moe.router_dtype",
)
"""Model settings that a fine-tuning run may change, because they do not affect what trained weights compute.
All others must match the checkpoint, unless a rule of `surgery` changes them or they are allowed by name.
`model.moe.routing` must match too: sinkhorn applies in training only, but round_robin applies always. For a
module they are the same: `modules.vision.model.init_std`."""

FREE_OF_ENCODERS = ("model.positions.jitter",)
"""The same of an encoder: noise, which applies in training only."""

RULES_OF_SETTINGS = MappingProxyType({"model.tied": "untie", "model.hyper": "hyper", "model.vocab": "vocab"})
"""The rule of `surgery` that changes a setting, in one direction each."""


def check_settings(
    path: Path,
    saved: Model,
    chosen: Model,
    rules: Sequence[Rule] = (),
    allow: Collection[str] = (),
    modules: Mapping[str, tuple[Trunk, Trunk]] = MappingProxyType({}),
) -> dict[str, tuple[Any, Any]]:
    """Reject a model that would compute another function with the weights of the checkpoint at `path`, unless
    a rule or a setting's name in `allow` permits it; likewise each of `modules`, of checkpoint and run. Returns
    the settings that `allow` let pass, with the values of checkpoint and run."""
    pairs: dict[str, tuple[Trunk, Trunk]] = {"model": (saved, chosen)}
    pairs |= {f"modules.{name}.model": models for name, models in modules.items()}
    known = {name for at, models in pairs.items() for model in models for name in flatten(model, at)}
    patterns = [f"{at}.pattern" for at in pairs if f"{at}.pattern" in allow]
    if unknown := [*sorted(set(allow) - known), *patterns]:
        names = ", ".join(unknown)
        raise ConfigError(
            f"--init-allow {names}: names of settings such as model.attention.rope_base are allowed; "
            "another pattern needs a rule, see --init-rules"
        )
    problems = list(setting_problems(saved, chosen, rules, allow))
    for name, models in modules.items():
        problems += module_problems(name, *models, allow)
    if problems:
        count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
        summary = f"the model in {path} and that of the run differ in {count}"
        raise CheckpointError("\n".join([summary, *(str(problem) for problem in problems)]))
    differences = (each for at, models in pairs.items() for each in _used_differences(*models, at))
    return {name: (old, new) for name, old, new in differences if name in allow}


def setting_problems(
    saved: Model, chosen: Model, rules: Sequence[Rule] = (), allow: Collection[str] = ()
) -> Iterator[Problem]:
    """Every setting in which a run's model differs from the checkpoint's, with the checkpoint's value, unless
    a rule changes it or its name is allowed."""
    for rule, remedy in pattern_problems(parse(saved.pattern), parse(chosen.pattern), rules):
        yield Problem(field="model.pattern", value=chosen.pattern, rule=rule, remedy=remedy)
    given = {rule.name for rule in rules}
    if "upcycle" in given:
        yield from _upcycle_problems(saved, chosen)
    for name, old, new in _used_differences(saved, chosen):
        helpful = RULES_OF_SETTINGS.get(name) if _grows(old, new) else None
        if name in allow or helpful in given:
            continue
        other = f"--init-allow {name}" if helpful is None else f"--init-rules {helpful}"
        yield _other_setting(name, old, new, other)


def module_problems(name: str, saved: Trunk, chosen: Trunk, allow: Collection[str] = ()) -> Iterator[Problem]:
    """Every setting in which a module of a run differs from that of the checkpoint. Rules that map layers are
    for the language model: a module of other layers starts afresh."""
    at = f"modules.{name}.model"
    if other_layers(saved, chosen):
        rule = f"the checkpoint has the layers of {saved.pattern!r}"
        remedy = (
            f"{saved.pattern!r}; | and brackets may stand elsewhere. Or --init-rules {fresh_module(name)!r}"
        )
        yield Problem(field=f"{at}.pattern", value=chosen.pattern, rule=rule, remedy=remedy)
    for setting, old, new in _used_differences(saved, chosen, at):
        if setting not in allow:
            yield _other_setting(setting, old, new, f"--init-allow {setting}")


def other_layers(saved: Trunk, chosen: Trunk) -> bool:
    """Whether two patterns differ in more than brackets and segments."""
    return symbols(parse(saved.pattern)) != symbols(parse(chosen.pattern))


def fresh_module(name: str) -> str:
    """The rule that starts a module afresh."""
    return f"fresh:{MODULES}{name}.*"


def _other_setting(name: str, old: Any, new: Any, otherwise: str) -> Problem:
    rule = f"the weights of the checkpoint are those of a model with {old!r}"
    return Problem(field=name, value=new, rule=rule, remedy=f"{old!r}, or {otherwise}")


def suggested_rules(saved: Model, chosen: Model) -> list[str]:
    """The rules that the remedies of `setting_problems` name, `blocks` apart: that one needs a choice."""
    grown = [name for name, old, new in _used_differences(saved, chosen) if _grows(old, new)]
    found = [RULES_OF_SETTINGS[name] for name in grown if name in RULES_OF_SETTINGS]
    (before, *depths_before), (now, *depths_now) = symbols(parse(saved.pattern)), symbols(parse(chosen.pattern))
    if before != now and _upcycled(before, now):
        found.append("upcycle")
    if len(depths_before) != len(depths_now) or not all(map(str.__eq__, depths_before, depths_now)):
        found.append("mtp")
    return found


def _used_differences(saved: Trunk, chosen: Trunk, at: str = "model") -> Iterator[tuple[str, Any, Any]]:
    """Differences that matter, without the pattern: settings of layer kinds that one of the models does not
    have do not affect weights that both have. `at` is the name of the models in a run."""
    used = parse(saved.pattern).kinds() & parse(chosen.pattern).kinds()
    unused = [f"{at}.{name}" for kind, name in SHAPE_OF if kind not in used]
    free = [at + name.removeprefix("model") for name in (*FREE_SETTINGS, *FREE_OF_ENCODERS)]
    return _differences(saved, chosen, at, {f"{at}.pattern", *unused, *free})


def _grows(old: Any, new: Any) -> bool:
    """Whether a setting changes in the direction of its rule: a tied head unties, a plain stream gets
    hyper-connections, a vocabulary grows."""
    match old, new:
        case bool(), bool():
            return old and not new
        case None, _:
            return True
        case int(), int():
            return old < new
        case _:
            return False


def pattern_problems(saved: Layout, chosen: Layout, rules: Sequence[Rule] = ()) -> Iterator[tuple[str, str]]:
    """Rule and remedy where the layers of two patterns differ and no rule maps them. Brackets and segments may
    differ: layers keep their order."""
    given = {rule.name for rule in rules}
    (before, *depths_before), (now, *depths_now) = symbols(saved), symbols(chosen)
    same = _upcycled if "upcycle" in given else str.__eq__
    has = f"the checkpoint has the layers of {str(saved)!r}"
    blocks = next((rule for rule in rules if rule.name == "blocks"), None)
    if blocks is not None:
        yield from _block_problems(saved, chosen, blocks, same)
    elif not same(before, now):
        helpful = "upcycle" if _upcycled(before, now) else "blocks:0,1,-,2"
        yield has, f"{str(saved)!r}; | and brackets may stand elsewhere. Or --init-rules {helpful}"
    depths_match = len(depths_before) == len(depths_now) and all(map(same, depths_before, depths_now))
    if not depths_match and "mtp" not in given:
        yield f"{has}, with other MTP depths", f"{str(saved)!r}, or --init-rules mtp"


def _upcycled(before: str, now: str) -> bool:
    """Whether two stacks have the same layers, but for experts in place of a dense MLP."""
    pairs = {(Kind.MLP.value, Kind.MOE.value)}
    return len(before) == len(now) and all(a == b or (a, b) in pairs for a, b in zip(before, now, strict=True))


def _block_problems(
    saved: Layout, chosen: Layout, rule: Rule, same: Callable[[str, str], bool]
) -> Iterator[tuple[str, str]]:
    sources = block_sources(rule)
    if len(sources) != len(chosen.blocks):
        names = " ".join(map(str, chosen.blocks))
        remedy = f"--init-rules blocks: with one entry for each of {names}"
        yield f"it has {len(chosen.blocks)} blocks, {rule} names {len(sources)}", remedy
        return
    for block, source in zip(chosen.blocks, sources, strict=True):
        if source is None:
            continue
        if source >= len(saved.blocks):
            yield f"{rule} names block {source}", f"0 to {len(saved.blocks) - 1}: the blocks of {str(saved)!r}"
            continue
        before, now = ("".join(each.kind.value for each in b.layers) for b in (saved.blocks[source], block))
        if not same(before, now):
            rule_text = f"{rule} takes block {block.index} ({now}) from block {source} ({before})"
            yield rule_text, "a block of the same layers, or - for a fresh one"


def _upcycle_problems(saved: Model, chosen: Model) -> Iterator[Problem]:
    """Shapes in which experts cannot be copies of the dense MLP."""
    mlp, moe = saved.mlp, chosen.moe
    if mlp is None or moe is None:
        return
    rule = "experts are copies of the checkpoint's MLP (--init-rules upcycle)"
    for name in ("ffn", "activation", "glu"):
        if getattr(mlp, name) != getattr(moe, name):
            value, remedy = getattr(moe, name), repr(getattr(mlp, name))
            yield Problem(field=f"model.moe.{name}", value=value, rule=rule, remedy=remedy)
    if moe.latent:
        yield Problem(field="model.moe.latent", value=moe.latent, rule=rule, remedy="0")
    if mlp.bias and not moe.bias:
        yield Problem(field="model.moe.bias", value=False, rule=f"{rule}, which has biases", remedy="True")


def _differences(
    saved: Any, chosen: Any, path: str, ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, saved value, chosen value) of every field that differs and is not ignored."""
    if path in ignored:
        return
    if dataclasses.is_dataclass(saved) and type(saved) is type(chosen):
        for field in dataclasses.fields(saved):
            values = getattr(saved, field.name), getattr(chosen, field.name)
            yield from _differences(*values, f"{path}.{field.name}", ignored)
    elif saved != chosen:
        yield path, saved, chosen
