"""plan(run, world) -> Plan: everything derived from a run and a world size.

Pure: no processes, no files, no devices. Returns a Plan if every rule holds; otherwise raises one `ConfigError`
with all problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from braid import schedule as schedules
from braid import validators
from braid.architecture import Model
from braid.choices import BYTES, MAIN_BYTES, Dtype
from braid.config import Mesh, Run, type_problems
from braid.errors import ConfigError, Problem, ScheduleError
from braid.model import declaration
from braid.model.declaration import Form, form_of
from braid.pattern import Layout, PatternError, Stage, cut, parse
from braid.planning import divisibility, layouts, modules, precision, rules, trained
from braid.planning.divisibility import AxisSizes
from braid.planning.modules import ModulePlan
from braid.planning.split import Costs
from braid.planning.trained import Selection
from braid.schedule import Schedule, offload_times
from braid.schedule.freezing import freeze_phases
from braid.schedule.graph import LANGUAGE, Graph, unit_name
from braid.schedule.lowering import POLICIES, RESIDENT, lowered
from braid.schedule.offload import Durations, with_offloads
from braid.schedule.phases import Phase, Unit
from braid.schedule.recompute import dropped_tensors, with_replays
from braid.topology import Grid

if TYPE_CHECKING:
    from braid.model.encoder import EncoderModel
    from braid.model.language import LanguageModel, Size
    from braid.model.stacked import StackedModel


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a given number of ranks, with everything derived from it."""

    run: Run
    world: int
    """World size: the number of ranks of the job, those outside the grid included."""
    axes: AxisSizes
    """Size of each parallel axis."""
    grid: Grid
    """Rank layout: the ranks that hold the model, and the groups along each axis."""
    layout: Layout
    """The layers of the model, in the segments (virtual pipeline stages) of the pipeline ranks."""
    stages: tuple[Stage, ...]
    """The segments of each pipeline rank."""
    units: tuple[Unit, ...]
    """FSDP units: weights that are unsharded, resharded and reduced together."""
    schedule: Schedule
    """The checked op list of each pipeline rank for one step."""
    micro_batch_samples: int
    """Samples in one micro-batch, over all data-parallel ranks."""
    step_tokens: int
    """Tokens in one step, over all ranks."""
    selection: Selection | None = None
    """What is trained, and at which learning rates; None for everything at one rate."""
    encoders: Mapping[str, ModulePlan] = field(default_factory=dict)
    """The modules besides the language model, in the order of their segments."""

    def station(self, rank: int) -> int | None:
        """The list of the schedule that a rank of the job executes; None for a rank without a module."""
        if self.encoders:
            return next((n for n, ranks in enumerate(self.schedule.graph.ranks) if rank in ranks), None)
        return self.grid.coordinates(rank)["pp"] if rank in self.grid.ranks else None

    def trained(self, model: LanguageModel) -> frozenset[str]:
        """Names of the trained parameters of a rank's part of the language model."""
        return trained.parameters_of(model, self.selection)

    def selection_of(self, module: str) -> Selection | None:
        """What of a module is trained; None for everything at one rate."""
        return self.selection if module == LANGUAGE else self.encoders[module].selection

    def prefix_of(self, module: str) -> str:
        """What the canonical names of a module begin with in checkpoints."""
        return "" if module == LANGUAGE else self.encoders[module].prefix


def plan(run: Run, world: int) -> Plan:
    """Derive the plan of a run. Raises a `ConfigError` with every problem of the run. The schedule is verified
    (`schedule.check`); a violation is a bug in braid and raises a `ScheduleError`."""
    made = draft(run, world)
    if faults := schedules.check(made.schedule).faults:
        raise ScheduleError(faults)
    return made


