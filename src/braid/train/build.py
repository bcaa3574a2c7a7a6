"""Builds a rank's training state from a plan: its parts of modules, their FSDP2 sharding, their optimizers.

A single process allocates the model on its device in the compute dtype, and AdamW keeps fp32 main parameters.
With several ranks the model is created on the meta device, sharded, and only the shards get memory; these are
fp32 already, and FSDP2 casts them to the compute dtype when it all-gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from braid import kernels
from braid.choices import Strategy
from braid.distributed.collectives import Group, Groups
from braid.distributed.groups import close_groups, open_groups
from braid.distributed.links import close_channels, open_channels
from braid.distributed.mesh import close_mesh, dense_mesh, expert_mesh
from braid.distributed.transfer import EdgeChannel, close_edges, open_edges
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.engine.weights import ResidentWeights
from braid.errors import ConfigError
from braid.launch.process import all_gather_json
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.model.stacked import StackedModel
from braid.nn.dtypes import DTYPES
from braid.optim.adamw import AdamW
from braid.optim.kinds import kinds_of, matrices_of
from braid.optim.matrix_exchange import Part, Parts
from braid.optim.muon import Muon, held_matrices
from braid.optim.shards import local, local_shard
from braid.planning import divisibility, trained
from braid.planning.local_model import (
    build_local_encoder,
    build_local_model,
    choose_encoder_kernels,
    choose_kernels,
    is_alone,
)
from braid.planning.plan import Plan, canonical_names, whole_model
from braid.schedule import Channel
from braid.schedule.graph import LANGUAGE
from braid.train.device import Device
from braid.train.module_state import ModuleState
from braid.train.state import JobState, State
from braid.train.step_graphs import open_graphs


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """What the ranks of a job open besides the groups of the language model."""

    meshes: Mapping[str, DeviceMesh]
    """Those over which the language model is sharded."""
    encoders: Mapping[str, tuple[Groups, Mapping[str, DeviceMesh]]]
    """The groups and meshes of every other module."""
    channels: Mapping[Channel, Group]
    edges: Mapping[EdgeChannel, Group]


def open_job(
    plan: Plan,
    device: Device,
    groups: Groups,
    job: Group,
    meshes: Mapping[str, DeviceMesh] | None = None,
    timeout: timedelta | None = None,
) -> Communicators:
    """Open all of them, with the `timeout` of a collective. Collective over the job. `groups` are those of the
    language model; `meshes` too, if they are open."""
    if meshes is None:
        meshes = open_meshes(plan, device, groups, timeout=timeout)
    encoders = {name: open_module(plan, name, device, job, timeout) for name in plan.encoders}
    channels = _open_pipes(plan, job, timeout)
    edges = _open_edges(plan, device, job, timeout)
    return Communicators(meshes=meshes, encoders=encoders, channels=channels, edges=edges)


def close_job(opened: Communicators, groups: Groups) -> None:
    """Destroy them, but not `groups`."""
    close_channels(opened.channels)
    close_edges(opened.edges)
    for mesh in opened.meshes.values():
        close_mesh(mesh, groups)
    for own, meshes in opened.encoders.values():
        for mesh in meshes.values():
            close_mesh(mesh, own)
        close_groups(own)


@contextmanager
def state_context(
    plan: Plan,
    device: Device,
    groups: Groups,
    job: Group | None = None,
    timeout: timedelta | None = None,
) -> Iterator[JobState]:
    """`make_state`, or `make_outside_state` on a rank outside the language model's grid, with all communicators
    destroyed on exit but `groups`, those of the language model. `job` are all ranks, by default those of the
    grid. `timeout` is that of a collective."""
    job = groups.world if job is None else job
    opened = open_job(plan, device, groups, job, timeout=timeout)
    inside = job.rank in plan.grid.ranks
    try:
        yield (
            make_state(plan, device, groups, job=job, opened=opened)
            if inside
            else make_outside_state(plan, device, job, opened)
        )
    finally:
        close_job(opened, groups)


def make_state(
    plan: Plan,
    device: Device,
    groups: Groups = Groups(),
    meshes: Mapping[str, DeviceMesh] | None = None,
    chosen: kernels.Kernels | None = None,
    job: Group | None = None,
    opened: Communicators | None = None,
) -> State:
    """The modules of a rank of the language model's grid, with uninitialised weights, and their optimizers.
    Collective over the job, whose other ranks call `make_outside_state`. `opened` defaults to new
    communicators, with `meshes` if given; `chosen` to the fastest kernels for the language model, `job` to the
    ranks of the grid."""
    job = groups.world if job is None else job
    # Outside the grid all groups are those of a process alone, which would hold the whole model.
    assert job.rank in plan.grid.ranks, f"rank {job.rank} is outside the grid"
    _check_memory(plan, device)
    opened = open_job(plan, device, groups, job, meshes) if opened is None else opened
    model = make_model(plan, device, groups, chosen)
    language = _module(plan, LANGUAGE, model, device, opened.meshes)
    state = State(
        plan=plan,
        job=job,
        device=device.torch,
        names=frozenset(canonical_names(plan)),
        modules={LANGUAGE: language, **_encoders(plan, device, job, opened)},
        channels=opened.channels,
        edges=opened.edges,
    )
    state.graphs = open_graphs(state)
    return state


def make_outside_state(plan: Plan, device: Device, job: Group, opened: Communicators | None = None) -> JobState:
    """The state of a rank that is not in the language model's grid: encoders, or nothing. Collective over the
    job."""
    opened = open_job(plan, device, Groups(), job) if opened is None else opened
    state = JobState(
        plan=plan,
        job=job,
        device=device.torch,
        names=frozenset(canonical_names(plan)),
        modules=_encoders(plan, device, job, opened),
        channels=opened.channels,
        edges=opened.edges,
    )
    return state


def open_module(
    plan: Plan, name: str, device: Device, job: Group, timeout: timedelta | None = None
) -> tuple[Groups, dict[str, DeviceMesh]]:
    """The groups and meshes of a module besides the language model. Collective over the job."""
    each = plan.encoders[name]
    runs = divisibility.tp_runs(each.module.model, each.layout.kinds(), each.axes.tp)
    groups = open_groups(each.grid, job.rank, tp_runs=runs, timeout=timeout)
    return groups, open_meshes(plan, device, groups, name, timeout)


def open_meshes(
    plan: Plan, device: Device, groups: Groups, module: str = LANGUAGE, timeout: timedelta | None = None
) -> dict[str, DeviceMesh]:
    """The device meshes that dense and expert weights of a module are sharded over; empty where weights stay
    whole. Collective over the job: a rank outside the grid gets meshes of itself."""
    if is_alone(plan):
        return {}
    own = plan if module == LANGUAGE else plan.encoders[module]
    grid, axes, kind = own.grid, own.axes, device.torch.type
    return {
        "dense": dense_mesh(groups, grid, device_type=kind, replicate=axes.dense_copies, timeout=timeout),
        "expert": expert_mesh(groups, grid, device_type=kind, replicate=axes.expert_copies, timeout=timeout),
    }


def _encoders(plan: Plan, device: Device, job: Group, opened: Communicators) -> dict[str, ModuleState]:
    """The encoders of this rank."""
    held: dict[str, ModuleState] = {}
    for name, each in plan.encoders.items():
        groups, meshes = opened.encoders[name]
        if job.rank in each.grid.ranks:
            chosen = choose_encoder_kernels(plan, name, device.torch)
            place = device.torch if is_alone(plan) else torch.device("meta")
            model = build_local_encoder(plan, name, groups, chosen, device=place)
            held[name] = _module(plan, name, model, device, meshes)
    return held


def _module(
    plan: Plan,
    name: str,
    model: LanguageModel | EncoderModel,
    device: Device,
    meshes: Mapping[str, DeviceMesh],
) -> ModuleState:
    """A module with its optimizer, sharded over the meshes if the plan says so."""
    selection = plan.selection_of(name)
    learns = trained.parameters_of(model, selection)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in learns)
    sharded = not is_alone(plan)
    if sharded:
        mesh = plan.run.mesh if name == LANGUAGE else plan.encoders[name].module.mesh
        _shard(model, mesh.shard, device, meshes)
    optimizer = make_optimizer(plan, model, module=name)
    units = [unit.path for unit in model.units()]
    return ModuleState(
        name=name,
        model=model,
        optimizer=optimizer,
        keeper=FsdpWeights(model, units) if sharded else ResidentWeights(model, units, optimizer),
        trained_buffers=trained.buffers_of(model, selection),
        prefix=plan.prefix_of(name),
        first_segment=0 if name == LANGUAGE else plan.encoders[name].first_segment,
    )


def make_optimizer(plan: Plan, model: StackedModel, kind: type[AdamW] = AdamW, module: str = LANGUAGE) -> AdamW:
    """AdamW on the trained parameters of a rank's part of a module, with Muon if the run says so. Collective
    over the pipeline stage."""
    optim, selection = plan.run.optim, plan.selection_of(module)
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return kind(
        learned,
        decaying=model.decaying(),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        kernels=model.kernels.optimizer.function,
        lr_shares=_lr_shares(plan, model, selection),
        device=model.device,
        muon=_muon(plan, model, learned) if optim.name == "muon" else None,
    )


def _lr_shares(plan: Plan, model: StackedModel, selection: trained.Selection | None) -> dict[str, float]:
    """By parameter, factors on the learning rate: those of its kind, times those of its name."""
    optim, named = plan.run.optim, {} if selection is None else selection.shares_of(model)
    if not optim.lr_by_kind:
        return named
    kinds = kinds_of(model.canonical())
    own = {name: optim.lr_by_kind[kind] / optim.lr for name, kind in kinds.items() if kind in optim.lr_by_kind}
    return {name: named.get(name, 1.0) * own.get(name, 1.0) for name in named | own}


def _muon(plan: Plan, model: StackedModel, learned: Mapping[str, nn.Parameter]) -> Muon:
    """Muon for the matrices among the trained parameters of a rank's part of a module."""
    group, canonical = model.groups.slab, model.canonical()
    chosen = matrices_of(canonical, plan.run.optim.muon.kinds) & learned.keys()
    kept = {name: local_shard(learned[name]) for name in chosen}
    tensors = {
        name: (tensor, tensor.within(kept[tensor.parameter].shard))
        for name, tensor in canonical.items()
        if tensor.parameter in chosen
    }

    def tell(mine: Parts) -> list[Parts]:
        told = all_gather_json(dict(mine), group)
        return [
            {name: Part(tuple(o), tuple(s), first) for name, (o, s, first) in each.items()} for each in told
        ]

    matrices = held_matrices(tensors, chosen, {name: each.first for name, each in kept.items()})
    return Muon(plan.run.optim.muon, matrices, model.dtype, group, tell)


