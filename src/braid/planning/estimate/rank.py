"""One rank of a pipeline stage without processes: groups without communicators, a model on the meta device.

A rank of a station may hold stages of several modules: `held_modules` has each of them, with its own grid. Most
stages of a long pipeline hold equal blocks in equal order: `held_by_station` builds the first of them, and the
others are its twins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch

from braid.architecture import Trunk
from braid.choices import DispatcherName, Strategy, kernel_modes, recomputed
from braid.config import Mesh
from braid.distributed.collectives import ALONE, Group, Groups
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.nn.cost import Cost, Workload
from braid.nn.dtypes import DTYPES
from braid.pattern import Block, Kind, Layer, LayerNumber, Layout
from braid.planning import divisibility
from braid.planning.divisibility import AxisSizes
from braid.planning.local_model import (
    build_local_encoder,
    build_local_model,
    choose_encoder_kernels,
    choose_kernels,
)
from braid.planning.modules import ModulePlan
from braid.planning.plan import Plan, span_of
from braid.planning.trained import parameters_of
from braid.precision import precision_of
from braid.schedule.graph import LANGUAGE, unit_name


@dataclass(frozen=True, kw_only=True)
class HeldModule:
    """A pipeline stage of one module, on the rank of it with the largest shards."""

    name: str
    """Of the module: `language`, `vision`."""
    stage: int
    """Pipeline stage of the module."""
    segments: tuple[int, ...]
    """Its segments, by their numbers in the schedule."""
    layers: str
    """The pattern of its layers."""
    model: LanguageModel | EncoderModel
    """Its part of the model; of a twin, that of its original."""
    axes: AxisSizes
    strategy: Strategy
    workload: Workload
    """Its fullest micro-batch."""
    trained: frozenset[str]
    """Names of trained parameters of the model."""
    original: HeldModule | None = None
    """Of a twin: the stage that holds equal blocks in equal order, at other places of the pattern."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Of a twin: its blocks, by those of its original."""

    def name_of(self, part: str) -> str:
        """A part or unit of the module, by its name among those of all modules: `vision/blocks.3`."""
        return unit_name(self.name, part)

    def renamed(self, name: str) -> str:
        """The name here of a part or unit of the original."""
        head, found, rest = name.partition("blocks.")
        if not found or head not in ("", "stack."):
            return name
        block, dot, rest = rest.partition(".")
        return f"{head}blocks.{self.blocks[block]}{dot}{rest}"

    @cached_property
    def weights(self) -> int:
        """Parameters of the rank before FSDP sharding."""
        if self.original is not None:
            return self.original.weights
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """The cost of each part for one micro-batch, in forward order."""
        if self.original is not None:
            return {self.renamed(part): cost for part, cost in self.original.costs.items()}
        costs = self.model.costs(self.workload)
        if self.workload.offloads:
            names = self.workload.recompute | self.workload.offloads
            dropped = self.model.costs(replace(self.workload, recompute=names, offloads=frozenset()))
            costs = {part: _leaving(cost, dropped[part]) for part, cost in costs.items()}
        return {self.name_of(part): cost for part, cost in costs.items()}


def _leaving(cost: Cost, dropped: Cost) -> Cost:
    """The cost of a part of which only that leaves the device which `dropped` does not save."""
    before, after = (each.kept - each.staying - each.adopted for each in (cost, dropped))
    return replace(cost, staying=cost.kept - max(before - after, 0))


def held_by_station(plan: Plan, device: str) -> Iterator[tuple[HeldModule, ...]]:
    """What the ranks of each station hold. Where everything is trained, stages of the language model with equal
    blocks in equal order are built once."""
    built, mixers = dict[object, HeldModule](), _mixers(plan.layout)
    for station in range(plan.schedule.pp):
        if plan.encoders or plan.selection is not None:
            yield held_modules(plan, station, device)
            continue
        form = _form_of(plan, station, mixers)
        if form not in built:
            (built[form],) = held_modules(plan, station, device)
            yield (built[form],)
        else:
            yield (_twin(plan, station, built[form]),)