def draft(run: Run, world: int) -> Plan:
    """The same with a schedule that is not verified, in about half the time. For runs that are timed and
    estimated, not executed."""
    problems = check(run, world)
    if problems:
        raise ConfigError(problems)
    axes, layout = divisibility.axis_sizes(run.mesh, world), layout_of(run)
    ranks = len(divisibility.ranks_of(run.mesh, world))
    selection = trained.select(lambda: _whole_model(run, layout, run.train.dtype), run.learned, run.lr_share)
    grid, encoders = modules.grid_of(run.mesh, world), modules.plan_modules(run, world, len(layout.segments))
    language = _language_schedule(run, ranks, layout)
    built = _complete(language, run, world, grid, layout, encoders, selection)
    return Plan(
        run=run,
        world=world,
        axes=axes,
        grid=grid,
        layout=layout,
        stages=tuple(
            Stage(rank=rank, segments=tuple(layout.segments[index] for index in language.segments_of(rank)))
            for rank in range(language.pp)
        ),
        units=declaration.units(layout, _form(run, ranks)),
        schedule=_lowered(built, run, world, layout, encoders, _form(run, ranks)),
        encoders=encoders,
        micro_batch_samples=run.train.batch_samples // run.train.micro_batches,
        step_tokens=run.train.batch_samples * run.data.sequence_tokens,
        selection=selection,
    )


def with_micro_batches(plan: Plan, count: int) -> Plan:
    """A plan of the same run with another number of equal micro-batches. For predictions only: its schedule is
    not verified again."""
    train = replace(plan.run.train, micro_batches=count, batch_samples=count * plan.micro_batch_samples)
    run = replace(plan.run, train=train)
    language = _language_schedule(run, plan.grid.size, plan.layout)
    built = _complete(language, run, plan.world, plan.grid, plan.layout, plan.encoders, plan.selection)
    form = _form(run, plan.grid.size)
    return replace(
        plan,
        run=run,
        schedule=_lowered(built, run, plan.world, plan.layout, plan.encoders, form),
        step_tokens=train.batch_samples * run.data.sequence_tokens,
    )


def evaluation_schedule(plan: Plan, micro_batches: int) -> Schedule:
    """The forward-only schedule of an evaluation of `micro_batches`, without MTP."""
    run, ranks, layout = plan.run, plan.grid.size, plan.layout
    whole = plan.world == 1 if plan.encoders else ranks == 1
    form = replace(_form(run, ranks), whole=whole, fine=False, training=False)
    holder = plan.schedule.holder
    if plan.encoders:  # their schedule has stations in place of pipeline ranks
        held = {int(segment.index): stage.rank for stage in plan.stages for segment in stage.segments}
        holder = tuple(held[index] for index in range(len(layout.segments)))
    built = schedules.in_phases(schedules.evaluation(holder, micro_batches), declaration.chains(layout, form))
    built = _with_modules(built, run, plan.world, plan.grid, layout, plan.encoders)
    schedule = _lowered(built, run, plan.world, layout, plan.encoders, form)
    if faults := schedules.check(schedule).faults:
        raise ScheduleError(faults)
    return schedule


def layout_of(run: Run) -> Layout:
    """The layers of a run, split into segments."""
    return layouts.layout_of(
        run.model.pattern,
        run.mesh.pp,
        folded=_is_folded(run.mesh),
        costs=lambda layout: block_costs(run, layout),
    )


def _is_folded(mesh: Mesh) -> bool:
    return mesh.schedule == schedules.DUAL_PIPE_V and mesh.pp > 1


def block_costs(run: Run, layout: Layout) -> Costs:
    """The forward FLOPs of one sequence in each block, and in what comes before and behind them."""
    model, tokens = _whole_model(run, layout), run.data.sequence_tokens
    (chain,) = declaration.chains(layout, form_of(run.model, run.train.dtype))
    blocks, last = [0] * len(layout.blocks), 0
    for phase in chain.phases:
        flops = model.phase_flops(phase, tokens)
        if phase.depth is None and phase.block is not None:
            blocks[phase.block] += flops
        else:
            last += flops  # the embedding has none
    return Costs(blocks=tuple(blocks), last=last)


def _default_segments(mesh: Mesh) -> int:
    """Number of segments that a pattern without `|` is split into."""
    return 2 * mesh.pp if _is_folded(mesh) else mesh.pp


def _form(run: Run, ranks: int) -> Form:
    """How blocks are split into phases: as coarsely as possible, because every phase costs host time. With a
    pipeline, expert outputs are summed in `combine`, on the communication stream, instead of a `post` phase on
    the compute stream, where the sum would delay ranks that wait for one another."""
    mesh = run.mesh
    fine = mesh.overlap or mesh.schedule == schedules.DUAL_PIPE_V
    return form_of(
        run.model,
        run.train.dtype,
        whole=ranks == 1 and not fine and not run.train.recompute and not run.train.offload_share,
        fine=fine,
        posts=mesh.pp == 1,
        late_weights=mesh.late_weights,
        modules=tuple(run.modules),
    )


