"""What a segment is made of, as the overlapped schedule sees it: phases, and the order in which they run.

A **phase** is a part of a forward that a rank issues in one go, on one stream. A block with experts has four,
`3.mix`, `3.dispatch`, `3.experts` and `3.combine`; any other block has `3.mix` alone. Around the blocks stand
`embed`, `final_norm` and `head`, and for each MTP depth `mtp0.enter`, its blocks (`mtp0.0.mix` ...),
`mtp0.final_norm` and `mtp0.head`. A segment without blocks has the phase `pass`. A node is one phase for one
micro-batch, in one direction.

A phase says which tensors it reads and writes: `in` and `out` are what the segment is given and gives, all
others are named after the phase that writes them. Whoever runs phases hands over nothing else.

`chains` derives all of it from a layout. A `Chain` is a segment: phases before its blocks, links, phases after.
A `Link` is a block and what stands around it, so that two of them can be paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from braid.pattern import Block, Kind, Layout, MtpDepth

IN, OUT = "in", "out"
"""The tensor that a segment is given, and the one that it gives."""
EMBEDDING, HEAD = "embedding.weight", "head.weight"
"""Parameters that several phases of one micro-batch may use."""


class Stream(Enum):
    """Where a phase runs: two streams work at the same time."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of a forward, whatever the micro-batch."""

    name: str
    stream: Stream = Stream.COMPUTE
    reads: tuple[str, ...] = ()
    """Tensors that it is given."""
    writes: tuple[str, ...] = ()
    """Tensors that it gives."""
    shared: tuple[str, ...] = ()
    """Parameters that other phases of the micro-batch may use as well: their gradients are added up first."""
    weights: bool = False
    """Whether its weight gradients can wait for an op of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A block, and the phases between it and its neighbours."""

    before: tuple[Phase, ...] = ()
    mix: Phase
    dispatch: Phase | None = None
    experts: Phase | None = None
    combine: Phase | None = None
    after: tuple[Phase, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        block = (self.mix, self.dispatch, self.experts, self.combine)
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


def chains(layout: Layout, pp: int, *, tied: bool = False, shared_experts: bool = False) -> tuple[Chain, ...]:
    """One chain for each segment of a schedule; without a pipeline, a single one for the whole layout.
    `shared_experts` says whether the layers of experts have one that every token visits."""
    count = len(layout.segments)
    cuts = [range(count)] if pp == 1 else [range(index, index + 1) for index in range(count)]
    return tuple(_chain(layout, cut, tied=tied, shared_experts=shared_experts) for cut in cuts)


def _chain(layout: Layout, cut: range, *, tied: bool, shared_experts: bool) -> Chain:
    """The segments of a cut as one. What reads what follows from the order."""
    told = EMBEDDING if tied else HEAD
    blocks = [block for index in cut for block in layout.segments[index].blocks]
    first = (Phase(name="embed", shared=(EMBEDDING,)),) if cut.start == 0 else ()
    links = [_link(block, "", shared_experts) for block in blocks]
    last: tuple[Phase, ...] = ()
    if cut.stop == len(layout.segments):
        last = (Phase(name="final_norm"), Phase(name="head", shared=(told,)))
        for depth in layout.mtp:
            first, links, last = _with_depth(first, links, last, depth, told, shared_experts)
    elif not first and not links:
        last = (Phase(name="pass"),)
    return _wired(Chain(first=first, links=tuple(links), last=last), ends=cut.stop == len(layout.segments))


def _with_depth(
    first: tuple[Phase, ...],
    links: list[Link],
    last: tuple[Phase, ...],
    depth: MtpDepth,
    told: str,
    shared_experts: bool,
) -> tuple[tuple[Phase, ...], list[Link], tuple[Phase, ...]]:
    """A chain that goes on into one more MTP depth: what was last now stands between two blocks."""
    name = f"mtp{depth.depth}."
    if links:
        links = [*links[:-1], replace(links[-1], after=last)]
    else:
        first = (*first, *last)
    more = [_link(block, name, shared_experts) for block in depth.blocks]
    more[0] = replace(more[0], before=(Phase(name=f"{name}enter", shared=(EMBEDDING,), weights=True),))
    norm, head = Phase(name=f"{name}final_norm"), Phase(name=f"{name}head", shared=(told,))
    return first, [*links, *more], (norm, head)


def _link(block: Block, prefix: str, shared_experts: bool) -> Link:
    name = f"{prefix}{block.index}."
    if block.layers[-1].kind is not Kind.MOE:
        return Link(mix=Phase(name=f"{name}mix", weights=True))
    residual, rows, probs, shared, arrived, arrived_probs, computed = (
        f"{name}{tensor}"
        for tensor in ("residual", "rows", "probs", "shared", "arrived", "arrived_probs", "computed")
    )
    beside = (shared,) if shared_experts else ()
    return Link(
        mix=Phase(name=f"{name}mix", writes=(residual, rows, probs, *beside), weights=True),
        dispatch=Phase(
            name=f"{name}dispatch",
            stream=Stream.COMMUNICATION,
            reads=(rows, probs),
            writes=(arrived, arrived_probs),
        ),
        experts=Phase(
            name=f"{name}experts", reads=(arrived, arrived_probs), writes=(computed,), weights=True
        ),
        combine=Phase(
            name=f"{name}combine",
            stream=Stream.COMMUNICATION,
            reads=(residual, computed, *beside),
            weights=True,
        ),
    )


def _wired(chain: Chain, *, ends: bool) -> Chain:
    """The chain with the stream of hidden states named from phase to phase."""
    stream, final = IN, None if ends else chain.phases[-1].name

    def wire(phase: Phase) -> Phase:
        nonlocal stream
        if phase.name.endswith(("dispatch", "experts")):
            return phase
        reads = () if phase.name == "embed" else phase.reads or (stream,)
        writes = phase.writes
        if not writes and not phase.name.endswith("head"):
            stream = OUT if phase.name == final else phase.name
            writes = (stream,)
        return replace(phase, reads=reads, writes=writes)

    def all_of(phases: Sequence[Phase]) -> tuple[Phase, ...]:
        return tuple(wire(phase) for phase in phases)

    def link_of(link: Link) -> Link:
        before, mix = all_of(link.before), wire(link.mix)
        combine = None if link.combine is None else wire(link.combine)
        return replace(link, before=before, mix=mix, combine=combine, after=all_of(link.after))

    first = all_of(chain.first)
    links = tuple(link_of(link) for link in chain.links)
    return Chain(first=first, links=links, last=all_of(chain.last))


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
