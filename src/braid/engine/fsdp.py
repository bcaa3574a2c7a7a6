"""Sharded data parallelism: FSDP2 on the units that a model declares.

Ranks that hold the same weights share keeping them: the `dense` mesh for most units, the `expert` mesh for
experts. A mesh has one axis, or two, `replicate` and `shard`; a strategy that shards nothing replicates over
all ranks. Weights are stored as the optimizer wants them, gathered in the dtype that computes, and reduced
in the stored one. Reductions are plain sums: losses are divided by counts of the whole step beforehand.
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
from braid.nn.moe.experts import SHARD_DIMS, Experts
from braid.schedule.phases import Unit


def shard_units(
    root: nn.Module,
    units: Iterable[Unit],
    *,
    meshes: Mapping[str, DeviceMesh],
    strategy: Strategy,
    compute: torch.dtype,
) -> None:
    """Shard the units of a model, inner ones first, and then the model itself, which has no weights beside
    them."""
    # Outputs may be views; nothing here is ever written in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    for unit in units:
        module = root.get_submodule(unit.path)
        stored = next((p.dtype for p in module.parameters()), compute)
        narrow = None if unit.wide or stored == compute else compute
        _shard(module, meshes[unit.mesh], strategy, narrow, stored, shard_dims(module))
    _shard(root, meshes["dense"], strategy, None, compute, {})


def shard_dims(module: nn.Module) -> Mapping[str, int]:
    """The dim that is sharded of each parameter of a unit, by name; 0 where nothing is said."""
    return SHARD_DIMS if isinstance(module, Experts) else {}


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