def _open_pipes(plan: Plan, job: Group, timeout: timedelta | None) -> dict[Channel, Group]:
    """The channels of this rank within the pipelines of its modules. Collective over the job."""
    grids = {LANGUAGE: plan.grid, **{name: each.grid for name, each in plan.encoders.items()}}
    opened: dict[Channel, Group] = {}
    for name, grid in grids.items():
        opened |= open_channels(grid, job.rank, plan.schedule.pipes(name), timeout=timeout)
    return opened


def _open_edges(plan: Plan, device: Device, job: Group, timeout: timedelta | None) -> dict[EdgeChannel, Group]:
    """The communicators of rows and of their gradients, over the ranks of both sides. Collective over the
    job."""
    graph = plan.schedule.graph
    sides = {
        edge.name: (*graph.segments[edge.source].ranks, *graph.segments[edge.target].ranks)
        for edge in graph.edges
    }
    channels = {(direction, name): ranks for name, ranks in sides.items() for direction in ("F", "B")}
    return open_edges(channels, job.rank, device.torch, timeout=timeout) if channels else {}


def make_model(
    plan: Plan, device: Device, groups: Groups, chosen: kernels.Kernels | None = None
) -> LanguageModel:
    """This rank's part of the language model, on the meta device unless weights stay where they are."""
    if chosen is None:
        chosen = choose_kernels(plan, device.torch)
    return build_local_model(
        plan, groups, chosen, device=device.torch if is_alone(plan) else torch.device("meta")
    )


