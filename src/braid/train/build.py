"""From a plan to the state of a run: this rank's part of the model, sharded, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from braid import kernels
from braid.distributed.collectives import Groups
from braid.distributed.links import close_channels, open_channels
from braid.distributed.mesh import close_mesh, dense_mesh, expert_mesh
from braid.engine.fsdp import shard_units
from braid.engine.fsdp_weights import FsdpWeights
from braid.engine.weights import WholeWeights
from braid.errors import ConfigError
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.nn.moe import token_dispatcher
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.optim.adamw import AdamW
from braid.optim.shards import local
from braid.planning import divisibility
from braid.planning.plan import Plan, size, whole_model
from braid.train.device import Device
from braid.train.state import State


@contextmanager
def opened_state(plan: Plan, device: Device, groups: Groups) -> Iterator[State]:
    """`make_state`, whose communicators are given back at the end of the `with`."""
    meshes = open_meshes(plan, device, groups)
    state = make_state(plan, device, groups, meshes)
    try:
        yield state
    finally:
        close_channels(state.channels)
        for mesh in meshes.values():
            close_mesh(mesh, groups)


def make_state(
    plan: Plan,
    device: Device,
    groups: Groups = Groups(),
    meshes: Mapping[str, DeviceMesh] | None = None,
    chosen: kernels.Kernels | None = None,
) -> State:
    """A model and its optimizer, with weights still unset. All ranks make theirs together, over `meshes` where
    there are several. `chosen` are kernels to use in place of the fastest."""
    run = plan.run
    _check_memory(plan, device)
    model = make_model(plan, device, groups, chosen)
    if groups.world.size > 1:
        _shard(model, plan, device, open_meshes(plan, device, groups) if meshes is None else meshes)
    optimizer = AdamW(
        dict(model.named_parameters()),
        decaying=model.decaying(),
        betas=run.optim.betas,
        eps=run.optim.eps,
        weight_decay=run.optim.weight_decay,
    )
    held = [unit.path for unit in model.units()]
    alone = groups.world.size == 1
    return State(
        model=model,
        optimizer=optimizer,
        plan=plan,
        keeper=WholeWeights(model, held, optimizer) if alone else FsdpWeights(model, held),
        names=frozenset(whole_model(plan).canonical()),
        channels=open_channels(plan.grid, groups.world.rank, plan.schedule.channels()),
    )


def open_meshes(plan: Plan, device: Device, groups: Groups) -> dict[str, DeviceMesh]:
    """What dense weights and experts are sharded over; nothing where a process is alone."""
    if groups.world.size == 1:
        return {}
    on, axes = device.torch.type, plan.axes
    return {
        "dense": dense_mesh(groups, plan.grid, device_type=on, replicate=axes.dense_copies),
        "expert": expert_mesh(groups, plan.grid, device_type=on, replicate=axes.expert_copies),
    }


def make_model(
    plan: Plan, device: Device, groups: Groups, chosen: kernels.Kernels | None = None
) -> LanguageModel:
    """This rank's part of the model. With other ranks it has no memory yet: its shards will."""
    run, dtype = plan.run, DTYPES[plan.run.train.dtype]
    if chosen is None:
        shape = divisibility.of_one_rank(run.model, plan.axes)
        chosen = kernels.choose(shape, plan.layout.kinds(), device.torch, dtype)
    alone = groups.world.size == 1
    return LanguageModel(
        run.model,
        plan.layout,
        chosen,
        groups=groups,
        dispatcher=_dispatcher(plan, groups),
        segments=[segment.index for segment in plan.stages[groups.pp.rank].segments],
        device=device.torch if alone else torch.device("meta"),
        dtype=dtype,
        stored=None if alone else torch.promote_types(dtype, torch.float32),
    )


def _dispatcher(plan: Plan, groups: Groups) -> Dispatcher | None:
    run = plan.run
    if run.model.moe is None:
        return None
    return token_dispatcher.choose(run.model.moe, run.model.hidden, groups, run.mesh.dispatcher).function


def _shard(model: LanguageModel, plan: Plan, device: Device, meshes: Mapping[str, DeviceMesh]) -> None:
    """Shard the model, and give its shards memory: zeros, for no checkpoint fills padding of the vocabulary."""
    shard_units(
        model,
        model.units(),
        meshes=meshes,
        strategy=plan.run.mesh.shard,
        compute=model.dtype,
    )
    model.to_empty(device=device.torch)
    model.device = device.torch
    for tensor in model.tensors().values():
        local(tensor).zero_()


def _check_memory(plan: Plan, device: Device) -> None:
    """Refuse a model whose weights, gradients and moments alone exceed the device, whoever shares it."""
    dtype = DTYPES[plan.run.train.dtype]
    main = max(dtype.itemsize, 4)
    apart = 0 if dtype.itemsize == main else 2 * dtype.itemsize  # the model's own copy and its gradients
    needed, there = size(plan).total * (4 * main + apart) / plan.world, device.memory_total()
    if needed > there:
        raise ConfigError(
            f"weights, gradients and moments take {needed / 2**30:,.0f} GiB on each rank, {device.name} has "
            f"{there / 2**30:,.0f} GiB: choose a smaller model, a larger device or more ranks"
        )
