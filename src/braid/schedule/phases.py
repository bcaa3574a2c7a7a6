"""What a segment is made of, as the overlapped schedule sees it: phases, and the order in which they run.

A **phase** is a part of a forward that a rank issues in one go, on one stream. A block with experts has five,
`3.mix`, `3.dispatch`, `3.experts`, `3.combine` and `3.post`; any other block has `3.mix` alone. `3.post` sums
what has returned and takes it into the residual stream. It computes while other rows travel; where it is not a
phase of its own, `3.combine` does it, on the communication stream. Around the blocks stand `embed`,
`final_norm` and `head`, and for each MTP depth `mtp0.enter`, its blocks (`mtp0.0.mix` ...), `mtp0.final_norm`
and `mtp0.head`. A segment without blocks has the phase `pass`. A node is one phase for one micro-batch, in one
direction.

A phase says which tensors it reads and writes: `in` and `out` are what the segment is given and gives, all
others are named after the phase that writes them. Whoever runs phases hands over nothing else.

Weight gradients that can wait lie in **drawers**, and the op that adds them is named after the drawer. Most
phases have one, with the phase's own name. With late weights, experts have two: `3.experts.down` for weights
that lead out of the ffn, and `3.experts.in` for those that lead into it, with gates twice as many.

`chains` derives all of it from a layout. A `Chain` is a segment: phases before its blocks, links, phases after.
A `Link` is a block and what stands around it, so that two of them can be paired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from braid.pattern import Block, Kind, Layout

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

    kind: str
    """What it does: mix, dispatch, experts, combine, post; embed, enter, final_norm, head; pass."""
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
    drawers: tuple[str, ...] = ()
    """Where its weight gradients wait for ops of their own; none where they cannot. What is in the first one is
    added first."""

    @property
    def name(self) -> str:
        """As ops name it."""
        return _name(self.kind, self.block, self.depth)

    @property
    def joins(self) -> bool:
        """Whether what has returned from experts is summed in it, and joins the residual stream."""
        return self.kind in ("combine", "post") and len(self.reads) > 1


def _name(what: str, block: int | None = None, depth: int | None = None) -> str:
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


class _Form(NamedTuple):
    """What a model's phases depend on, besides its layout; see `chains`."""

    tied: bool
    shared_experts: bool
    latent: bool
    hyper: bool
    posts: bool
    late_weights: bool


def chains(
    layout: Layout,
    pp: int,
    *,
    tied: bool = False,
    shared_experts: bool = False,
    latent: bool = False,
    hyper: bool = False,
    posts: bool = False,
    late_weights: bool = False,
) -> tuple[Chain, ...]:
    """One chain for each segment of a schedule; without a pipeline, a single one for the whole layout.
    `tied` says whether the head has the embedding's weight, `shared_experts` whether the layers of experts have
    one that every token visits, `latent` whether what returns from experts goes through a projection,
    `hyper` whether there are several residual streams, with hyper-connections around layers, `posts` whether
    `post` is a phase of its own, as it is with hyper-connections in any case, and `late_weights` whether weight
    gradients of experts lie in two drawers."""
    form = _Form(tied, shared_experts, latent, hyper, posts or hyper, late_weights)
    count = len(layout.segments)
    cuts = [range(count)] if pp == 1 else [range(index, index + 1) for index in range(count)]
    return tuple(_chain(layout, cut, form) for cut in cuts)


def _chain(layout: Layout, cut: range, form: _Form) -> Chain:
    """The segments of a cut as one."""
    blocks = [block for index in cut for block in layout.segments[index].blocks]
    begins, ends = cut.start == 0, cut.stop == len(layout.segments)
    thread = _Thread(form, final=None if ends else _final(blocks, begins, form))
    first = [thread.embed()] if begins else []
    links = [thread.link(block, None) for block in blocks]
    if not ends:
        last = [thread.onward("pass")] if not first and not links else []
        return Chain(first=tuple(first), links=tuple(links), last=tuple(last))
    last = thread.told(None)
    for depth in layout.mtp:
        # What was last now stands between two blocks.
        if links:
            links[-1] = replace(links[-1], after=(*links[-1].after, *last))
        else:
            first += last
        enter = thread.onward("enter", depth=depth.depth, shared=(EMBEDDING,), waits=True)
        more = [thread.link(block, depth.depth) for block in depth.blocks]
        links += [replace(more[0], before=(enter,)), *more[1:]]
        last = thread.told(depth.depth)
    return Chain(first=tuple(first), links=tuple(links), last=tuple(last))