def _language_schedule(run: Run, ranks: int, layout: Layout) -> Schedule:
    """The lists of the language model alone: 1F1B, or interleaved 1F1B if a rank has several segments, the
    overlapped form of either, or DualPipeV."""
    mesh, micro_batches = run.mesh, run.train.micro_batches
    options = schedules.Options(
        delayed=mesh.delay_weights,
        early_release=mesh.early_release,
        paired_ends=mesh.paired_ends,
    )
    chains = declaration.chains(layout, _form(run, ranks))
    if mesh.schedule == schedules.DUAL_PIPE_V:
        return schedules.dual_pipe_v(
            chains, pp=mesh.pp, micro_batches=micro_batches, overlap=mesh.overlap, options=options
        )
    if mesh.overlap:
        return schedules.overlapped(chains, pp=mesh.pp, micro_batches=micro_batches, options=options)
    virtual = len(layout.segments) // mesh.pp
    name = "1f1b" if virtual == 1 else "interleaved"
    built = schedules.build(name, pp=mesh.pp, virtual=virtual, micro_batches=micro_batches)
    return schedules.in_phases(built, chains)


def _with_modules(
    language: Schedule,
    run: Run,
    world: int,
    grid: Grid,
    layout: Layout,
    encoders: Mapping[str, ModulePlan],
    frozen: frozenset[str] = frozenset(),
) -> Schedule:
    """The schedule of all modules, around the lists of the language model."""
    if not encoders:
        return language
    segments, edges = _graph(language, run, world, grid, layout, encoders, frozen)
    if frozen:
        segments = _with_frozen_costs(segments, edges, run, layout, encoders, frozen)
    ahead = {name: each.module.ahead for name, each in encoders.items()}
    return schedules.multimodule(language, segments, edges, ahead=ahead)


