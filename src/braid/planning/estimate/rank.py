"""One rank of a stage as data: its groups without communicators, its model without memory."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from braid import kernels
from braid.choices import recomputed
from braid.config import Run
from braid.distributed.collectives import ALONE, Group, Groups
from braid.model.language import LanguageModel
from braid.nn.cost import Portion
from braid.nn.dtypes import DTYPES
from braid.nn.moe import token_dispatcher
from braid.nn.moe.dispatch_plan import Dispatcher
from braid.planning import divisibility
from braid.planning.plan import Plan, span_of


def first_rank(plan: Plan, stage: int) -> Groups:
    """The groups of the first rank of a stage, of which no other holds more."""
    axes = plan.axes

    def group(name: str, size: int, rank: int = 0) -> Group:
        return ALONE if size == 1 else Group(name=name, size=size, rank=rank, handle=None)

    ends = stage in (0, axes.pp - 1)
    runs = divisibility.tp_runs(plan.run.model, plan.layout.kinds(), axes.tp)
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
        world=group("world", plan.world),
        tp_runs=MappingProxyType({length: group(f"tp_run_{length}", length) for length in runs}),
    )


def model_of(plan: Plan, groups: Groups, device: str) -> LanguageModel:
    """What a rank of these groups holds of the model, with the kernels that it would use on a `device`."""
    run, dtype = plan.run, DTYPES[plan.run.train.dtype]
    shape = divisibility.of_one_rank(run.model, plan.axes)
    return LanguageModel(
        run.model,
        plan.layout,
        kernels.choose(shape, plan.layout.kinds(), torch.device(device), dtype),
        groups=groups,
        dispatcher=_dispatcher(run, groups),
        segments=[segment.index for segment in plan.stages[groups.pp.rank].segments],
        device=torch.device("meta"),
        dtype=dtype,
        stored=None if plan.world == 1 else torch.promote_types(dtype, torch.float32),
    )


def _dispatcher(run: Run, groups: Groups) -> Dispatcher | None:
    """DeepEP sends at most what an all-to-all does, and is not at hand everywhere."""
    if run.model.moe is None:
        return None
    asked = "all_to_all" if run.mesh.dispatcher == "deep_ep" else run.mesh.dispatcher
    return token_dispatcher.choose(run.model.moe, run.model.hidden, groups, asked).function


def portion_of(plan: Plan, device: str) -> Portion:
    """What a rank is given in one micro-batch."""
    assert device in ("cpu", "cuda")
    portion = Portion(
        rows=plan.micro_batch_samples // plan.axes.dp,
        tokens=plan.run.data.sequence_tokens,
        dtype=DTYPES[plan.run.train.dtype],
        recompute=recomputed(plan.run.train.recompute),
        span=span_of(plan.run, plan.layout),
        fine=any(phase.kind == "experts" for phases in plan.schedule.phases for phase in phases),
    )
    return portion if device == "cuda" else replace(portion, device="cpu")
