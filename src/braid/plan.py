"""plan(run, world) -> Plan: everything that follows from a run and a number of ranks.

Pure: no processes, no files, no devices. Either every rule holds and there is a Plan, or there is one
`ConfigError` with all problems in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from braid import rules
from braid.architecture import SHAPE_OF, Model
from braid.config import Run, type_problems
from braid.errors import ConfigError, Problem
from braid.pattern import Kind, Layout, PatternError, Stage, cut, parse, stages

if TYPE_CHECKING:
    from braid.model.language import Size

BYTE_VOCAB = 257
"""Ids of the tokenizer `bytes`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a number of ranks, worked out."""

    run: Run
    world: int
    """Ranks."""
    dp: int
    """Data-parallel ranks: what the other axes leave over."""
    layout: Layout
    """The model's layers, cut into the segments that pipeline ranks hold."""
    stages: tuple[Stage, ...]
    """What each pipeline rank holds."""
    micro_batch_samples: int
    """Samples in one micro-batch, over all data-parallel ranks."""
    step_tokens: int
    """Tokens in one step, over all ranks."""


def plan(run: Run, world: int) -> Plan:
    """Work out the run, or raise a `ConfigError` with everything that is wrong with it."""
    problems = check(run, world)
    if problems:
        raise ConfigError(problems)
    layout = cut(parse(run.model.pattern), run.mesh.pp)
    return Plan(
        run=run,
        world=world,
        dp=world // run.mesh.pp,
        layout=layout,
        stages=stages(layout, run.mesh.pp),
        micro_batch_samples=run.train.batch_samples // run.train.micro_batches,
        step_tokens=run.train.batch_samples * run.data.sequence_tokens,
    )


def size(plan: Plan) -> Size:
    """The model's weights, counted by building it without memory for them."""
    import torch

    from braid.kernels import references
    from braid.model.language import LanguageModel

    return LanguageModel(plan.run.model, plan.layout, references(), device=torch.device("meta")).size()


def check(run: Run, world: int) -> list[Problem]:
    """Every problem of the run, in the order of its fields."""
    wrong = list(type_problems(run))
    if wrong:
        return wrong  # rules need values that can be compared
    return [*run.problems(), *_layers(run.model, run.mesh.pp), *_vocab(run), *_ranks(run, world), *_steps(run)]


def _layers(model: Model, pp: int) -> Iterator[Problem]:
    """The pattern, and a shape for every kind of layer in it."""
    try:
        layout = parse(model.pattern)
        if pp >= 1:
            cut(layout, pp)
    except PatternError as error:
        caret = f"{error.text}\n{' ' * error.position}^".replace("\n", "\n        ")
        yield Problem(
            field="model.pattern",
            value=model.pattern,
            rule=f"{error.rule}\n        {caret}",
            remedy="a pattern that `braid pattern` accepts",
        )
        return
    if not layout.kinds():
        rule = "a model has at least one layer"
        yield Problem(field="model.pattern", value=model.pattern, rule=rule, remedy="a pattern such as [*-]")
    yield from _shapes(model, layout.kinds())


def _shapes(model: Model, kinds: frozenset[Kind]) -> Iterator[Problem]:
    shape_of = dict(SHAPE_OF)
    for kind in sorted(kinds, key=lambda kind: kind.value):
        if kind not in shape_of:
            name = kind.name.lower().replace("_", " ")
            yield Problem(
                field="model.pattern",
                value=model.pattern,
                rule=f"{kind.value} ({name}) can be parsed but not built by this version",
                remedy="layers out of " + " ".join(k.value for k in shape_of),
            )
        elif getattr(model, shape_of[kind]) is None:
            yield Problem(
                field=f"model.{shape_of[kind]}",
                value=None,
                rule=f"the pattern {model.pattern!r} has {kind.value}, which needs a shape",
                remedy=f"{shape_of[kind]}={shape_of[kind].title().replace('_', '')}(...) in the recipe",
            )


def _vocab(run: Run) -> Iterator[Problem]:
    if run.data.tokenizer == "bytes" and run.model.vocab < BYTE_VOCAB:
        yield Problem(
            field="model.vocab",
            value=run.model.vocab,
            rule=f"the tokenizer `bytes` has {BYTE_VOCAB} ids: the bytes and the end of a document",
            remedy=f"{BYTE_VOCAB} or more",
        )


def _ranks(run: Run, world: int) -> Iterator[Problem]:
    yield from rules.at_least("world", world, 1)
    pp = run.mesh.pp
    if world < 1 or pp < 1:
        return
    yield from rules.multiple_of("world", world, pp, "mesh.pp")
    dp = world // pp
    if world % pp == 0 and dp > 1 and run.train.micro_batches >= 1:
        yield from rules.multiple_of(
            "train.batch_samples",
            run.train.batch_samples,
            dp * run.train.micro_batches,
            "data-parallel ranks times train.micro_batches",
        )


def _steps(run: Run) -> Iterator[Problem]:
    falling = run.optim.decay_steps if run.optim.schedule == "wsd" else 0
    used = run.optim.warmup_steps + falling
    if used > run.train.steps >= 1:
        yield Problem(
            field="optim.warmup_steps",
            value=run.optim.warmup_steps,
            rule=f"warm-up and decay take {used} steps, the run has train.steps ({run.train.steps})",
            remedy=f"at most {max(0, run.train.steps - falling)}, or train.steps to {used} or more",
        )
