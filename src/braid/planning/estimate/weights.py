"""What a rank holds of weights: the units that are gathered together, and the shards that it keeps of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from braid.engine.fsdp import shard_dims
from braid.engine.weights import parameters_of_units
from braid.kernels.grouped_mlp.product import WritesInPlace
from braid.model.declaration import chains, form_of
from braid.model.language import LanguageModel
from braid.nn.canonical import Shard
from braid.nn.cost import Call
from braid.nn.moe.experts import SHARD_DIMS, Experts
from braid.optim.gradients import copied
from braid.planning.divisibility import Sizes
from braid.planning.plan import Plan
from braid.schedule import Act, Ops, Phase
from braid.schedule.phases import Unit


@dataclass(frozen=True, kw_only=True)
class HeldUnit:
    """The weights of one unit, on the rank that keeps most of them."""

    name: str
    """The path of its module."""
    part: str
    """The part of the model that it belongs to, as `LanguageModel.costs` names it."""
    mesh: str
    shards: int
    """Ranks that share it."""
    copies: int
    """Times that all of it is kept."""
    gathered: int
    """Weights that the rank computes with, and what fills up uneven shards."""
    kept: int
    """Weights that the rank keeps."""
    stored: int
    """Bytes of a weight as it is kept."""
    computed: int
    """Bytes of a weight as it is used."""
    in_place: bool
    """Whether its gradients are written where they accumulate, in the optimizer's dtype."""

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.stored

    @property
    def gathered_bytes(self) -> int:
        return self.gathered * self.computed


def held_units(model: LanguageModel, plan: Plan, stage: int) -> list[HeldUnit]:
    """The units of a stage, in the order of forward as far as that has one."""
    phases = [phase for segment in plan.schedule.held(stage) for phase in phases_of(plan, segment)]
    # Backward comes first to the last phase that uses a unit: from there on it has a gradient.
    parts = {unit: part_of(phase) for phase in phases for unit in phase.units}
    units, names = model.units(), dict(model.named_parameters())
    held = parameters_of_units(model, [unit.path for unit in units])
    return [
        _held(unit, parts[unit.path], [(name, names[name]) for name in held[unit.path]], model, plan.axes)
        for unit in units
        if held[unit.path]
    ]


def phases_of(plan: Plan, segment: int) -> tuple[Phase, ...]:
    """The phases of a segment; where all of it is one phase, those that it could be cut into."""
    phases = plan.schedule.phases[segment]
    if [phase.kind for phase in phases] != ["segment"]:
        return phases
    return chains(plan.layout, form_of(plan.run.model, plan.run.train.dtype))[segment].phases


def part_of(phase: Phase) -> str:
    """The part of the model that a phase runs, as costs name it; one that hands on, "pass", runs none."""
    if phase.depth is not None:
        return f"mtp.{phase.depth}"
    if phase.block is not None:
        return f"blocks.{phase.block}"
    return {"embed": "embedding", "final_norm": "head"}.get(phase.kind, phase.kind)


def _held(
    unit: Unit, part: str, weights: list[tuple[str, nn.Parameter]], model: LanguageModel, axes: Sizes
) -> HeldUnit:
    shards, copies = _sharing(unit.mesh, axes)
    module = model.get_submodule(unit.path)
    dims = shard_dims(module)
    sizes = [_shard_size(p, dims.get(name.rpartition(".")[2], 0), shards) for name, p in weights]
    stored = weights[0][1].dtype
    in_place = isinstance(module, Experts) and isinstance(module.grouped_mlp, WritesInPlace)
    return HeldUnit(
        name=unit.path,
        part=part,
        mesh=unit.mesh,
        shards=shards,
        copies=copies,
        gathered=shards * sum(sizes),
        kept=sum(sizes),
        stored=stored.itemsize,
        computed=stored.itemsize if unit.wide else min(stored.itemsize, model.dtype.itemsize),
        in_place=in_place and model.dtype.itemsize < torch.float32.itemsize,
    )


def _sharing(mesh: str, axes: Sizes) -> tuple[int, int]:
    """Ranks that share a unit of a mesh, and copies of their shards."""
    if mesh == "expert":
        return axes.edp // axes.expert_copies, axes.expert_copies
    return axes.dp * axes.cp // axes.dense_copies, axes.dense_copies


def _shard_size(parameter: nn.Parameter, dim: int, shards: int) -> int:
    """Entries of the first shard, the largest."""
    return -(-parameter.shape[dim] // shards) * prod(parameter.shape[:dim] + parameter.shape[dim + 1 :])


# --------------------------------------------------------------------------------------------- calls


def most_gathered(units: list[HeldUnit], ops: Ops) -> int:
    """The most bytes of gathered weights that are there at a time, as the ops of a rank gather and release."""
    sizes = {unit.name: unit.gathered_bytes for unit in units}
    there = most = 0
    for op in ops:
        if op.act is Act.UNSHARD:
            there += sizes.get(op.unit or "", 0)
            most = max(most, there)
        elif op.act is Act.RESHARD:
            there -= sizes.get(op.unit or "", 0)
    return most


def sharding_calls(units: list[HeldUnit], ops: Ops) -> Iterator[Call]:
    """What sharded data parallelism sends in a step: weights that are gathered, gradients that are summed."""
    times = Counter((op.unit, op.act) for op in ops if op.act.shards)
    for unit in units:
        family = "edp" if unit.mesh == "expert" else "dp_cp"
        gathers, sums = times[unit.name, Act.UNSHARD], times[unit.name, Act.REDUCE_GRAD]
        what = "experts" if unit.mesh == "expert" else "dense"
        if unit.shards > 1:
            weights, grads = unit.kept * unit.computed, unit.gathered * unit.stored
            yield Call("gather", family, unit.shards, f"{what} weights", weights, gathers)
            yield Call("scatter", family, unit.shards, f"{what} gradients", grads, sums)
        if unit.copies > 1:
            yield Call("sum", family, unit.copies, f"{what} gradients of copies", unit.kept_bytes, sums)


def copy_calls(model: LanguageModel, plan: Plan) -> Iterator[Call]:
    """Sums over ranks that hold the same part of a weight: one for each group and dtype in a step."""
    alone = plan.world == 1
    shards = {name: None if alone else _first_shard(name, p, plan) for name, p in model.named_parameters()}
    dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    totals: dict[tuple[str, int, torch.dtype], int] = {}
    for each in copied(model.canonical().values(), shards):
        shard, shape = shards[each.parameter], shapes[each.parameter]
        whole = shape if shard is None else (*shape[: shard.dim], shard.stop, *shape[shard.dim + 1 :])
        entries = prod(whole if each.place is None else each.place.shape)
        key = (each.group.name, each.group.size, dtypes[each.parameter])
        totals[key] = totals.get(key, 0) + entries * dtypes[each.parameter].itemsize
    for (family, ranks, _), payload in totals.items():
        yield Call("sum", family, ranks, "gradients of copies", payload)


def _first_shard(name: str, parameter: nn.Parameter, plan: Plan) -> Shard:
    last = name.rpartition(".")[2]
    mesh = "expert" if last in SHARD_DIMS else "dense"
    dim, (shards, _) = SHARD_DIMS.get(last, 0), _sharing(mesh, plan.axes)
    return Shard(dim, 0, -(-parameter.shape[dim] // shards))
