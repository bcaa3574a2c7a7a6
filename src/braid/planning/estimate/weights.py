"""FSDP units of a rank: sizes of their shards, all-gathered weights, and the collectives of sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from braid.choices import Strategy
from braid.kernels.grouped_mlp.product import WritesInPlace
from braid.kernels.precision.grid import ScaleGrid, copy_bytes
from braid.model.stacked import StackedModel
from braid.nn.canonical import Shard
from braid.nn.cost import Call
from braid.nn.embedding import Head
from braid.nn.linear import Linear, RowLinear
from braid.nn.moe.experts import SHARD_DIMS, Experts
from braid.nn.precision import matrix, quantised_weights
from braid.nn.precision_work import QUANTISED_BYTES
from braid.nn.units import parameters_of_units, shard_dims
from braid.optim.gradients import replicated_parts
from braid.planning.divisibility import AxisSizes
from braid.planning.estimate.muon import MuonWork, muon_work
from braid.planning.estimate.rank import HeldModule, held_by_station
from braid.planning.local_model import is_alone
from braid.planning.plan import Plan, inner_phases
from braid.schedule import Act, Ops, Phase
from braid.schedule.phases import Unit


@dataclass(frozen=True, kw_only=True)
class HeldUnit:
    """One FSDP unit, on the rank with its largest shard."""

    name: str
    """Module path, behind the name of its module: `vision/stack.blocks.3`."""
    part: str
    """Part of the model, as named by `HeldModule.costs`."""
    mesh: str
    strategy: Strategy
    shards: int
    """Ranks that the unit is sharded over."""
    copies: int
    """Replicas of each shard (HSDP)."""
    gathered: int
    """Elements after the all-gather, including the padding of uneven shards."""
    kept: int
    """Elements of the rank's shard."""
    learned: float
    """The share of its elements that are trained; only these have gradients and moments."""
    by_muon: float
    """The share of its elements that Muon updates, which keeps one moment of them instead of two."""
    stored: int
    """Bytes per element of the shard."""
    computed: int
    """Bytes per element in the compute dtype."""
    values: int
    """Elements of the rank's shard that are gathered as e4m3 values, of a byte each."""
    copies_bytes: int
    """Bytes of the quantised copies that the rank has of its weights during a step."""
    quantising_bytes: int
    """Bytes that quantising them moves, once a step."""
    in_place: bool
    """Whether products accumulate its gradients, but for small ones, in place, in the optimizer's dtype."""

    @property
    def kept_learned(self) -> int:
        """Trained elements of the rank's shard."""
        return round(self.kept * self.learned)

    @property
    def kept_moments(self) -> int:
        """Elements of the optimizer's moments."""
        return 2 * self.kept_learned - round(self.kept * self.by_muon)

    @property
    def gathered_learned(self) -> int:
        """Trained elements after the all-gather."""
        return round(self.gathered * self.learned)

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.stored

    @property
    def sent_bytes(self) -> int:
        """What the rank hands in for the all-gather."""
        return (self.kept - self.values) * self.computed + self.values

    @property
    def gathered_bytes(self) -> int:
        return self.shards * self.sent_bytes


class Counted(NamedTuple):
    """A stage of a module on a rank, with its weights."""

    held: HeldModule
    units: list[HeldUnit]
    """Its FSDP units, in forward order."""
    once: tuple[Call, ...]
    """Collectives that there are once in a step: of what ranks need to quantise their shards when it begins, of
    the gradients of replicated weights, and of Muon."""
    working: int = 0
    """Bytes that Muon works in when it updates."""


