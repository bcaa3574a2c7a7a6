"""What a rank holds of weights: the units that are gathered together, and the shards that it keeps of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from braid.engine.sharding import lowered
from braid.fit import Sizes
from braid.kernels.grouped_mlp.product import WritesInPlace
from braid.model.language import LanguageModel
from braid.nn.canonical import Shard
from braid.nn.cost import Call
from braid.nn.moe.experts import SHARD_DIMS, Experts
from braid.optim.gradients import copied
from braid.parallel.sharding import Strategy, Unit, set_apart
from braid.plan import Plan
from braid.schedule import Act


class Uses(NamedTuple):
    """How often FSDP2 gathers a unit. It lets go of one after each use whose input has a gradient, so one that
    is used several times is gathered several times."""

    forward: int = 1
    backward: int = 1
    in_a_step: int = 1
    """Where it stays gathered until a last backward that lets go after each use."""


@dataclass(frozen=True, kw_only=True)
class Held:
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
    uses: Uses
    """How often it is gathered."""
    in_place: bool
    """Whether its gradients are written where they accumulate, in the optimizer's dtype."""

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.stored

    @property
    def gathered_bytes(self) -> int:
        return self.gathered * self.computed


def held_units(model: LanguageModel, axes: Sizes) -> list[Held]:
    """The units of a model as `shard_units` makes them, in the order of forward as far as that has one."""
    names = {id(module): name for name, module in model.named_modules()}
    claimed: set[int] = set()
    found = []
    for unit, _ in set_apart(model.units(), model.dtype):
        weights = [(name, p) for name, p in unit.module.named_parameters() if id(p) not in claimed]
        claimed |= {id(p) for _, p in weights}
        if weights:
            found.append(_held(unit, names[id(unit.module)], weights, model, axes))
    return found


def _held(
    unit: Unit, name: str, weights: list[tuple[str, nn.Parameter]], model: LanguageModel, axes: Sizes
) -> Held:
    shards, copies = _sharing(unit.mesh, axes)
    sizes = [_shard_size(p, unit.dims.get(name, 0), shards) for name, p in weights]
    stored = weights[0][1].dtype
    in_place = isinstance(unit.module, Experts) and isinstance(unit.module.grouped_mlp, WritesInPlace)
    return Held(
        name=name,
        part=_part(name, model),
        mesh=unit.mesh,
        shards=shards,
        copies=copies,
        gathered=shards * sum(sizes),
        kept=sum(sizes),
        stored=stored.itemsize,
        computed=stored.itemsize if unit.wide else min(stored.itemsize, model.dtype.itemsize),
        uses=_uses(name, model),
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


def _is_head(model: LanguageModel) -> bool:
    """Whether the embedding is the head as well, here."""
    return model.head is None and model.final_norm is not None


def _part(name: str, model: LanguageModel) -> str:
    """A tied embedding has its gradient from the head on, and so has a copy for MTP depths."""
    if name == "embedding" and (_is_head(model) or 0 not in model.segments):
        return "head"
    if name in ("exit", "final_norm", "head"):
        return "head"
    return ".".join(name.removeprefix("stack.").split(".")[:2])


def _uses(name: str, model: LanguageModel) -> Uses:
    """The embedding is asked for tokens, here and in every MTP depth; the head is asked by the model and by
    every depth. One of them may be both."""
    depths = len(model.mtp)
    lookups = (0 in model.segments) + depths
    if name == "embedding" and _is_head(model):
        return Uses(1 + depths + lookups, 1 + lookups, 1 + lookups)
    if name == "embedding":
        return Uses(forward=lookups)
    if name == "head":
        return Uses(1 + depths, 1 + depths, 1 + depths)
    return Uses()


# --------------------------------------------------------------------------------------------- calls


def driven_times(units: list[Held], plan: Plan, stage: int) -> dict[str, tuple[int, int]]:
    """How often each unit is gathered and its gradients are summed in a step, where ops of the schedule say so:
    by name."""
    run, meshes = plan.run, {unit.name: unit.mesh for unit in units}
    ops, _ = lowered(plan.schedule, stage, meshes, run.mesh.shard, tied=run.model.tied)
    times = Counter((op.unit, op.act) for op in ops if op.act.shards)
    return {name: (times[name, Act.UNSHARD], times[name, Act.REDUCE_GRAD]) for name in meshes}


def hooked_times(units: list[Held], strategy: Strategy, micro_batches: int) -> dict[str, tuple[int, int]]:
    """The same where FSDP2 finds out by its hooks."""
    told = {}
    for unit in units:
        uses, every = unit.uses, strategy in ("gradients", "all")
        gathers = uses.in_a_step if every else 1
        gathers = micro_batches * (uses.forward + uses.backward) if strategy == "all" else gathers
        told[unit.name] = gathers, micro_batches if every else 1
    return told


def sharding_calls(units: list[Held], times: Mapping[str, tuple[int, int]]) -> Iterator[Call]:
    """What sharded data parallelism sends in a step: weights that are gathered, gradients that are summed."""
    for unit in units:
        family = "edp" if unit.mesh == "expert" else "dp_cp"
        gathers, sums = times[unit.name]
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
