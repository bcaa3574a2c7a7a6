"""plan(run, world) -> Plan: everything that follows from a run and a number of ranks.

Pure: no processes, no files, no devices. Either every rule holds and there is a Plan, or there is one
`ConfigError` with all problems in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from braid import schedule as schedules
from braid import validators
from braid.architecture import SHAPE_OF, Model
from braid.choices import BYTE_VOCAB, BYTES, MAIN_BYTES
from braid.config import Mesh, Run, type_problems
from braid.errors import ConfigError, Problem, ScheduleError
from braid.model import declaration
from braid.model.declaration import Form, form_of
from braid.pattern import Kind, Layout, PatternError, Stage, cut, joined, parse
from braid.planning import divisibility
from braid.planning.divisibility import Sizes
from braid.schedule import Schedule
from braid.schedule.lowering import POLICIES, RESIDENT, lowered
from braid.schedule.phases import Unit
from braid.schedule.recompute import dropped_tensors, with_replays
from braid.topology import Grid, standard, standard_problems

if TYPE_CHECKING:
    from braid.model.language import LanguageModel, Size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a number of ranks, worked out."""

    run: Run
    world: int
    """Ranks."""
    axes: Sizes
    """How many ranks there are along each axis."""
    grid: Grid
    """Which ranks these are."""
    layout: Layout
    """The model's layers, cut into the segments that pipeline ranks hold."""
    stages: tuple[Stage, ...]
    """What each pipeline rank holds."""
    units: tuple[Unit, ...]
    """The weights of the model, as they are gathered, released and reduced together."""
    schedule: Schedule
    """What each pipeline rank does in a step: all of it, proved."""
    micro_batch_samples: int
    """Samples in one micro-batch, over all data-parallel ranks."""
    step_tokens: int
    """Tokens in one step, over all ranks."""


def plan(run: Run, world: int) -> Plan:
    """Work out the run, or raise a `ConfigError` with everything that is wrong with it. The schedule is proved
    before anybody sees it; one that breaks a rule is a `ScheduleError`."""
    problems = check(run, world)
    if problems:
        raise ConfigError(problems)
    axes, layout = divisibility.sizes(run.mesh, world), _layout(run)
    schedule = _lowered(_schedule(run, world, layout), run, world, layout, _form(run, world))
    stages = (schedule.held(rank) for rank in range(schedule.pp))
    return Plan(
        run=run,
        world=world,
        axes=axes,
        grid=standard(tp=axes.tp, cp=axes.cp, dp=axes.dp, pp=axes.pp, etp=axes.etp, ep=axes.ep),
        layout=layout,
        stages=tuple(
            Stage(rank=rank, segments=tuple(layout.segments[index] for index in held))
            for rank, held in enumerate(stages)
        ),
        units=declaration.units(layout, _form(run, world)),
        schedule=schedule,
        micro_batch_samples=run.train.batch_samples // run.train.micro_batches,
        step_tokens=run.train.batch_samples * run.data.sequence_tokens,
    )


def evaluation_schedule(plan: Plan, micro_batches: int) -> Schedule:
    """What every pipeline rank does in an evaluation of so many micro-batches: forwards alone, without MTP."""
    form = replace(_form(plan.run, plan.world), whole=plan.world == 1, fine=False, training=False)
    built = schedules.evaluation(plan.schedule.holder, micro_batches)
    built = schedules.in_phases(built, declaration.chains(plan.layout, form))
    return _lowered(built, plan.run, plan.world, plan.layout, form)


def _layout(run: Run) -> Layout:
    """The layers of a run, cut into the segments that pipeline ranks hold. One rank holds one segment, whatever
    the pattern says."""
    parsed = parse(run.model.pattern)
    return joined(parsed) if run.mesh.pp == 1 else cut(parsed, _pieces(run.mesh))


def _pieces(mesh: Mesh) -> int:
    """Into how many segments a pattern without `|` is cut."""
    return 2 * mesh.pp if mesh.schedule == schedules.DUAL_PIPE_V and mesh.pp > 1 else mesh.pp