def _mixers(layout: Layout) -> dict[LayerNumber, Kind | None]:
    """The nearest mixer up to each layer, which decides where some models have their norms."""
    found, latest = dict[LayerNumber, Kind | None](), None
    for layer in layout.layers:
        latest = layer.kind if layer.kind.is_mixer else latest
        found[layer.number] = latest
    return found


def _form_of(plan: Plan, stage: int, mixers: Mapping[LayerNumber, Kind | None]) -> object:
    """What the model of a stage depends on, but for the names of its blocks."""
    shape, layout, precision = plan.run.model, plan.layout, precision_of(plan.run.train.precision)

    def form(layer: Layer) -> object:
        attention = shape.attention if layer.kind is Kind.ATTENTION else None
        own = None if attention is None else attention.of_layer(layer.nth)
        return layer.kind, own, mixers[layer.number]

    def forms(block: Block) -> object:
        quantised = precision.quantises(int(block.index), len(layout.blocks))
        return quantised, tuple(form(layer) for layer in block.layers)

    segments, last = plan.schedule.segments_of(stage), len(layout.segments) - 1
    blocks = tuple(tuple(map(forms, layout.segments[segment].blocks)) for segment in segments)
    return blocks, tuple(segment for segment in segments if segment in (0, last))


def _twin(plan: Plan, stage: int, original: HeldModule) -> HeldModule:
    segments = plan.schedule.segments_of(stage)
    theirs, own = (
        [str(block.index) for segment in held for block in plan.layout.segments[segment].blocks]
        for held in (original.segments, segments)
    )
    return replace(
        original,
        stage=stage,
        segments=segments,
        layers=_layers(plan.layout, segments),
        original=original,
        blocks=dict(zip(theirs, own, strict=True)),
    )


def _layers(layout: Layout, segments: Iterable[int]) -> str:
    return "|".join(str(layout.segments[segment]) for segment in segments)


def held_modules(plan: Plan, station: int, device: str) -> tuple[HeldModule, ...]:
    """What the ranks of a station hold: encoders, then the language model, which reads them."""
    graph = plan.schedule.graph
    modules: dict[str, list[int]] = {}
    for segment in plan.schedule.segments_of(station):
        modules.setdefault(graph.segments[segment].module, []).append(segment)
    encoders = [
        _held_encoder(plan, plan.encoders[name], segments, device)
        for name, segments in modules.items()
        if name != LANGUAGE
    ]
    language = [_held_language(plan, segments, device) for segments in [modules.get(LANGUAGE)] if segments]
    return (*encoders, *language)


def _held_language(plan: Plan, segments: list[int], device: str) -> HeldModule:
    stage = next(each.rank for each in plan.stages if segments[0] in [int(s.index) for s in each.segments])
    model = model_of(plan, first_rank(plan, stage), device)
    return HeldModule(
        name=LANGUAGE,
        stage=stage,
        segments=tuple(segments),
        layers=_layers(plan.layout, model.segments),
        model=model,
        axes=plan.axes,
        strategy=plan.run.mesh.shard,
        workload=workload_of(plan, device),
        trained=plan.trained(model),
    )


def _held_encoder(plan: Plan, encoder: ModulePlan, segments: list[int], device: str) -> HeldModule:
    stage, mesh = segments[0] - encoder.first_segment, encoder.module.mesh
    groups = _groups(encoder.module.model, encoder.layout, encoder.axes, stage)
    chosen = choose_encoder_kernels(plan, encoder.name, torch.device(device))
    model = build_local_encoder(
        plan, encoder.name, groups, chosen, device=torch.device("meta"), dispatcher=_countable(mesh)
    )
    return HeldModule(
        name=encoder.name,
        stage=stage,
        segments=tuple(segments),
        layers=_layers(encoder.layout, model.segments),
        model=model,
        axes=encoder.axes,
        strategy=mesh.shard,
        workload=encoder_workload(plan, encoder, device),
        trained=parameters_of(model, encoder.selection),
    )


# -------------------------------------------------------------------------------------- groups and models


def first_rank(plan: Plan, stage: int) -> Groups:
    """The groups of the first rank of a stage: uneven shards are largest on the first rank."""
    return _groups(plan.run.model, plan.layout, plan.axes, stage)