def _final(blocks: Sequence[Block], begins: bool, form: _Form) -> str:
    """The phase that makes the output of a segment which is not the last."""
    if not blocks:
        return "embed" if begins else "pass"
    after_experts = "post" if form.posts else "combine"
    return _name(after_experts if _has_experts(blocks[-1]) else "mix", blocks[-1].index)


def _has_experts(block: Block) -> bool:
    return block.layers[-1].kind is Kind.MOE


class _Thread:
    """Makes phases in order, and names the stream of hidden states that goes from one to the next."""

    def __init__(self, form: _Form, *, final: str | None) -> None:
        self.form, self.final = form, final
        self.stream = IN

    def onward(
        self,
        kind: str,
        *,
        block: int | None = None,
        depth: int | None = None,
        beside: tuple[str, ...] = (),
        shared: tuple[str, ...] = (),
        waits: bool = False,
    ) -> Phase:
        """A phase from the stream, and from tensors beside it, to the stream."""
        name = _name(kind, block, depth)
        reads, self.stream = (self.stream, *beside), OUT if name == self.final else name
        return Phase(
            kind=kind,
            block=block,
            depth=depth,
            reads=reads,
            writes=(self.stream,),
            shared=shared,
            drawers=(name,) if waits else (),
        )

    def embed(self) -> Phase:
        return replace(self.onward("embed", shared=(EMBEDDING,)), reads=())

    def told(self, depth: int | None) -> list[Phase]:
        """A final norm, and a head that ends in a loss. What follows reads what the head reads; with
        hyper-connections, the streams that went into the norm."""
        before, norm = self.stream, self.onward("final_norm", depth=depth)
        teller = EMBEDDING if self.form.tied else HEAD
        head = Phase(kind="head", depth=depth, reads=(self.stream,), shared=(teller,))
        if self.form.hyper:
            self.stream = before
        return [norm, head]

    def link(self, block: Block, depth: int | None) -> Link:
        where: dict[str, Any] = {"block": block.index, "depth": depth}
        if not _has_experts(block):
            return Link(mix=self.onward("mix", **where, waits=True))
        residual, rows, probs, arrived, arrived_probs, computed = (
            _name(tensor, **where)
            for tensor in ("residual", "rows", "probs", "arrived", "arrived_probs", "computed")
        )
        drawers = ("experts.down", "experts.in") if self.form.late_weights else ("experts",)
        shared = (_name("shared", **where),) if self.form.shared_experts else ()
        ways = tuple(_name(way, **where) for way in ("post_weights", "res_weights")) if self.form.hyper else ()
        read, self.stream = self.stream, residual
        writes = (residual, rows, probs, *shared, *ways)
        latent = self.form.latent
        if self.form.posts:
            combine = Phase(kind="combine", **where, reads=(computed,), writes=(_name("returned", **where),))
            beside = (*combine.writes, *shared, *ways)
            post = self.onward("post", **where, beside=beside, waits=latent)
        else:
            combine = self.onward("combine", **where, beside=(computed, *shared), waits=latent)
            post = None
        return Link(
            mix=Phase(kind="mix", **where, reads=(read,), writes=writes, drawers=(_name("mix", **where),)),
            dispatch=Phase(
                kind="dispatch",
                **where,
                stream=Stream.COMMUNICATION,
                reads=(rows, probs),
                writes=(arrived, arrived_probs),
            ),
            experts=Phase(
                kind="experts",
                **where,
                reads=(arrived, arrived_probs),
                writes=(computed,),
                drawers=tuple(_name(drawer, **where) for drawer in drawers),
            ),
            combine=replace(combine, stream=Stream.COMMUNICATION),
            post=post,
        )


def named(phases: Iterable[Phase]) -> dict[str, Phase]:
    """The phase that each op means by a name: its own, or that of one of its drawers."""
    return {name: phase for phase in phases for name in (phase.name, *phase.drawers)}


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