def counted_by_station(plan: Plan, device: str) -> list[list[Counted]]:
    """The modules of the ranks of each station; weights of twins are counted once."""
    known: dict[int, Counted] = {}
    found = []
    for modules in held_by_station(plan, device):
        own = []
        for held in modules:
            if held.original is None:
                muon = muon_of(held, plan)
                once = () if is_alone(plan) else (*scale_calls(held), *copy_calls(held), *muon.calls)
                units = held_units(held, plan, muon.parameters)
                known[id(held)] = each = Counted(held, units, once, muon.buffers)
            else:
                first = known[id(held.original)]
                units = [_renamed(unit, held) for unit in first.units]
                each = Counted(held, units, first.once, first.working)
            own.append(each)
        found.append(own)
    return found


def _renamed(unit: HeldUnit, held: HeldModule) -> HeldUnit:
    return replace(unit, name=held.renamed(unit.name), part=held.renamed(unit.part))


def muon_of(module: HeldModule, plan: Plan) -> MuonWork:
    return muon_work(module, plan, {mesh: _sharing(mesh, module.axes) for mesh in ("dense", "expert")})


class UnitWeights(NamedTuple):
    """The weights of a unit: what does not depend on how many ranks share them."""

    unit: Unit
    part: str
    sizes: tuple[tuple[str, int, int], ...]
    """The name of each, its size along the dim that is sharded, and its elements over that size."""
    stored: torch.dtype
    in_place: bool


def held_units(
    module: HeldModule,
    plan: Plan,
    by_muon: frozenset[str] = frozenset(),
    weights: Sequence[UnitWeights] | None = None,
) -> list[HeldUnit]:
    """The units of a stage of a module, in forward order. Muon updates the parameters `by_muon`. `weights` are
    those of the module, if they are known already."""
    known = unit_weights(module, plan) if weights is None else weights
    quantised = _quantised(module, is_alone(plan))
    return [_held(each, module, quantised, by_muon) for each in known]


def unit_weights(module: HeldModule, plan: Plan) -> list[UnitWeights]:
    """The weights of each unit of a stage of a module, in forward order."""
    phases = [phase for segment in module.segments for phase in phases_of(plan, segment)]
    # A unit used by several phases gets its gradient in the last of them, which backward runs first.
    parts = {unit: part_of(phase) for phase in phases for unit in phase.units}
    units, names = module.model.units(), dict(module.model.named_parameters())
    held = parameters_of_units(module.model, [unit.path for unit in units])
    return [
        _weights_of(
            unit,
            parts[module.name_of(unit.path)],
            {name: names[name] for name in held[unit.path]},
            module.model,
        )
        for unit in units
        if held[unit.path]
    ]


def _weights_of(unit: Unit, part: str, weights: Mapping[str, nn.Parameter], model: StackedModel) -> UnitWeights:
    dims = {f"{unit.path}.{name}": dim for name, dim in shard_dims(model.get_submodule(unit.path)).items()}
    in_place = sum(p.numel() for name, p in weights.items() if _written_in_place(model, name))
    sizes = []
    for name, parameter in weights.items():
        dim, shape = dims.get(name, 0), parameter.shape
        sizes.append((name, shape[dim], prod(shape[:dim] + shape[dim + 1 :])))
    return UnitWeights(
        unit=unit,
        part=part,
        sizes=tuple(sizes),
        stored=next(iter(weights.values())).dtype,
        in_place=2 * in_place > sum(p.numel() for p in weights.values())
        and model.dtype.itemsize < torch.float32.itemsize,
    )


MOVED_BY_TENSORS = 80
"""Bytes of an element that are read and written where weights are quantised by PyTorch's own kernels, one after
the other, on tensors in float32: magnitudes and their maxima, then quotients by scales of each element."""


class _Quantised(NamedTuple):
    """A weight that is quantised once a step."""

    gathered: bool
    """Whether its values are gathered; a rank then has those of its shard. Else it has all."""
    bytes: int
    """Bytes of what else it has: scales, or all."""
    moved: int
    """Bytes that quantising moves for each element."""


