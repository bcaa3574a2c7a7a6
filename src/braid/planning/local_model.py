"""Builds the part of a module that one rank of a plan holds: its pipeline segments, split over tp, ep and etp.

Training builds it to run, the memory estimate to count; both get the same layers, kernels and token dispatcher.
"""

from __future__ import annotations

import torch

from braid import kernels
from braid.choices import DispatcherName
from braid.distributed.collectives import Groups
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.nn.moe import token_dispatcher
from braid.planning.divisibility import local_shape
from braid.planning.modules import ModulePlan
from braid.planning.plan import Plan


def choose_kernels(plan: Plan, device: torch.device) -> kernels.Kernels:
    """The kernels on a device for the layers of a plan, given the local shape of experts."""
    run, shape = plan.run, local_shape(plan.run.model, plan.axes)
    return kernels.choose(shape, plan.layout.kinds(), device, DTYPES[run.train.dtype], run.train.kernels)


def choose_encoder_kernels(plan: Plan, module: ModulePlan, device: torch.device) -> kernels.Kernels:
    """The same for the layers of a module."""
    shape, train = local_shape(module.module.model, module.axes), plan.run.train
    return kernels.choose(shape, module.layout.kinds(), device, DTYPES[train.dtype], train.kernels)


def build_local_model(
    plan: Plan,
    groups: Groups,
    chosen: kernels.Kernels,
    *,
    device: torch.device,
    dispatcher: DispatcherName | None = None,
) -> LanguageModel:
    """The model of the rank with these groups, on a device (possibly meta), with uninitialized weights.
    `dispatcher` overrides `mesh.dispatcher`."""
    run, dtype = plan.run, DTYPES[plan.run.train.dtype]
    token_dispatch = None
    if run.model.moe is not None:
        name = run.mesh.dispatcher if dispatcher is None else dispatcher
        token_dispatch = token_dispatcher.choose(run.model.moe, run.model.hidden, groups, name).function
    return LanguageModel(
        run.model,
        plan.layout,
        chosen,
        groups=groups,
        dispatcher=token_dispatch,
        segments=[segment.index for segment in plan.stages[groups.pp.rank].segments],
        device=device,
        dtype=dtype,
        stored=_stored(plan, groups, dtype),
    )


def build_local_encoder(
    plan: Plan, module: ModulePlan, groups: Groups, chosen: kernels.Kernels, *, device: torch.device
) -> EncoderModel:
    """The part of an encoder of the rank with these groups."""
    shape, dtype = module.module.model, DTYPES[plan.run.train.dtype]
    token_dispatch = None
    if shape.moe is not None:
        name = module.module.mesh.dispatcher
        token_dispatch = token_dispatcher.choose(shape.moe, shape.hidden, groups, name).function
    return EncoderModel(
        shape,
        module.layout,
        chosen,
        groups=groups,
        dispatcher=token_dispatch,
        segments=[segment.index for segment in module.stages[groups.pp.rank].segments],
        device=device,
        dtype=dtype,
        stored=_stored(plan, groups, dtype),
    )


def _stored(plan: Plan, groups: Groups, dtype: torch.dtype) -> torch.dtype | None:
    """FSDP2 shards are the main parameters: fp32 or wider, cast to the compute dtype by the all-gather."""
    resident = plan.world == 1 if plan.encoders else groups.world.size == 1
    return None if resident else torch.promote_types(dtype, torch.float32)
