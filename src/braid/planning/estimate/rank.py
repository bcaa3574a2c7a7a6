"""One rank of a pipeline stage without processes: groups without communicators, a model on the meta device."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from braid.choices import kernel_modes, recomputed
from braid.distributed.collectives import ALONE, Group, Groups
from braid.errors import ConfigError
from braid.model.language import LanguageModel
from braid.nn.cost import Workload
from braid.nn.dtypes import DTYPES
from braid.planning import divisibility
from braid.planning.local_model import build_local_model, choose_kernels
from braid.planning.plan import Plan, span_of


def first_rank(plan: Plan, stage: int) -> Groups:
    """The groups of the first rank of a stage: uneven shards are largest on the first rank."""
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
        world=group("world", plan.grid.size),
        tp_runs=MappingProxyType({length: group(f"tp_run_{length}", length) for length in runs}),
    )


def model_of(plan: Plan, groups: Groups, device: str) -> LanguageModel:
    """The model of the rank with these groups, on the meta device, with the kernels it would use on
    `device`."""
    # DeepEP may not be installed here. It sends at most as much as an all-to-all, so count that instead.
    dispatcher = "all_to_all" if plan.run.mesh.dispatcher == "deep_ep" else plan.run.mesh.dispatcher
    chosen = choose_kernels(plan, torch.device(device))
    return build_local_model(plan, groups, chosen, device=torch.device("meta"), dispatcher=dispatcher)


def workload_of(plan: Plan, device: str) -> Workload:
    """The input of a rank in one micro-batch, and what it recomputes."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device}: must be cpu or cuda")
    workload = Workload(
        rows=plan.micro_batch_samples // plan.axes.dp,
        tokens=plan.run.data.sequence_tokens,
        dtype=DTYPES[plan.run.train.dtype],
        recompute=recomputed(plan.run.train.recompute),
        span=span_of(plan.run, plan.layout),
        references=frozenset(
            op for op, mode in kernel_modes(plan.run.train.kernels).items() if mode == "reference"
        ),
        fine=any(phase.kind == "experts" for phases in plan.schedule.phases for phase in phases),
    )
    return workload if device == "cuda" else replace(workload, device="cpu")
