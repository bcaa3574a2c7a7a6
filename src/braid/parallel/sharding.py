"""Sharded data parallelism: FSDP2 on the units that a model declares.

Ranks that hold the same weights share keeping them: the `dense` mesh for most units, the `expert` mesh for
experts. A mesh has one axis, or two, `replicate` and `shard`; a strategy that shards nothing replicates over
all ranks. Weights are stored as the optimizer wants them, gathered in the dtype that computes, and reduced
in the stored one. Reductions are plain sums: losses are divided by counts of the whole step beforehand.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from braid.nn.canonical import Shard

Strategy = Literal["none", "optimizer", "gradients", "all"]
"""What data-parallel ranks share instead of copying: nothing; the optimizer's state; gradients as well; weights
as well."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that are gathered and released together."""

    module: nn.Module
    segment: int
    """The segment of the model whose backward is the last of a micro-batch to use it here."""
    mesh: Literal["dense", "expert"] = "dense"
    wide: bool = False
    """Whether it computes in the stored dtype, whatever the rest computes in."""
    alone: bool = False
    """Whether it is used while what surrounds it is not gathered."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dim that is sharded, by parameter name; 0 where nothing is said."""
    methods: tuple[str, ...] = ()
    """Methods besides `forward` that use its weights."""


class Kept(NamedTuple):
    """What a rank keeps of a parameter."""

    shard: Shard | None
    """None where it keeps all of it."""
    first: bool
    """Whether no rank before it keeps the same."""


def shard_units(
    root: nn.Module,
    units: Iterable[Unit],
    *,
    meshes: Mapping[str, DeviceMesh],
    strategy: Strategy,
    compute: torch.dtype,
    root_methods: tuple[str, ...],
) -> None:
    """Shard the units of a model, inner ones first, and then the model itself, which has no weights beside
    them. `root_methods` are those that stand for its `forward`."""
    # Outputs may be views; nothing here is ever written in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    for unit, stored in set_apart(units, compute):
        narrow = None if unit.wide or stored == compute else compute
        _shard(unit.module, meshes[unit.mesh], strategy, narrow, stored, unit.dims)
        for method in unit.methods:
            register_fsdp_forward_method(unit.module, method)
    _shard(root, meshes["dense"], strategy, None, compute, {})
    for method in root_methods:
        register_fsdp_forward_method(root, method)


def set_apart(units: Iterable[Unit], compute: torch.dtype) -> Iterator[tuple[Unit, torch.dtype]]:
    """The units that are sharded by themselves, and the dtype that each is stored in. One that is there for its
    dtype is not, where whatever surrounds it has the same."""
    for unit in units:
        stored = next((p.dtype for p in unit.module.parameters()), compute)
        if unit.alone or not (unit.wide and stored == compute):
            yield unit, stored


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    strategy: Strategy,
    narrow: torch.dtype | None,
    stored: torch.dtype,
    dims: Mapping[str, int],
) -> None:
    placements = {parameter: dims.get(name, 0) for name, parameter in module.named_parameters(recurse=False)}
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=strategy == "all",
        shard_placement_fn=(lambda p: ShardPlacement(placements.get(p, 0))) if dims else None,
        mp_policy=MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=stored, cast_forward_inputs=False),
    )
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def before_backward(
    root: nn.Module, modules: Iterable[nn.Module], strategy: Strategy, *, last: bool, done: bool
) -> None:
    """What the next backward does with gradients and gathered weights of these units. `last` is the last
    micro-batch that they see in a step, `done` the last backward of the step on this rank."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or strategy in ("gradients", "all"), recurse=False)
            module.set_reshard_after_backward(last or strategy == "all", recurse=False)
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(done)


def release(root: nn.Module) -> None:
    """Let go of gathered weights, so that the next forward gathers what the optimizer has made of them."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def kept_of(parameter: Tensor) -> Kept:
    """What this rank keeps of a parameter, or of a gradient or moment of its shape."""
    if not isinstance(parameter, DTensor):
        return Kept(None, first=True)
    mesh, (*_, placement) = parameter.device_mesh, parameter.placements
    assert isinstance(placement, ShardPlacement)
    shard_axis = mesh.ndim - 1
    size, rank = mesh.size(shard_axis), mesh.get_local_rank(shard_axis)
    entries = parameter.shape[placement.dim]
    each = -(-entries // size)
    start, stop = min(rank * each, entries), min((rank + 1) * each, entries)
    assert parameter.to_local().shape[placement.dim] == stop - start, "not where torch puts it"
    first = all(mesh.get_local_rank(axis) == 0 for axis in range(shard_axis))
    return Kept(Shard(placement.dim, start, stop), first=first)


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank keeps: the same memory, as a plain tensor without a
    past."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
