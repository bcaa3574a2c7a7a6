"""Fully sharded data parallel (FSDP2): applies `fully_shard` to the units that a model declares.

Dense units are sharded over the `dense` mesh (dp x cp), experts over the `expert` mesh (edp). A mesh has one
axis, or two for hybrid sharding (HSDP): `replicate` and `shard`. Parameters are stored in the optimizer's
dtype, all-gathered in the compute dtype, and their gradients reduce-scattered in the stored dtype. Gradients
are summed, not averaged: each loss is already divided by the token count of the whole step. Without sharding
the mesh replicates over all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard as ShardPlacement

from braid.choices import Strategy
from braid.nn.units import shard_dims
from braid.schedule.phases import Unit


def shard_units(
    root: nn.Module,
    units: Iterable[Unit],
    *,
    meshes: Mapping[str, DeviceMesh],
    strategy: Strategy,
    compute: torch.dtype,
) -> None:
    """Shard the units, inner before outer, and then the root, which has no parameters outside of units but must
    be an FSDP module itself."""
    # FSDP2 warns about outputs that are views, which in-place writes would break; braid writes nothing in
    # place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    for unit in units:
        module = root.get_submodule(unit.path)
        stored = next((p.dtype for p in module.parameters()), compute)
        param_dtype = None if unit.wide or stored == compute else compute
        _shard(module, meshes[unit.mesh], strategy, param_dtype, stored, shard_dims(module))
    _shard(root, meshes["dense"], strategy, None, compute, {})


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    strategy: Strategy,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    dims: Mapping[str, int],
) -> None:
    placements = {parameter: dims.get(name, 0) for name, parameter in module.named_parameters()}
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=strategy == "all",
        shard_placement_fn=(lambda p: ShardPlacement(placements.get(p, 0))) if dims else None,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
    )
    assert isinstance(sharded, FSDPModule)
    # With the divide factor alone, FSDP2 would reduce with NCCL's PreMulSum; this asks for a plain sum.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