def _quantised(module: HeldModule, alone: bool) -> dict[str, _Quantised]:
    """Those of a module, by the names of parameters."""
    found = {}
    for path, name, products in quantised_weights(module.model):
        shape = matrix(module.model.get_submodule(path).get_parameter(name)).shape
        if alone:
            moved = QUANTISED_BYTES["weight"] if products.copies_by_kernel(shape) else MOVED_BY_TENSORS
            found[f"{path}.{name}"] = _Quantised(False, copy_bytes(products, shape), moved)
        elif products.shares_weight:
            floats = ScaleGrid.of(products, shape).held_floats
            found[f"{path}.{name}"] = _Quantised(True, 4 * floats, MOVED_BY_TENSORS)
    return found


def phases_of(plan: Plan, segment: int) -> tuple[Phase, ...]:
    """The phases of a segment; if it is a single phase, the phases that it combines."""
    phases = plan.schedule.phases[segment]
    if [phase.kind for phase in phases] != ["segment"]:
        return phases
    return inner_phases(plan)[segment]


def part_of(phase: Phase) -> str:
    """The part of its model that a phase runs, as `StackedModel.costs` names it; a "pass" phase runs none."""
    if phase.depth is not None:
        return f"mtp.{phase.depth}"
    if phase.block is not None:
        return f"blocks.{phase.block}"
    return {"embed": "embedding", "final_norm": "head"}.get(phase.kind, phase.kind)


