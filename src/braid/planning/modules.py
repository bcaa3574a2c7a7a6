"""Modules of a plan: encoders beside the language model, each on a grid of its own.

A module's grid spans the ranks that its mesh names: those of the language model (colocated), others, or some of
the same. `problems` checks a module like a model of its own, and what it shares with the language model;
`plan_module` derives its plan, `segments` what the schedule of all modules needs of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from braid.choices import Dtype
from braid.config import Mesh, Module, Run
from braid.errors import Problem
from braid.model import declaration
from braid.model.declaration import Form, form_of
from braid.pattern import Layout, PatternError, Stage, cut, joined, parse
from braid.planning import divisibility, trained
from braid.planning.divisibility import AxisSizes
from braid.planning.rules import addressable_tensors
from braid.planning.trained import Selection
from braid.schedule.graph import LANGUAGE, Segment, unit_name
from braid.schedule.phases import Phase, Unit
from braid.schedule.recompute import dropped_tensors
from braid.topology import Grid, standard

if TYPE_CHECKING:
    from braid.model.encoder import EncoderModel

NAME = re.compile(r"[a-z][a-z0-9_]*")
"""Names of modules: they are parts of tensor names and of command-line options."""


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """A module on the ranks of its grid."""

    name: str
    module: Module
    axes: AxisSizes
    grid: Grid
    layout: Layout
    """Its layers, in one segment for each pipeline stage."""
    stages: tuple[Stage, ...]
    units: tuple[Unit, ...]
    """FSDP units, by the paths that they have within the module."""
    first_segment: int
    """The number of its first segment in the schedule; the others follow."""
    selection: Selection | None = None
    """What of it is trained, and at which learning rates; None for everything at one rate."""

    @property
    def segments(self) -> range:
        """Their numbers in the schedule."""
        return range(self.first_segment, self.first_segment + len(self.layout.segments))

    @property
    def prefix(self) -> str:
        """What its canonical names begin with in checkpoints."""
        return f"modules.{self.name}."

    @property
    def frozen_units(self) -> frozenset[str]:
        """FSDP units of which nothing is trained, by their names in the schedule."""
        frozen = frozenset() if self.selection is None else self.selection.frozen_units
        return frozenset(unit_name(self.name, unit) for unit in frozen)

    @property
    def edge(self) -> str:
        """The edge over which the language model reads it: modules have one each."""
        return self.name


def plan_modules(run: Run, world: int, first_segment: int) -> dict[str, ModulePlan]:
    """The plans of all modules but the language model, whose segments come before `first_segment`."""
    plans: dict[str, ModulePlan] = {}
    for name in run.modules:
        plans[name] = plan_module(run, name, world, first_segment)
        first_segment = plans[name].segments.stop
    return plans


def plan_module(run: Run, name: str, world: int, first_segment: int) -> ModulePlan:
    """The plan of a module of a run without problems."""
    module = run.modules[name]
    axes, layout = divisibility.axis_sizes(module.mesh, world), layout_of(module)
    return ModulePlan(
        name=name,
        module=module,
        axes=axes,
        grid=grid_of(module.mesh, world),
        layout=layout,
        stages=tuple(Stage(rank=each.index, segments=(each,)) for each in layout.segments),
        units=declaration.units(layout, form_of_module(run, name, world)),
        first_segment=first_segment,
        selection=trained.select(
            lambda: on_meta(module, layout, run.train.dtype), module.trained, module.lr_share
        ),
    )


def grid_of(mesh: Mesh, world: int) -> Grid:
    """The grid of a mesh on its ranks of a job."""
    axes, ranks = divisibility.axis_sizes(mesh, world), divisibility.ranks_of(mesh, world)
    sizes = {"tp": axes.tp, "cp": axes.cp, "dp": axes.dp, "pp": axes.pp, "etp": axes.etp, "ep": axes.ep}
    return standard(**sizes, offset=ranks.start)


def layout_of(module: Module) -> Layout:
    """The layers of a module, in a segment for each of its pipeline stages."""
    parsed = parse(module.model.pattern)
    return joined(parsed) if module.mesh.pp == 1 else cut(parsed, module.mesh.pp)


def form_of_module(run: Run, name: str, world: int) -> Form:
    """How its blocks are split into phases: as coarsely as possible, as encoder turns overlap with nothing."""
    whole = world == 1 and not run.train.recompute
    return form_of(run.modules[name].model, run.train.dtype, whole=whole, posts=True)


def segments(run: Run, plan: ModulePlan, world: int) -> Iterator[Segment]:
    """Its segments, for the schedule of all modules. Units have the module's name, as those of several modules
    may lie on one rank."""
    chains = declaration.chains(plan.layout, form_of_module(run, plan.name, world))
    lines = plan.grid.groups("pp")
    model, frozen = whole_encoder(plan), plan.frozen_units
    for stage, chain in enumerate(chains):
        ranks = tuple(line[stage] for line in lines)
        forward = max(1, _flops(plan.module, model, chain.phases) * _samples(run) // len(ranks))
        phases = tuple(in_module(plan.name, phase) for phase in chain.phases)
        yield Segment(
            module=plan.name,
            ranks=ranks,
            trains=trains(phases, frozen),
            forward=forward,
            backward=2 * forward,
            phases=phases,
        )


def trains(phases: Sequence[Phase], frozen: frozenset[str]) -> bool:
    """Whether any weight of these phases is trained."""
    return any(unit not in frozen for phase in phases for unit in phase.units)


def dropped(run: Run, plan: ModulePlan, phases: Sequence[Sequence[Phase]]) -> tuple[tuple[str, ...], ...]:
    """For each of its segments, the residual streams that are recomputed rather than saved."""
    hyper, span = plan.module.model.hyper is not None, max(run.train.recompute_span, 1)
    return dropped_tensors(plan.layout, phases, run.train.recompute, span, hyper=hyper)


def _samples(run: Run) -> int:
    return run.train.batch_samples // run.train.micro_batches


def _flops(module: Module, model: EncoderModel, phases: Sequence[Phase]) -> int:
    """Of a sample with as many items and patches as it may have."""
    patches = patches_of_item(module)
    return module.most_items * sum(model.phase_flops(phase, patches) for phase in phases)


def patches_of_item(module: Module) -> int:
    """Of each of as many items as a sample may have, where it has as many patches as it may have."""
    return -(-module.most_patches // module.most_items)


def encoder_size(plan: ModulePlan) -> int:
    """The number of its parameters."""
    return sum(prod(tensor.shape) for tensor in whole_encoder(plan).canonical().values())


def whole_encoder(plan: ModulePlan) -> EncoderModel:
    """The unsharded module on the meta device, for parameter counts, FLOPs and canonical names."""
    return on_meta(plan.module, plan.layout)


@addressable_tensors("modules")
def on_meta(module: Module, layout: Layout, dtype: Dtype = "fp32") -> EncoderModel:
    import torch

    from braid.kernels import references
    from braid.model.encoder import EncoderModel

    compute = torch.bfloat16 if dtype == "bf16" else torch.float32
    return EncoderModel(module.model, layout, references(), device=torch.device("meta"), dtype=compute)


def in_module(name: str, phase: Phase) -> Phase:
    """A phase whose units carry the name of their module: `vision/stack.blocks.3`."""

    def named(units: Sequence[str]) -> tuple[str, ...]:
        return tuple(unit_name(name, unit) for unit in units)

    regions = tuple((region, named(units)) for region, units in phase.regions)
    return replace(phase, units=named(phase.units), regions=regions)


# ---------------------------------------------------------------------------------------------- problems


def trained_problems(run: Run) -> Iterator[Problem]:
    """What is wrong with `trained` and `lr_share` of modules, for a run that has no other problems."""
    for name, module in run.modules.items():
        model = on_meta(module, layout_of(module), run.train.dtype)
        yield from trained.problems(
            model, module.trained, module.lr_share, at=f"modules.{name}.", modules=prefixes(run)
        )


def prefixes(run: Run) -> list[str]:
    """What names of tensors and fields of the modules begin with."""
    return [f"modules.{name}." for name in run.modules]


def problems(run: Run, world: int) -> Iterator[Problem]:
    """What is wrong with the modules of a run, besides what a module knows of itself."""
    tokens: dict[int, str] = {}
    for name, module in run.modules.items():
        at = f"modules.{name}"
        yield from _name(name)
        yield from _shared(run, module, at)
        if module.token in tokens:
            rule = f"modules.{tokens[module.token]}.token is the same: an id names the items of one module"
            yield Problem(field=f"{at}.token", value=module.token, rule=rule, remedy="an id of its own")
        tokens.setdefault(module.token, name)
        yield from (_of_module(problem, at) for problem in _own(run, module, world))
    yield from _uncovered(run, world)


def _name(name: str) -> Iterator[Problem]:
    if not NAME.fullmatch(name) or name == LANGUAGE:
        rule = "a name has small letters, digits and _, begins with a letter, and is not language"
        yield Problem(field="modules", value=name, rule=rule, remedy="a name such as vision")


def _shared(run: Run, module: Module, at: str) -> Iterator[Problem]:
    """What a module must have in common with the language model."""
    if module.token >= run.model.vocab:
        rule = f"placeholders are tokens, and model.vocab is {run.model.vocab}"
        remedy = f"an id below {run.model.vocab} that no text has, or a larger model.vocab"
        yield Problem(field=f"{at}.token", value=module.token, rule=rule, remedy=remedy)
    width = module.model.projector.width
    if width != run.model.hidden:
        rule = f"rows take the places of embeddings, and model.hidden is {run.model.hidden}"
        field = f"{at}.model.projector.width"
        yield Problem(field=field, value=width, rule=rule, remedy=str(run.model.hidden))
    yield from _limits(run, module, at)


def _limits(run: Run, module: Module, at: str) -> Iterator[Problem]:
    """Items are whole groups of patches, and their rows take the places of a sample's tokens."""
    patches, group, tokens = module.most_patches, module.model.group, run.data.sequence_tokens
    if min(patches, group, tokens, module.most_items) < 1:
        return  # told by `Run.problems`
    field = f"{at}.most_patches"
    if patches % group:
        rule = f"items are whole groups of {group} patches"
        yield Problem(field=field, value=patches, rule=rule, remedy=f"{max(patches // group, 1) * group}")
    elif (rows := patches // group) > tokens:
        rule = f"{rows} rows of {group} patches, and a sample has {tokens} tokens (data.sequence_tokens)"
        remedy = f"at most {tokens * group}, or data.sequence_tokens to {rows} or more"
        yield Problem(field=field, value=patches, rule=rule, remedy=remedy)
    elif module.most_items > rows:
        rule = f"an item has a row of {group} patches or more, and {at}.most_patches is {patches}"
        remedy = f"at most {rows}, or {at}.most_patches to {module.most_items * group} or more"
        yield Problem(field=f"{at}.most_items", value=module.most_items, rule=rule, remedy=remedy)


def _own(run: Run, module: Module, world: int) -> Iterator[Problem]:
    """Rules of a model on its ranks, in the fields of the module."""
    mesh, shape = module.mesh, module.model
    for name, value, only in (
        ("schedule", mesh.schedule, "auto"),
        ("overlap", mesh.overlap, False),
    ):
        if value != only:
            rule = "an encoder runs whole turns, between those of the language model"
            yield Problem(field=f"mesh.{name}", value=value, rule=rule, remedy=str(only))
    if mesh.dispatcher == "all_gather":
        rule = "all_gather needs as many tokens on every rank, and an encoder's ranks hold different items"
        yield Problem(field="mesh.dispatcher", value=mesh.dispatcher, rule=rule, remedy="all_to_all")
    try:
        layout = layout_of(module)
    except PatternError as error:
        caret = f"{error.text}\n{' ' * error.position}^".replace("\n", "\n        ")
        rule = f"{error.rule}\n        {caret}"
        remedy = "a pattern that `braid pattern` accepts"
        yield Problem(field="model.pattern", value=shape.pattern, rule=rule, remedy=remedy)
        return
    if any(mesh.problems("mesh")) or any(shape.problems("model")):
        return
    if len(layout.segments) > mesh.pp:
        rule = (
            f"{len(layout.segments)} segments, and mesh.pp is {mesh.pp}: an encoder has one per pipeline rank"
        )
        remedy = f"{mesh.pp - 1} | in the pattern, or mesh.pp {len(layout.segments)}"
        yield Problem(field="model.pattern", value=shape.pattern, rule=rule, remedy=remedy)
    yield from divisibility.shapes(shape, layout.kinds())
    if axes := (yield from divisibility.fits(mesh, world)):
        yield from divisibility.layers(shape, mesh, run.train.dtype, layout.kinds(), axes)


def _of_module(problem: Problem, at: str) -> Problem:
    """A problem of a module's model or mesh, under the names that its fields have in the run."""

    def named(text: str) -> str:
        return re.sub(r"\b(mesh|model)\.", rf"{at}.\1.", text)

    field = problem.field if problem.field == "world" else named(problem.field)
    return replace(problem, field=field, rule=named(problem.rule), remedy=named(problem.remedy))


def _uncovered(run: Run, world: int) -> Iterator[Problem]:
    """Ranks of the job that no module uses: an oversight, where modules are placed by hand."""
    if not run.modules:
        return
    meshes = {"mesh": run.mesh, **{f"modules.{name}.mesh": each.mesh for name, each in run.modules.items()}}
    used = {rank for mesh in meshes.values() for rank in divisibility.ranks_of(mesh, world)}
    if left := sorted(set(range(world)) - used):
        spans = ", ".join(f"{name}.ranks {mesh.ranks}" for name, mesh in meshes.items())
        which = f"rank {left[0]} holds" if len(left) == 1 else f"ranks {left[0]} to {left[-1]} hold"
        rule = f"{which} no module: {spans}"
        yield Problem(field="world", value=world, rule=rule, remedy="fewer ranks, or modules on all of them")