def _form(run: Run, world: int) -> Form:
    """As coarse as can be: every phase costs the host some time. In a pipeline, what has returned from experts
    is summed on the communication stream: ranks that wait for one another would have it in their way."""
    mesh = run.mesh
    fine = mesh.overlap or mesh.schedule == schedules.DUAL_PIPE_V
    return form_of(
        run.model,
        run.train.dtype,
        whole=world == 1 and not fine and not run.train.recompute,
        fine=fine,
        posts=mesh.pp == 1,
        late_weights=mesh.late_weights,
    )


def _schedule(run: Run, world: int, layout: Layout) -> Schedule:
    """1F1B, interleaved where a rank holds several segments, the overlapped form of either, or DualPipeV. What
    is not kept is recomputed, and an embedding of two stages is summed."""
    mesh, micro_batches = run.mesh, run.train.micro_batches
    options = schedules.Options(
        delayed=mesh.delay_weights,
        early_release=mesh.early_release,
        paired_ends=mesh.paired_ends,
    )
    chains = declaration.chains(layout, _form(run, world))
    if mesh.schedule == schedules.DUAL_PIPE_V:
        built = schedules.dual_pipe_v(
            chains, pp=mesh.pp, micro_batches=micro_batches, overlap=mesh.overlap, options=options
        )
    elif mesh.overlap:
        built = schedules.overlapped(chains, pp=mesh.pp, micro_batches=micro_batches, options=options)
    else:
        virtual = len(layout.segments) // mesh.pp
        name = "1f1b" if virtual == 1 else "interleaved"
        built = schedules.build(name, pp=mesh.pp, virtual=virtual, micro_batches=micro_batches)
        built = schedules.in_phases(built, chains)
    span, hyper = span_of(run, layout), run.model.hyper is not None
    dropped = dropped_tensors(layout, built.phases, run.train.recompute, span, hyper=hyper)
    built = with_replays(built, run.train.recompute, dropped)
    shared = run.model.tied or bool(layout.mtp)
    return schedules.with_sums(built, {"embedding": (built.holder[0], built.holder[-1])} if shared else {})


def _lowered(schedule: Schedule, run: Run, world: int, layout: Layout, form: Form) -> Schedule:
    """The schedule with all that ranks do about their weights, and proved."""
    policy = RESIDENT if world == 1 else POLICIES[run.mesh.shard]
    meshes = {unit.path: unit.mesh for unit in declaration.units(layout, form)}
    whole = lowered(schedule, meshes, policy)
    if faults := schedules.check(whole).faults:
        raise ScheduleError(faults)
    return whole