def _held(
    weights: UnitWeights,
    module: HeldModule,
    quantised: Mapping[str, _Quantised],
    by_muon: frozenset[str],
) -> HeldUnit:
    unit, stored = weights.unit, weights.stored
    shards, copies = _sharing(unit.mesh, module.axes)
    # Those of the first shard, which is the largest.
    sizes = {name: -(-size // shards) * others for name, size, others in weights.sizes}
    own = [quantised[name] for name in sizes if name in quantised]
    kept = sum(sizes.values())
    moved = sum(size * quantised[name].moved for name, size in sizes.items() if name in quantised)
    values = sum(size for name, size in sizes.items() if name in quantised and quantised[name].gathered)

    def share(names: frozenset[str]) -> float:
        return sum(size for name, size in sizes.items() if name in names) / max(kept, 1)

    return HeldUnit(
        name=module.name_of(unit.path),
        part=module.name_of(weights.part),
        mesh=unit.mesh,
        strategy=module.strategy,
        shards=shards,
        copies=copies,
        gathered=shards * kept,
        kept=kept,
        learned=share(module.trained),
        by_muon=share(by_muon),
        stored=stored.itemsize,
        computed=stored.itemsize if unit.wide else min(stored.itemsize, module.model.dtype.itemsize),
        values=values,
        copies_bytes=values + sum(each.bytes for each in own),
        quantising_bytes=moved,
        in_place=weights.in_place,
    )


def _written_in_place(model: StackedModel, name: str) -> bool:
    """Whether the gradient of a parameter is written to its main gradient."""
    match model.get_submodule(name.rpartition(".")[0]):
        case Linear() | RowLinear():
            return True
        case Experts(grouped_mlp=grouped_mlp):
            return isinstance(grouped_mlp, WritesInPlace)
        case Head():
            return isinstance(model.kernels.linear_cross_entropy.function, WritesInPlace)
        case _:
            return False


def _sharing(mesh: str, axes: AxisSizes) -> tuple[int, int]:
    """Number of shards and number of replicas of the units of a mesh."""
    if mesh == "expert":
        return axes.edp // axes.expert_copies, axes.expert_copies
    return axes.dp * axes.cp // axes.dense_copies, axes.dense_copies


# --------------------------------------------------------------------------------------------- calls


_GATHERED = frozenset({Act.UNSHARD, Act.RESHARD})
_CALLED = frozenset({Act.UNSHARD, Act.REDUCE_GRAD})


def peak_gathered(units: list[HeldUnit], ops: Ops) -> int:
    """Maximum bytes of all-gathered weights, over the unshard and reshard ops of a rank."""
    sizes = {unit.name: unit.gathered_bytes for unit in units}
    current = peak = 0
    for op in [op for op in ops if op.act in _GATHERED]:
        if op.act is Act.UNSHARD:
            current += sizes.get(op.unit or "", 0)
            peak = max(peak, current)
        else:
            current -= sizes.get(op.unit or "", 0)
    return peak


def sharding_calls(units: list[HeldUnit], ops: Ops) -> Iterator[Call]:
    """Collectives of FSDP in a step: all-gathers of weights, reductions of gradients."""
    times = Counter((op.unit, op.act) for op in ops if op.act in _CALLED)
    for unit in units:
        for call in unit_calls(unit):
            act = Act.UNSHARD if call.op == "all_gather" else Act.REDUCE_GRAD
            if act is Act.UNSHARD or times[unit.name, act]:
                yield call._replace(times=times[unit.name, act])


def unit_calls(unit: HeldUnit) -> Iterator[Call]:
    """The all-gather of a unit, and the reduction of its gradients."""
    family = "edp" if unit.mesh == "expert" else "dp_cp"
    what = "expert" if unit.mesh == "expert" else "dense"
    if unit.shards > 1:
        grads = unit.gathered_learned * unit.stored
        yield Call("all_gather", family, unit.shards, f"{what} weights", unit.sent_bytes, phase="unshard")
        yield Call("reduce_scatter", family, unit.shards, f"{what} gradients", grads, phase="reduce_grad")
    if unit.copies > 1:
        grads = unit.kept_learned * unit.stored
        purpose = f"{what} gradients, replicas"
        yield Call("all_reduce", family, unit.copies, purpose, grads, phase="reduce_grad")


def scale_calls(module: HeldModule) -> Iterator[Call]:
    """All-reduces of the largest magnitudes of weights whose values are gathered: one per group, when a step
    begins. Every rank of a group learns the scales of all that it gathers."""
    totals: dict[tuple[str, int], int] = {}
    for path, name, products in quantised_weights(module.model):
        if products.shares_weight:
            layer = module.model.get_submodule(path)
            mesh, family = ("expert", "edp") if isinstance(layer, Experts) else ("dense", "dp_cp")
            grid = ScaleGrid.of(products, matrix(layer.get_parameter(name)).shape)
            shards = (family, _sharing(mesh, module.axes)[0])
            for group in (shards, *((each.name, each.size) for each in grid.cut_groups())):
                totals[group] = totals.get(group, 0) + 4 * grid.floats
    for (family, ranks), payload in totals.items():
        if ranks > 1:
            yield Call("all_reduce", family, ranks, "largest magnitudes of weights", payload, phase="unshard")


def copy_calls(module: HeldModule) -> Iterator[Call]:
    """All-reduces of the gradients of weights replicated over tp or pp: one per group and dtype in a step."""
    model = module.model
    shards = {
        name: _first_shard(name, p, module.axes)
        for name, p in model.named_parameters()
        if name in module.trained
    }
    dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    totals: dict[tuple[str, int, torch.dtype], int] = {}
    for each in replicated_parts(model.canonical().values(), shards):
        shard, shape = shards[each.parameter], shapes[each.parameter]
        shard_shape = (*shape[: shard.dim], shard.stop, *shape[shard.dim + 1 :])
        elements = prod(shard_shape if each.place is None else each.place.shape)
        key = (each.group.name, each.group.size, dtypes[each.parameter])
        totals[key] = totals.get(key, 0) + elements * dtypes[each.parameter].itemsize
    for (family, ranks, _), payload in totals.items():
        yield Call("all_reduce", family, ranks, "gradients of replicated weights", payload, phase="sum_copies")


def _first_shard(name: str, parameter: nn.Parameter, axes: AxisSizes) -> Shard:
    last = name.rpartition(".")[2]
    mesh = "expert" if last in SHARD_DIMS else "dense"
    dim, (shards, _) = SHARD_DIMS.get(last, 0), _sharing(mesh, axes)
    return Shard(dim, 0, -(-parameter.shape[dim] // shards))
