"""Builds a rank's training state from a plan: model chunk on the meta device, FSDP2 sharding, optimizer.

A single process allocates the model on its device in the compute dtype, and AdamW keeps fp32 main parameters.
With several ranks the model is created on the meta device, sharded, and only the shards get memory; these are
fp32 already, and FSDP2 casts them to the compute dtype when it all-gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from braid import kernels
from braid.distributed.collectives import Group, Groups
from braid.distributed.links import close_channels, open_channels
from braid.distributed.mesh import close_mesh, dense_mesh, expert_mesh
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.engine.weights import ResidentWeights
from braid.errors import ConfigError
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.optim.adamw import AdamW
from braid.optim.shards import local
from braid.planning.local_model import build_local_model, choose_kernels
from braid.planning.plan import Plan, whole_model
from braid.train.device import Device
from braid.train.state import JobState, State


@contextmanager
def state_context(plan: Plan, device: Device, groups: Groups, job: Group | None = None) -> Iterator[JobState]:
    """`make_state`, or `make_outside_state` on a rank outside the grid, with its communicators destroyed on
    exit. `job` are all ranks, by default those of the grid."""
    job = groups.world if job is None else job
    meshes = open_meshes(plan, device, groups)
    inside = job.rank in plan.grid.ranks
    state = (
        make_state(plan, device, groups, meshes, job=job)
        if inside
        else make_outside_state(plan, device, job, meshes)
    )
    try:
        yield state
    finally:
        close_channels(state.channels if isinstance(state, State) else {})
        for mesh in meshes.values():
            close_mesh(mesh, groups)


def make_state(
    plan: Plan,
    device: Device,
    groups: Groups = Groups(),
    meshes: Mapping[str, DeviceMesh] | None = None,
    chosen: kernels.Kernels | None = None,
    job: Group | None = None,
) -> State:
    """A model with uninitialised weights and its optimizer, on a rank of the grid. Collective over the job,
    whose other ranks call `make_outside_state`. `meshes` defaults to new device meshes, `chosen` to the fastest
    available kernels, `job` to the ranks of the grid."""
    job = groups.world if job is None else job
    # Outside the grid all groups are those of a process alone, which would hold the whole model.
    assert job.rank in plan.grid.ranks, f"rank {job.rank} is outside the grid"
    _check_memory(plan, device)
    model = make_model(plan, device, groups, chosen)
    trained = plan.trained(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if groups.world.size > 1:
        _shard(model, plan, device, open_meshes(plan, device, groups) if meshes is None else meshes)
    optimizer = make_optimizer(plan, model)
    units = [unit.path for unit in model.units()]
    single = groups.world.size == 1
    return State(
        model=model,
        optimizer=optimizer,
        plan=plan,
        job=job,
        device=device.torch,
        keeper=ResidentWeights(model, units, optimizer) if single else FsdpWeights(model, units),
        names=frozenset(whole_model(plan).canonical()),
        channels=open_channels(plan.grid, job.rank, plan.schedule.channels()),
    )


def make_optimizer(plan: Plan, model: LanguageModel, kind: type[AdamW] = AdamW) -> AdamW:
    """AdamW on the trained parameters of a rank's part of the model."""
    optim = plan.run.optim
    return kind(
        {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad},
        decaying=model.decaying(),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        kernels=model.kernels.optimizer.function,
        lr_shares={} if plan.selection is None else plan.selection.shares_of(model),
        device=model.device,
    )


def make_outside_state(
    plan: Plan, device: Device, job: Group, meshes: Mapping[str, DeviceMesh] | None = None
) -> JobState:
    """The state of a rank that is not in the grid: no part of the model. Collective over the job."""
    if meshes is None:
        open_meshes(plan, device, Groups())  # communicators are created by all ranks of the job together
    open_channels(plan.grid, job.rank, plan.schedule.channels())
    names = frozenset(whole_model(plan).canonical())
    state = JobState(plan=plan, job=job, device=device.torch, names=names)
    state.progress.idle = True
    return state


def open_meshes(plan: Plan, device: Device, groups: Groups) -> dict[str, DeviceMesh]:
    """The device meshes that dense and expert weights are sharded over; empty for a grid of one rank.
    Collective over the job: a rank outside the grid gets meshes of itself."""
    if plan.grid.size == 1:
        return {}
    kind, axes = device.torch.type, plan.axes
    return {
        "dense": dense_mesh(groups, plan.grid, device_type=kind, replicate=axes.dense_copies),
        "expert": expert_mesh(groups, plan.grid, device_type=kind, replicate=axes.expert_copies),
    }


def make_model(
    plan: Plan, device: Device, groups: Groups, chosen: kernels.Kernels | None = None
) -> LanguageModel:
    """This rank's part of the model, on the meta device unless the process is the only one."""
    if chosen is None:
        chosen = choose_kernels(plan, device.torch)
    single = groups.world.size == 1
    return build_local_model(plan, groups, chosen, device=device.torch if single else torch.device("meta"))


def _shard(model: LanguageModel, plan: Plan, device: Device, meshes: Mapping[str, DeviceMesh]) -> None:
    """Shard the model with FSDP2 and allocate the shards."""
    shard_units(
        model,
        model.units(),
        meshes=meshes,
        strategy=plan.run.mesh.shard,
        compute=model.dtype,
    )
    model.to_empty(device=device.torch)
    model.device = device.torch
    # Vocabulary padding is in no checkpoint, so nothing else would ever initialise it.
    for tensor in model.tensors().values():
        local(tensor).zero_()


def _check_memory(plan: Plan, device: Device) -> None:
    """Reject a model whose weights, gradients and Adam moments cannot fit on the device, however sharded."""
    dtype = DTYPES[plan.run.train.dtype]
    main, model = max(dtype.itemsize, 4), whole_model(plan)
    trained = plan.trained(model)
    learned = sum(parameter.numel() for name, parameter in model.named_parameters() if name in trained)
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