def span_of(run: Run, layout: Layout) -> int:
    """Blocks between streams that are kept, where hyper-connections are recomputed. Where nobody says, as many
    as hold the least at once: the streams between spans, and what one span makes again."""
    hyper, dtype = run.model.hyper, run.train.dtype
    if run.train.recompute_span or hyper is None:
        return max(run.train.recompute_span, 1)
    from braid.kernels.hyper_connection import activation_bytes

    narrow, wide = BYTES[dtype], MAIN_BYTES[dtype]
    streams = hyper.streams * run.model.hidden * narrow
    again = activation_bytes.fused(1, hyper.streams, run.model.hidden, narrow=narrow, wide=wide)
    blocks = max((len(segment.blocks) for segment in layout.segments), default=1)
    layers = len(layout.layers) / max(len(layout.blocks), 1)
    held = {span: -(-blocks // span) * streams + span * layers * again for span in range(1, blocks + 1)}
    return min(held, key=lambda span: held[span], default=1)


def size(plan: Plan) -> Size:
    """The model's weights, counted by building it without memory for them."""
    return whole_model(plan).size()


def whole_model(plan: Plan) -> LanguageModel:
    """The model as one process would have it, without memory for its weights: to count, and for its names."""
    import torch

    from braid.kernels import references
    from braid.model.language import LanguageModel

    return LanguageModel(plan.run.model, plan.layout, references(), device=torch.device("meta"))


def phase_flops(plan: Plan) -> list[dict[str, int]]:
    """For each segment, the operations of the forward of one row in its phases that compute, by their names.
    Phases of a block with experts that run beside others have none here: only blocks as a whole are counted."""
    model, tokens = whole_model(plan), plan.run.data.sequence_tokens
    return [
        {phase.name: flops for phase in phases if (flops := model.phase_flops(phase, tokens))}
        for phases in plan.schedule.phases
    ]


def check(run: Run, world: int) -> list[Problem]:
    """Every problem of the run, in the order of its fields."""
    wrong = list(type_problems(run))
    if wrong:
        return wrong  # rules need values that can be compared
    between = (_layers(run.model, run.mesh), _vocab(run), _ranks(run, world), _steps(run), _recompute(run))
    return [*run.problems(), *(problem for rule in between for problem in rule)]


def _recompute(run: Run) -> Iterator[Problem]:
    """DeepEP gives rows in an order of its own every time that it sends them."""
    whole = {"block", "full"} & set(run.train.recompute)
    if whole and run.mesh.dispatcher == "deep_ep" and run.mesh.ep * run.mesh.etp > 1:
        rule = "rows that DeepEP sends again may arrive in another order: blocks it serves cannot be recomputed"
        remedy = f"train.recompute without {' and '.join(sorted(whole))}, or mesh.dispatcher to all_to_all"
        yield Problem(field="train.recompute", value=run.train.recompute, rule=rule, remedy=remedy)
    if "hyper" in run.train.recompute and run.model.hyper is None:
        rule = "the model has no hyper-connections that could be recomputed: model.hyper is None"
        rest = " ".join(name for name in run.train.recompute if name != "hyper") or "()"
        remedy = f"{rest}, or model.hyper in the recipe"
        yield Problem(field="train.recompute", value=run.train.recompute, rule=rule, remedy=remedy)


def _layers(model: Model, mesh: Mesh) -> Iterator[Problem]:
    """The pattern, and a shape for every kind of layer in it."""
    try:
        layout = parse(model.pattern)
        if _pieces(mesh) > mesh.pp:
            yield from _folded(model, layout, mesh)
        elif mesh.pp >= 1:
            cut(layout, mesh.pp)
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


def _folded(model: Model, layout: Layout, mesh: Mesh) -> Iterator[Problem]:
    """A fold has two segments for each rank: the text's own, or equal ones."""
    pieces, found = _pieces(mesh), len(layout.segments)
    if found == 1:
        try:
            cut(layout, pieces)
        except PatternError:
            told = f"the pattern has no |, and its blocks cannot be split into {pieces} equal segments"
        else:
            return
    elif found == pieces:
        return
    else:
        told = f"the pattern has {found}"
    yield Problem(
        field="model.pattern",
        value=model.pattern,
        rule=f"mesh.schedule {mesh.schedule} gives two segments to each of mesh.pp ({mesh.pp}) ranks: {told}",
        remedy=f"{pieces} segments, with | between them, or mesh.schedule to auto",
    )


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
    """Ranks along every axis, and equal parts for all of them."""
    broken = [*validators.at_least("world", world, 1), *run.mesh.problems("mesh")]
    yield from validators.at_least("world", world, 1)
    if broken:
        return
    mesh = run.mesh
    others = mesh.tp * mesh.cp * mesh.pp
    if world % others:
        yield from validators.multiple_of("world", world, others, "mesh.tp times mesh.cp times mesh.pp")
        return
    axes = divisibility.sizes(mesh, world)
    outside = list(
        standard_problems(
            tp=mesh.tp, cp=mesh.cp, dp=axes.dp, pp=mesh.pp, etp=mesh.etp, ep=mesh.ep, prefix="mesh."
        )
    )
    yield from outside
    if not outside:
        yield from divisibility.problems(run, _kinds(run.model), axes)


def _kinds(model: Model) -> frozenset[Kind]:
    """The kinds of layers in the pattern; none where it cannot be read, which is a problem of its own."""
    try:
        return parse(model.pattern).kinds()
    except PatternError:
        return frozenset()


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
