"""Builds the part of the model that one rank of a plan holds: its pipeline segments, split over tp, ep and etp.
A rank may hold parts of several modules, each built by itself.

Training builds it to run, the memory estimate to count; both get the same layers, kernels and token dispatcher.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from braid import architecture, kernels
from braid.choices import DispatcherName
from braid.distributed.collectives import Groups
from braid.kernels.precision.block_experts import explained
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.nn.dtypes import DTYPES
from braid.nn.moe import token_dispatcher
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.planning.divisibility import local_shape
from braid.planning.plan import Plan
from braid.planning.rules import addressable_tensors
from braid.planning.trained import adapts_experts
from braid.precision import precision_of


def choose_kernels(plan: Plan, device: torch.device) -> kernels.Kernels:
    """The kernels on a device for the layers of a plan, given the local shape of experts."""
    run, shape = plan.run, local_shape(plan.run.model, plan.axes)
    precision = precision_of(run.train.precision)
    chosen = kernels.choose(
        shape,
        plan.layout.kinds(),
        device,
        DTYPES[run.train.dtype],
        run.train.kernels,
        precision.dense,
        expert_rank=run.train.lora.rank if adapts_experts(run.train.lora, plan.layout) else 0,
    )
    if chosen.grouped_mlp is None or shape.moe is None:
        return chosen
    experts = explained(chosen.grouped_mlp, precision, shape.moe, shape.hidden, plan.axes.etp)
    return replace(chosen, grouped_mlp=experts)


@addressable_tensors("model")
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
    run = plan.run
    model = LanguageModel(
        run.model,
        plan.layout,
        chosen,
        groups=groups,
        dispatcher=_dispatcher(run.model, groups, run.mesh.dispatcher if dispatcher is None else dispatcher),
        segments=[segment.index for segment in plan.stages[groups.pp.rank].segments],
        device=device,
        dtype=DTYPES[run.train.dtype],
        stored=_stored(plan),
    )
    model.adapt(run.train.lora)
    model.set_precision(precision_of(run.train.precision))
    return model


def choose_encoder_kernels(plan: Plan, name: str, device: torch.device) -> kernels.Kernels:
    """The kernels on a device for the layers of an encoder."""
    train, encoder = plan.run.train, plan.encoders[name]
    shape = local_shape(encoder.module.model, encoder.axes)
    return kernels.choose(shape, encoder.layout.kinds(), device, DTYPES[train.dtype], train.kernels)


@addressable_tensors("modules")
def build_local_encoder(
    plan: Plan,
    name: str,
    groups: Groups,
    chosen: kernels.Kernels,
    *,
    device: torch.device,
    dispatcher: DispatcherName | None = None,
) -> EncoderModel:
    """The same for an encoder; `groups` are those of its grid."""
    encoder = plan.encoders[name]
    shape, mesh = encoder.module.model, encoder.module.mesh
    asked = mesh.dispatcher if dispatcher is None else dispatcher
    return EncoderModel(
        shape,
        encoder.layout,
        chosen,
        groups=groups,
        # Not all_gather: its ranks must have equally many tokens, and lanes of items differ.
        dispatcher=_dispatcher(shape, groups, "all_to_all" if asked == "auto" else asked),
        segments=[segment.index for segment in encoder.stages[groups.pp.rank].segments],
        device=device,
        dtype=DTYPES[plan.run.train.dtype],
        stored=_stored(plan),
    )


def is_alone(plan: Plan) -> bool:
    """Whether one process holds everything, so that nothing is sharded. Beside other modules, a module on a
    single rank has FSDP too: all modules have the same optimizer."""
    return plan.world == 1 if plan.encoders else plan.grid.size == 1


def _stored(plan: Plan) -> torch.dtype | None:
    """The dtype of weights. FSDP2 shards are the main parameters: fp32 or wider, cast to the compute dtype by
    the all-gather."""
    return None if is_alone(plan) else torch.promote_types(DTYPES[plan.run.train.dtype], torch.float32)


def _dispatcher(shape: architecture.Trunk, groups: Groups, name: DispatcherName) -> Dispatcher | None:
    return (
        None if shape.moe is None else token_dispatcher.choose(shape.moe, shape.hidden, groups, name).function
    )