def _graph(
    language: Schedule,
    run: Run,
    world: int,
    grid: Grid,
    layout: Layout,
    encoders: Mapping[str, ModulePlan],
    frozen: frozenset[str],
) -> tuple[list[schedules.Segment], list[schedules.Edge]]:
    """The segments of all modules on their ranks, with FLOPs per rank, and what the language model reads."""
    lines, samples = grid.groups("pp"), run.train.batch_samples // run.train.micro_batches
    flops = _segment_flops(run, layout)
    segments = []
    for number, holder in enumerate(language.holder):
        ranks = tuple(line[holder] for line in lines)
        forward = max(1, flops[number] * samples // len(ranks))
        segments.append(
            schedules.Segment(
                module=LANGUAGE,
                ranks=ranks,
                trains=modules.trains(language.phases[number], frozen),
                forward=forward,
                backward=2 * forward,
                phases=language.phases[number],
            )
        )
    for each in encoders.values():
        segments += modules.segments(run, each, world)
    edges = [schedules.Edge(name=each.edge, source=each.segments[-1], target=0) for each in encoders.values()]
    return segments, edges


def _with_frozen_costs(
    segments: Sequence[schedules.Segment],
    edges: Sequence[schedules.Edge],
    run: Run,
    layout: Layout,
    encoders: Mapping[str, ModulePlan],
    frozen: frozenset[str],
) -> list[schedules.Segment]:
    """The segments with backwards that take as long as what is trained makes them."""
    graph = Graph(segments=tuple(segments), edges=tuple(edges))
    inner = _inner_phases(run, layout, encoders, frozen, graph)
    models: dict[str, tuple[LanguageModel | EncoderModel, int]] = {
        name: (modules.whole_encoder(each), modules.patches_of_item(each.module))
        for name, each in encoders.items()
    }
    models[LANGUAGE] = _whole_model(run, layout), run.data.sequence_tokens
    costed = []
    for segment, phases in zip(segments, inner, strict=True):
        model, tokens = models[segment.module]
        forward = max(1, sum(model.phase_flops(phase, tokens) for phase in phases))
        backward = segment.forward * backward_flops(model, phases, tokens) // forward
        costed.append(replace(segment, backward=max(1, backward)))
    return costed


def _segment_flops(run: Run, layout: Layout) -> list[int]:
    """The forward FLOPs of one sequence in each segment of the language model."""
    model, tokens = _whole_model(run, layout), run.data.sequence_tokens
    chains = declaration.chains(layout, form_of(run.model, run.train.dtype))
    return [sum(model.phase_flops(phase, tokens) for phase in chain.phases) for chain in chains]


def _complete(
    language: Schedule,
    run: Run,
    world: int,
    grid: Grid,
    layout: Layout,
    encoders: Mapping[str, ModulePlan],
    selection: Selection | None,
) -> Schedule:
    """The schedule of all modules, without the backwards of what is frozen, with ops of recompute
    and offload, and an all-reduce of the gradient of an embedding that two stages hold."""
    frozen = frozenset() if selection is None else selection.frozen_units
    frozen = frozen.union(*(each.frozen_units for each in encoders.values()))
    built = _with_modules(language, run, world, grid, layout, encoders, frozen)
    built = schedules.freeze(built, frozen)
    own = len(layout.segments)
    dropped = dropped_tensors(
        layout,
        built.phases[:own],
        run.train.recompute,
        span_of(run, layout),
        hyper=run.model.hyper is not None,
    )
    for each in encoders.values():
        phases = built.phases[each.segments[0] : each.segments[-1] + 1]
        dropped += modules.dropped(run, each, phases)
    built = with_replays(built, run.train.recompute, dropped)
    built = with_offloads(built, run.train.offload_share, _durations(built, run, layout))
    shared = (run.model.tied or bool(layout.mtp)) and declaration.EMBEDDING not in frozen
    stations = built.graph.stations
    apart = shared and not built.graph.is_local(0, own - 1)
    return schedules.with_sums(built, {"embedding": (*stations[0], *stations[own - 1])} if apart else {})


def _durations(schedule: Schedule, run: Run, layout: Layout) -> Durations | None:
    """What places the copies of offload, if the run has it."""
    kinds = {int(block.index): str(block) for block in layout.blocks}
    times = offload_times.parsed(run.train.offload_times)
    return offload_times.durations(schedule, kinds, times) if times else None


def _lowered(
    schedule: Schedule,
    run: Run,
    world: int,
    layout: Layout,
    encoders: Mapping[str, ModulePlan],
    form: Form,
) -> Schedule:
    """The schedule with its weight ops: unshard, reshard, gradient reduction."""
    alone = world == 1 if encoders else len(divisibility.ranks_of(run.mesh, world)) == 1
    policies = {LANGUAGE: POLICIES[run.mesh.shard]}
    policies |= {name: POLICIES[each.module.mesh.shard] for name, each in encoders.items()}
    meshes = {unit.path: unit.mesh for unit in declaration.units(layout, form)}
    for name, each in encoders.items():
        meshes |= {unit_name(name, unit.path): unit.mesh for unit in each.units}
    return lowered(schedule, meshes, RESIDENT if alone else policies)


def span_of(run: Run, layout: Layout) -> int:
    """Blocks per recompute span of hyper-connections: residual streams are saved only between spans. By default
    the span with the smallest peak: all saved streams, plus the recomputed activations of one span."""
    hyper, dtype = run.model.hyper, run.train.dtype
    if run.train.recompute_span or hyper is None:
        return max(run.train.recompute_span, 1)
    from braid.kernels.hyper_connection import activation_bytes

    narrow, wide = BYTES[dtype], MAIN_BYTES[dtype]
    streams = hyper.streams * run.model.hidden * narrow
    recomputed = activation_bytes.fused(1, hyper.streams, run.model.hidden, narrow=narrow, wide=wide)
    blocks = max((len(segment.blocks) for segment in layout.segments), default=1)
    layers = len(layout.layers) / max(len(layout.blocks), 1)
    peak = {span: -(-blocks // span) * streams + span * layers * recomputed for span in range(1, blocks + 1)}
    return min(peak, key=lambda span: peak[span], default=1)


def size(plan: Plan) -> Size:
    """The number of parameters of the model, total and active per token."""
    return whole_model(plan).size()


def whole_model(plan: Plan) -> LanguageModel:
    """The unsharded model on the meta device, for parameter counts, FLOPs and canonical names."""
    return _whole_model(plan.run, plan.layout)


def whole_models(plan: Plan) -> dict[str, StackedModel]:
    """The same of every module, by name."""
    encoders = {name: modules.whole_encoder(each) for name, each in plan.encoders.items()}
    return {LANGUAGE: whole_model(plan), **encoders}


def canonical_names(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of all checkpoint tensors of a run, by their names."""
    return {
        plan.prefix_of(module) + name: tensor.shape
        for module, model in whole_models(plan).items()
        for name, tensor in model.canonical().items()
    }


@rules.addressable_tensors("model")
def _whole_model(run: Run, layout: Layout, dtype: Dtype = "fp32") -> LanguageModel:
    import torch

    from braid.kernels import references
    from braid.model.language import LanguageModel

    compute = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = LanguageModel(run.model, layout, references(), device=torch.device("meta"), dtype=compute)
    model.adapt(run.train.lora)
    return model


def phase_flops(plan: Plan) -> list[dict[str, int]]:
    """For each segment of the language model, the forward FLOPs of one sequence in each of its compute phases.
    FLOPs are counted per block, so the phases that a block with experts is split into for overlap are not
    included."""
    model, tokens = whole_model(plan), plan.run.data.sequence_tokens
    return [
        {phase.name: flops for phase in phases if (flops := model.phase_flops(phase, tokens))}
        for phases in plan.schedule.phases[: len(plan.layout.segments)]
    ]


def inner_phases(plan: Plan) -> tuple[tuple[Phase, ...], ...]:
    """The phases of every segment of the schedule, as if none were a single phase."""
    frozen = frozenset(unit for segment in plan.schedule.phases for phase in segment for unit in phase.frozen)
    return _inner_phases(plan.run, plan.layout, plan.encoders, frozen, plan.schedule.graph)


def _inner_phases(
    run: Run, layout: Layout, encoders: Mapping[str, ModulePlan], frozen: frozenset[str], graph: Graph
) -> tuple[tuple[Phase, ...], ...]:
    dtype = run.train.dtype
    form = form_of(run.model, dtype, modules=tuple(each.edge for each in encoders.values()))
    phases = [chain.phases for chain in declaration.chains(layout, form)]
    for each in encoders.values():  # their segments follow those of the language model
        own = declaration.chains(each.layout, form_of(each.module.model, dtype))
        phases += [tuple(modules.in_module(each.name, phase) for phase in chain.phases) for chain in own]
    return freeze_phases(phases, frozen, graph)


def backward_flops(model: LanguageModel | EncoderModel, phases: Sequence[Phase], tokens: int) -> int:
    """FLOPs of the backward of a sequence or an item: as many as forward for the gradients of inputs, and for
    those of weights, where there are any."""
    passes = (phase.backward * (2 if phase.grad_units else 1) for phase in phases)
    return sum(model.phase_flops(phase, tokens) * times for phase, times in zip(phases, passes, strict=True))


def training_flops(plan: Plan) -> int:
    """FLOPs of one sequence in a step: its forward, as much again for the gradients of inputs where something
    before is trained, and for those of weights where a block has trained ones. Recomputation does not count."""
    model, tokens = whole_model(plan), plan.run.data.sequence_tokens
    if plan.selection is None:
        return 3 * model.flops(tokens)
    return _training_flops(model, inner_phases(plan)[: len(plan.layout.segments)], tokens)


def item_flops(plan: Plan, module: str) -> Callable[[int], int]:
    """The same of one item of an encoder, by its patches."""
    each = plan.encoders[module]
    model = modules.whole_encoder(each)
    if each.selection is None:
        return lambda patches: 3 * model.flops(patches)
    phases = inner_phases(plan)[each.segments.start : each.segments.stop]
    return lambda patches: _training_flops(model, phases, patches)


def _training_flops(
    model: LanguageModel | EncoderModel, segments: Sequence[Sequence[Phase]], tokens: int
) -> int:
    passes, total = False, 0
    for phase in (each for phases in segments for each in phases):
        total += model.phase_flops(phase, tokens) * (1 + passes + bool(phase.grad_units))
        passes = passes or phase.backward
    return total


def check(run: Run, world: int) -> list[Problem]:
    """Every problem of the run, in the order of its fields."""
    wrong_types = list(type_problems(run))
    if type(world) is not int:
        wrong_types.append(Problem(field="world", value=world, rule="must be int", remedy="int"))
    if wrong_types:
        return wrong_types  # the rules below compare values, which need the right types
    own = (_layers(run.model, run.mesh), rules.vocab(run), _ranks(run, world))
    between = (*own, rules.steps(run), rules.recompute(run))
    others = () if world < 1 else modules.problems(run, world)
    found = [*run.problems(), *(problem for rule in between for problem in rule), *others]
    # Names are those of a model that can be built, and the schedule that of one that fits its ranks.
    return found or [*_trained(run), *_ahead(run, world)]


def _trained(run: Run) -> Iterator[Problem]:
    """What is wrong with freezing and learning rates."""
    if run.learned == trained.EVERYTHING and not run.lr_share and not run.modules:
        return  # the case of most runs, and models take time to build
    model = _whole_model(run, layout_of(run), run.train.dtype)
    yield from trained.adapter_problems(model, run.train.lora)
    yield from trained.problems(model, run.learned, run.lr_share, modules=modules.prefixes(run))
    yield from modules.trained_problems(run)
    encoders = ((modules.on_meta(each, modules.layout_of(each)), each.trained) for each in run.modules.values())
    yield from trained.nothing_trained([(model, run.learned), *encoders])


def _ahead(run: Run, world: int) -> Iterator[Problem]:
    """Modules that may not be as far ahead as the language model needs them to be."""
    ahead = {name: module.ahead for name, module in run.modules.items() if module.ahead}
    if ahead:
        layout, grid = layout_of(run), modules.grid_of(run.mesh, world)
        language = _language_schedule(run, grid.size, layout)
        encoders = modules.plan_modules(run, world, len(layout.segments))
        segments, edges = _graph(language, run, world, grid, layout, encoders, frozenset())
        yield from schedules.ahead_problems(language, segments, edges, ahead)


def _layers(model: Model, mesh: Mesh) -> Iterator[Problem]:
    """The pattern must parse, split over the pipeline, and have a shape for every kind of layer in it."""
    try:
        layout = parse(model.pattern)
        if layouts.is_split_by_work(layout, mesh.pp, folded=_is_folded(mesh)):
            pass
        elif _default_segments(mesh) > mesh.pp:
            yield from _dual_pipe_v_segments(model, layout, mesh)
        elif mesh.pp >= 1:
            cut(layout, mesh.pp)
    except PatternError as error:
        caret = error.excerpt.replace("\n", "\n        ")
        yield Problem(
            field="model.pattern",
            value=model.pattern,
            rule=f"{error.rule}\n        {caret}",
            remedy="a pattern that `braid pattern` accepts",
        )
        return
    if not layout.kinds():
        rule = "a model needs at least one layer"
        yield Problem(field="model.pattern", value=model.pattern, rule=rule, remedy="a pattern such as [*-]")
    yield from divisibility.shapes(model, layout.kinds())


def _dual_pipe_v_segments(model: Model, layout: Layout, mesh: Mesh) -> Iterator[Problem]:
    """DualPipeV needs two segments per rank: those of the pattern, or equal ones if it has no `|`."""
    needed, actual = _default_segments(mesh), len(layout.segments)
    if actual == 1:
        try:
            cut(layout, needed)
        except PatternError:
            why = f"the pattern has no |, and its blocks cannot be split into {needed} equal segments"
        else:
            return
    elif actual == needed:
        return
    else:
        why = f"the pattern has {actual}"
    yield Problem(
        field="model.pattern",
        value=model.pattern,
        rule=f"mesh.schedule {mesh.schedule} needs two segments for each of mesh.pp ({mesh.pp}) ranks: {why}",
        remedy=f"{needed} segments, separated by |, or mesh.schedule to auto",
    )


def _ranks(run: Run, world: int) -> Iterator[Problem]:
    """The mesh must fit its ranks, these must be in the job, and the run must divide evenly over them."""
    bad_world = list(validators.at_least("world", world, 1))
    yield from bad_world
    if bad_world or any(run.mesh.problems("mesh")):  # the mesh's own problems come from `run.problems()`
        return
    axes = yield from divisibility.fits(run.mesh, world)
    if axes is not None:
        try:
            layout = parse(run.model.pattern)
        except PatternError:  # reported by `_layers`
            yield from divisibility.problems(run, frozenset(), axes)
            return
        adapted = trained.adapts_experts(run.train.lora, layout)
        yield from divisibility.problems(run, layout.kinds(), axes, adapts_experts=adapted)
        yield from precision.problems(run, layout, axes)
