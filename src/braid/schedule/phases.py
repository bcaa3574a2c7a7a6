"""Phases: the parts of a segment's forward that a schedule can place and overlap independently.

A **phase** runs as a whole on one stream. The granularity is a choice: a segment is one phase, `segment`; or
each block is one, `3.block`; or, to overlap expert communication with compute, a block has up to five: `3.mix`,
`3.dispatch`, `3.experts`, `3.combine` and `3.post`. `3.post` sums the expert outputs of a token and adds them
to the residual stream. As a phase of its own it runs on the compute stream, while other tokens are in transit;
otherwise it is part of `3.combine`, on the communication stream. Around the blocks there are `embed`,
`final_norm` and `head`, and for each MTP depth `mtp0.enter`, its blocks (`mtp0.0.mix` ...), `mtp0.final_norm`
and `mtp0.head`. A segment without blocks has the single phase `pass`. A node is one phase for one micro-batch
in one direction.

A phase declares the tensors it reads and writes, and no others pass between phases: `in` and `out` are the
input and output of the segment, all others are named after the phase that writes them. It also declares the
units of weights it uses, and its regions that can be recomputed.

Delayed weight gradients are kept in **wgrad buckets**, and a `W` op is named after the bucket that it computes.
Most phases have one, with the name of the phase. With late weights, experts have two: `3.experts.down` for the
down projection and `3.experts.in` for the up and gate projections, with gates twice as much work.

A model declares its phases (`model.declaration`) as a `Chain` per segment: phases before the blocks, a `Link`
per block, phases after. A `Link` is a block with the phases around it, the unit in which overlap pairs a
forward with a backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from braid.choices import MeshName

IN, OUT = "in", "out"
"""The input and output tensors of a segment."""


class Stream(Enum):
    """The stream that a phase runs on. The two run concurrently."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"

    __hash__ = object.__hash__  # that of Enum runs in Python


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Weights that are unsharded, resharded and reduced together: an FSDP unit."""

    path: str
    """The path of its module within the model."""
    mesh: MeshName = "dense"
    wide: bool = False
    """Whether it computes in the stored dtype instead of the compute dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of a segment's forward."""

    kind: str
    """What it does: segment; block; mix, dispatch, experts, combine, post; embed, enter, final_norm, head;
    pass."""
    block: int | None = None
    """The index of its block, if it is a phase of one."""
    depth: int | None = None
    """The MTP depth; None in the main stack."""
    stream: Stream = Stream.COMPUTE
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    """Parameters that other phases of the segment may use as well. Their gradient is summed over the phases of
    a micro-batch before it is added to that of earlier micro-batches."""
    units: tuple[str, ...] = ()
    """Units that its forward reads, and whose gradients its backward adds to unless they are frozen."""
    frozen: tuple[str, ...] = ()
    """Those of its units of which nothing is trained."""
    backward: bool = True
    """Whether it has a backward: it, or something before it, is trained."""
    backward_reads: bool = True
    """Whether its backward reads the weights too; that of an embedding does not."""
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Its regions that can be recomputed, by the names of `train.recompute`, each with the units it needs."""
    buckets: tuple[str, ...] = ()
    """The wgrad buckets, in the order in which they are computed; empty if its weight gradients cannot be
    delayed."""

    @property
    def name(self) -> str:
        return phase_name(self.kind, self.block, self.depth)

    def replayed_units(self, recompute: Collection[str]) -> tuple[str, ...] | None:
        """The units that recomputing these regions needs; None if the phase has none of them."""
        chosen = [units for name, units in self.regions if name in recompute]
        return tuple(dict.fromkeys(unit for units in chosen for unit in units)) if chosen else None

    @property
    def grad_units(self) -> tuple[str, ...]:
        """The units whose gradients its backward adds to."""
        return tuple(unit for unit in self.units if unit not in self.frozen)

    @property
    def joins(self) -> bool:
        """Whether it sums the expert outputs and adds them to the residual stream."""
        return self.kind in ("combine", "post") and len(self.reads) > 1


def phase_name(kind: str, block: int | None = None, depth: int | None = None) -> str:
    prefix = ("" if depth is None else f"mtp{depth}.") + ("" if block is None else f"{block}.")
    return prefix + kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The phases of a block, and those between it and its neighbours."""

    before: tuple[Phase, ...] = ()
    mix: Phase
    dispatch: Phase | None = None
    experts: Phase | None = None
    combine: Phase | None = None
    post: Phase | None = None
    after: tuple[Phase, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        block = (self.mix, self.dispatch, self.experts, self.combine, self.post)
        return (*self.before, *(phase for phase in block if phase is not None), *self.after)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """All phases of a segment, in forward order; backward is the reverse."""

    first: tuple[Phase, ...] = ()
    """Before the first block."""
    links: tuple[Link, ...] = ()
    last: tuple[Phase, ...] = ()
    """After the last block. In a segment without blocks, the phases that write its output or its loss."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*self.first, *(phase for link in self.links for phase in link.phases), *self.last)


def named(phases: Iterable[Phase]) -> dict[str, Phase]:
    """The phase of each name that an op may use: a phase or a bucket."""
    return {name: phase for phase in phases for name in (phase.name, *phase.buckets)}


def readers(phases: Sequence[Phase]) -> dict[str, tuple[str, ...]]:
    """For each tensor, the phases that read it, in order."""
    by_tensor: dict[str, tuple[str, ...]] = {}
    for phase in phases:
        for tensor in phase.reads:
            by_tensor[tensor] = (*by_tensor.get(tensor, ()), phase.name)
    return by_tensor


def writers(phases: Sequence[Phase]) -> dict[str, str]:
    """For each tensor, the phase that writes it."""
    return {tensor: phase.name for phase in phases for tensor in phase.writes}


def shared_by(phases: Sequence[Phase]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each parameter that several phases use, with those phases."""
    for parameter in dict.fromkeys(parameter for phase in phases for parameter in phase.shared):
        users = tuple(phase.name for phase in phases if parameter in phase.shared)
        if len(users) > 1:
            yield parameter, users
