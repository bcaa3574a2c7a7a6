"""What Muon adds to an estimate: matrices that travel to their owners and back, and memory to work on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from braid.nn.canonical import Canonical
from braid.nn.cost import Call
from braid.optim.kinds import matrices_of
from braid.optim.matrix_exchange import ROUND_ELEMENTS
from braid.optim.muon import dtype_of
from braid.planning.estimate.rank import HeldModule
from braid.planning.plan import Plan

BUFFERS = 6
"""Of the size of what an owner works on in a round: what arrives, whole matrices, stacked ones, and what an
iteration makes of them."""


@dataclass(frozen=True, kw_only=True)
class MuonWork:
    """What Muon does on a rank of a stage."""

    parameters: frozenset[str] = frozenset()
    """Those that it updates."""
    buffers: int = 0
    """Bytes that exist during an update."""
    calls: tuple[Call, ...] = ()


def muon_work(module: HeldModule, plan: Plan, sharing: dict[str, tuple[int, int]]) -> MuonWork:
    """`sharing` are the shards and replicas of dense and of expert weights."""
    optim, model = plan.run.optim, module.model
    if optim.name != "muon":
        return MuonWork()
    canonical = model.canonical()
    chosen = matrices_of(canonical, optim.muon.kinds) & module.trained
    matrices = [tensor for tensor in canonical.values() if tensor.parameter in chosen]
    if not matrices:
        return MuonWork()
    itemsize = dtype_of(optim.muon, model.dtype).itemsize
    owned = sum(prod(each.shape) / _holders(each, module, sharing)[0] for each in matrices)
    worked = max(max(prod(each.shape) for each in matrices), min(ROUND_ELEMENTS, round(owned)))
    calls = tuple(_calls(matrices, module, sharing, itemsize)) if model.groups.slab.size > 1 else ()
    return MuonWork(parameters=chosen, buffers=BUFFERS * worked * itemsize, calls=calls)


def _holders(tensor: Canonical, module: HeldModule, sharing: dict[str, tuple[int, int]]) -> tuple[int, bool]:
    """How many ranks of the stage hold some of a matrix, and whether each of them holds all of it."""
    experts = ".experts." in tensor.parameter
    shards, _ = sharing["expert" if experts else "dense"]
    slab = module.model.groups.slab.size
    part = tensor.shape if tensor.part is None else tensor.part
    return slab // module.axes.ep if experts else slab, shards == 1 and part == tensor.shape


def _calls(
    matrices: list[Canonical], module: HeldModule, sharing: dict[str, tuple[int, int]], itemsize: int
) -> Iterator[Call]:
    """The all-to-all to owners, and the one back. A part that a rank holds goes to one of its holders, and what
    comes back is of the same size; owners that hold all of a matrix need nothing of others."""
    ranks, going, coming = module.model.groups.slab.size, 0.0, 0.0
    for each in matrices:
        holders, whole = _holders(each, module, sharing)
        shards, _ = sharing["expert" if ".experts." in each.parameter else "dense"]
        held = prod(each.shape if each.part is None else each.part) / shards
        # `Call` counts what does not stay among `ranks`.
        leaving = held * (1 - 1 / holders) * ranks / (ranks - 1)
        going += 0 if whole else leaving
        coming += leaving
    for what, elements in (("momenta to owners", going), ("directions from owners", coming)):
        if elements:
            payload = round(elements) * itemsize
            yield Call("all_to_all_v", "slab", ranks, f"Muon: {what}", payload, phase="update")