def _shard(model: StackedModel, strategy: Strategy, device: Device, meshes: Mapping[str, DeviceMesh]) -> None:
    """Shard a model with FSDP2 and allocate the shards."""
    shard_units(model, model.units(), meshes=meshes, strategy=strategy, compute=model.dtype)
    model.to_empty(device=device.torch)
    model.device = device.torch
    # Vocabulary padding is in no checkpoint, so nothing else would ever initialise it.
    for tensor in model.tensors().values():
        local(tensor).zero_()


def _check_memory(plan: Plan, device: Device) -> None:
    """Reject a model whose weights, gradients and Adam moments cannot fit on the device, however sharded."""
    dtype = DTYPES[plan.run.train.dtype]
    main, model = max(dtype.itemsize, 4), whole_model(plan)
    learns = plan.trained(model)
    learned = sum(parameter.numel() for name, parameter in model.named_parameters() if name in learns)
    # Main parameter, its gradient and two moments; a narrower model adds its own copy and that one's gradient.
    narrow = 0 if dtype.itemsize == main else 2 * dtype.itemsize
    frozen = (model.size().total - learned) * dtype.itemsize
    needed = (learned * (4 * main + narrow) + frozen) / plan.grid.size
    available = device.memory_total()
    if needed > available:
        raise ConfigError(
            f"weights, gradients and moments take {needed / 2**30:,.0f} GiB on each rank, {device.name} has "
            f"{available / 2**30:,.0f} GiB: choose a smaller model, a larger device or more ranks"
        )