def _groups(shape: Trunk, layout: Layout, axes: AxisSizes, stage: int) -> Groups:
    def group(name: str, size: int, rank: int = 0) -> Group:
        return ALONE if size == 1 else Group(name=name, size=size, rank=rank, handle=None)

    ends = stage in (0, axes.pp - 1)
    runs = divisibility.tp_runs(shape, layout.kinds(), axes.tp)
    return Groups(
        tp=group("tp", axes.tp),
        cp=group("cp", axes.cp),
        dp=group("dp", axes.dp),
        pp=group("pp", axes.pp, stage),
        ends=group("ends", 2 if ends and axes.pp > 1 else 1, int(stage > 0)),
        tp_cp=group("tp_cp", axes.tp * axes.cp),
        dp_cp=group("dp_cp", axes.dp * axes.cp),
        slab=group("slab", axes.slab),
        ep=group("ep", axes.ep),
        etp=group("etp", axes.etp),
        ep_etp=group("ep_etp", axes.ep * axes.etp),
        edp=group("edp", axes.edp),
        world=group("world", axes.slab * axes.pp),
        tp_runs=MappingProxyType({length: group(f"tp_run_{length}", length) for length in runs}),
    )


def model_of(plan: Plan, groups: Groups, device: str) -> LanguageModel:
    """The model of the rank with these groups, on the meta device, with the kernels it would use on
    `device`."""
    chosen = choose_kernels(plan, torch.device(device))
    return build_local_model(
        plan, groups, chosen, device=torch.device("meta"), dispatcher=_countable(plan.run.mesh)
    )


def _countable(mesh: Mesh) -> DispatcherName:
    """DeepEP may not be installed here. It sends at most as much as an all-to-all, so count that instead."""
    return "all_to_all" if mesh.dispatcher == "deep_ep" else mesh.dispatcher


# ---------------------------------------------------------------------------------------------- workloads


def workload_of(plan: Plan, device: str) -> Workload:
    """The input of a rank of the language model in one micro-batch, and what it recomputes."""
    rows, segments = plan.micro_batch_samples // plan.axes.dp, range(len(plan.layout.segments))
    span = span_of(plan.run, plan.layout)
    return _workload(plan, segments, device, rows=rows, tokens=plan.run.data.sequence_tokens, span=span)


def encoder_workload(plan: Plan, encoder: ModulePlan, device: str) -> Workload:
    """The pack of a lane of an encoder in the fullest micro-batch, padded as the encoder pads it."""
    ranks, items = encoder.axes.tp * encoder.axes.cp, _lane_items(plan, encoder)
    tokens = encoder.module.model.pack_tokens(lane_patches(plan, encoder), items, ranks)
    span = max(plan.run.train.recompute_span, 1)
    workload = _workload(plan, encoder.segments, device, rows=1, tokens=tokens, span=span)
    return replace(workload, items=items)


def lane_patches(plan: Plan, encoder: ModulePlan) -> int:
    """Patches of a dp lane if all samples of a micro-batch have as many items and patches as they may have.
    Items are equal, and lanes are as even as whole items allow."""
    module, samples = encoder.module, plan.micro_batch_samples
    group = module.model.group
    item = group * -(-module.most_patches // (module.most_items * group))
    return min(_lane_items(plan, encoder) * item, samples * module.most_patches)


def _lane_items(plan: Plan, encoder: ModulePlan) -> int:
    return -(-plan.micro_batch_samples * encoder.module.most_items // encoder.axes.dp)


def _workload(
    plan: Plan, segments: Iterable[int], device: str, *, rows: int, tokens: int, span: int
) -> Workload:
    train = plan.run.train
    workload = Workload(
        rows=rows,
        tokens=tokens,
        dtype=DTYPES[train.dtype],
        recompute=recomputed(train.recompute),
        offloads=frozenset(train.offload_regions),
        span=span,
        references=frozenset(op for op, mode in kernel_modes(train.kernels).items() if mode == "reference"),
        fine=any(phase.kind == "experts" for segment in segments for phase in plan.schedule.phases[segment]),
    )
    return workload if device == "cuda" else replace(workload, device="cpu")
