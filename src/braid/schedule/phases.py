"""Phases: what a segment of a model is made of, as a schedule sees it.

A **phase** is a part of a forward that a rank issues in one go, on one stream. How fine phases are is a choice:
all of a segment is one phase, `segment`; a block is one phase, `3.block`; or, where something is to run beside
its communication, it has up to five, `3.mix`, `3.dispatch`, `3.experts`, `3.combine` and `3.post`. `3.post`
sums what has returned and takes it into the residual stream. It computes while other rows travel; where it is
not a phase of its own, `3.combine` does it, on the communication stream. Around the blocks stand `embed`,
`final_norm` and `head`, and for each MTP depth `mtp0.enter`, its blocks (`mtp0.0.mix` ...), `mtp0.final_norm`
and `mtp0.head`. A segment without blocks has the phase `pass`. A node is one phase for one micro-batch, in one
direction.

A phase says which tensors it reads and writes: `in` and `out` are what the segment is given and gives, all
others are named after the phase that writes them. Whoever runs phases hands over nothing else. It also says
which units of weights it computes with, and what of it can be recomputed.

Weight gradients that can wait lie in **buckets**, and the op that adds them is named after the bucket. Most
phases have one, with the phase's own name. With late weights, experts have two: `3.experts.down` for weights
that lead out of the ffn, and `3.experts.in` for those that lead into it, with gates twice as many.

A model declares its phases (`model.declaration`). A `Chain` is a segment: phases before its blocks, links,
phases after. A `Link` is a block and what stands around it, so that two of them can be paired.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from braid.choices import MeshName

IN, OUT = "in", "out"
"""The tensor that a segment is given, and the one that it gives."""


class Stream(Enum):
    """Where a phase runs: two streams work at the same time."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Weights that are gathered, released and reduced together."""

    path: str
    """Of its module within the model."""
    mesh: MeshName = "dense"
    wide: bool = False
    """Whether it computes in the stored dtype, whatever the rest computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of a forward, whatever the micro-batch."""

    kind: str
    """What it does: segment; block; mix, dispatch, experts, combine, post; embed, enter, final_norm, head;
    pass."""
    block: int | None = None
    """The block that it is a phase of, if it is one of a block."""
    depth: int | None = None
    """The MTP depth; none in the main stack."""
    stream: Stream = Stream.COMPUTE
    reads: tuple[str, ...] = ()
    """Tensors that it is given."""
    writes: tuple[str, ...] = ()
    """Tensors that it gives."""
    shared: tuple[str, ...] = ()
    """Parameters that other phases of the micro-batch may use as well: their gradients are added up first."""
    units: tuple[str, ...] = ()
    """Units of weights that it computes with, and to whose gradients its backward adds."""
    backward_reads: bool = True
    """Whether its backward computes with them as well; an embedding's does not."""
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What of it can be recomputed, by the names of `train.recompute`, each with the units that it needs."""
    buckets: tuple[str, ...] = ()
    """Where its weight gradients wait for ops of their own; none where they cannot. What is in the first one is
    added first."""

    @property
    def name(self) -> str:
        """As ops name it."""
        return phase_name(self.kind, self.block, self.depth)

    def replayed_units(self, recompute: Collection[str]) -> tuple[str, ...] | None:
        """The units that its replay needs, where these names are recomputed; None where nothing is replayed."""
        chosen = [units for name, units in self.regions if name in recompute]
        return tuple(dict.fromkeys(unit for units in chosen for unit in units)) if chosen else None

    @property
    def joins(self) -> bool:
        """Whether what has returned from experts is summed in it, and joins the residual stream."""
        return self.kind in ("combine", "post") and len(self.reads) > 1


def phase_name(what: str, block: int | None = None, depth: int | None = None) -> str:
    where = ("" if depth is None else f"mtp{depth}.") + ("" if block is None else f"{block}.")
    return where + what


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A block, and the phases between it and its neighbours."""

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
    """All phases of a segment, in the order in which they run forward; backward is the reverse of it."""

    first: tuple[Phase, ...] = ()
    """Before the first block."""
    links: tuple[Link, ...] = ()
    last: tuple[Phase, ...] = ()
    """After the last block; of a segment without blocks, what makes its output or its loss."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*self.first, *(phase for link in self.links for phase in link.phases), *self.last)


def named(phases: Iterable[Phase]) -> dict[str, Phase]:
    """The phase that each op means by a name: its own, or that of one of its buckets."""
    return {name: phase for phase in phases for name in (phase.name, *phase.buckets)}


def readers(phases: Sequence[Phase]) -> dict[str, tuple[str, ...]]:
    """For each tensor, the phases that read it, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for phase in phases:
        for tensor in phase.reads:
            found[tensor] = (*found.get(tensor, ()), phase.name)
    return found


def writers(phases: Sequence[Phase]) -> dict[str, str]:
    """For each tensor, the phase that writes it."""
    return {tensor: phase.name for phase in phases for tensor in phase.writes}


def shared_by(phases: Sequence[Phase]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parameters that several phases use, with these phases."""
    for parameter in dict.fromkeys(parameter for phase in phases for parameter in phase.shared):
        users = tuple(phase.name for phase in phases if parameter in phase.shared)
        if len(users) > 1:
            yield parameter, users
