"""The overlapped schedule: the forward of one micro-batch between the phases of another's backward.

While tokens of one micro-batch travel to their experts or back, the other one computes. `pair` says in which
order the phases of two segments are issued, `overlapped` which segments are paired: each forward after the
warm-up with the backward that a pipeline without overlap would run next, one forward later than there. So the
two never depend on each other, for the price of one more forward that waits for its backward.

Phase by phase, a link of f (forward) and a link of b (backward) interleave like this:

    b  after  combine*                experts             W  dispatch*                      mix          W
    f                   before  mix             dispatch*              experts  combine*         after

where a star marks the communication stream. With `early_release`, b's `mix` comes before f's `experts`: memory
of mixers is free earlier, but f's `combine` then has nothing beside it. With `late_weights`, the `W` of b's
experts comes after its `mix`: where communication takes about as long as computation, `dispatch` has experts
beside it anyway, and f's `combine` and the next b's `combine` have too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from braid.schedule.builders import Turn, dealt, grouped, held, neighbour
from braid.schedule.ops import Act, Op, Ops, Schedule
from braid.schedule.phases import Chain, Link, Phase

OVERLAPPED = "overlapped"


class Options(NamedTuple):
    """What can be chosen about an overlapped schedule."""

    delayed: bool = False
    """Whether weight gradients have ops of their own."""
    early_release: bool = False
    """Whether the mixers of a backward go before the experts of the forward beside it."""
    late_weights: bool = False
    """Whether weight gradients of experts wait until the mixers of their block have run backward."""


PLAIN = Options()
"""Nothing but overlap."""


class Side(NamedTuple):
    """One segment of a micro-batch, in one direction, with its messages."""

    turn: Turn
    chain: Chain
    receive: tuple[Op, ...] = ()
    send: tuple[Op, ...] = ()

    def ops(self, act: Act, phases: Sequence[Phase]) -> Iterator[Op]:
        micro_batch, segment = self.turn
        for phase in phases:
            yield Op(act=act, micro_batch=micro_batch, segment=segment, phase=phase.name)


def overlapped(
    chains: Sequence[Chain],
    *,
    pp: int,
    micro_batches: int,
    group_size: int | None = None,
    options: Options = PLAIN,
) -> Schedule:
    """For the chains of all segments. Warm-up and cool-down run the same phases with one side absent."""
    segments = len(chains)
    virtual, holder = segments // pp, dealt(pp, segments)
    groups = ceil(micro_batches / (group_size or pp))
    group = max(pp, ceil(micro_batches / groups)) if pp > 1 else 1
    lists, bound = [], []
    for rank in range(pp):
        stages = held(holder, rank)
        warm_up = 2 * (pp - rank - 1) + (virtual - 1) * group + 1
        forwards, backwards = (grouped(path, micro_batches, group) for path in (stages, stages[::-1]))
        ops: list[Op] = []
        for forward, backward in _paired(forwards, backwards, warm_up):
            f = None if forward is None or forward[0] >= micro_batches else forward
            b = None if backward is None or backward[0] >= micro_batches else backward
            ops += pair(side(Act.F, f, chains, holder), side(Act.B, b, chains, holder), options)
        lists.append(tuple(ops))
        bound.append(min(virtual * micro_batches, warm_up + 1))
    return Schedule(
        name=OVERLAPPED,
        micro_batches=micro_batches,
        holder=holder,
        backward=True,
        live_bound=tuple(bound),
        ops=tuple(lists),
        phases=tuple(chain.phases for chain in chains),
        delayed=options.delayed,
    )


def _paired(
    forwards: Sequence[Turn], backwards: Sequence[Turn], warm_up: int
) -> Iterator[tuple[Turn | None, Turn | None]]:
    """Warm-up forwards, then a forward beside every backward as long as there are any."""
    for turn in forwards[:warm_up]:
        yield turn, None
    yield from zip_longest(forwards[warm_up:], backwards)


def side(act: Act, turn: Turn | None, chains: Sequence[Chain], holder: Sequence[int]) -> Side | None:
    """A turn with its chain, and with messages where the neighbours are on other ranks."""
    if turn is None:
        return None
    micro_batch, segment = turn
    step, receive, send = (1, Act.RECV_F, Act.SEND_F) if act is Act.F else (-1, Act.RECV_B, Act.SEND_B)

    def message(kind: Act, step: int) -> tuple[Op, ...]:
        peer = neighbour(holder, segment, step)
        if peer in (None, holder[segment]):
            return ()
        return (Op(act=kind, micro_batch=micro_batch, segment=segment, peer=peer),)

    return Side(turn, chains[segment], message(receive, -step), message(send, step))


# ------------------------------------------------------------------------------------------- pairs


def pair(f: Side | None, b: Side | None, options: Options = PLAIN) -> Ops:
    """A forward and a backward, link by link: f's first with b's last. What is left over of b comes before what
    is left over of f. Weight gradients of b's first link wait until its message is on its way."""
    ops: list[Op] = []
    f_links = f.chain.links if f else ()
    b_links = b.chain.links[::-1] if b else ()
    if f:
        ops += [*f.receive, *f.ops(Act.F, f.chain.first)]
    if b:
        ops += [*b.receive, *b.ops(Act.B, b.chain.last[::-1])]
    both = min(len(f_links), len(b_links))
    for ahead, behind in zip(f_links, b_links, strict=False):
        ops += _links(f, ahead, b, behind, options)
    for behind in b_links[both:]:
        ops += _links(None, None, b, behind, options)
    for ahead in f_links[both:]:
        ops += _links(f, ahead, None, None, options)
    if f and not f.chain.last:
        ops += f.send
    if b and not b.chain.first:
        ops += b.send
    if b and b_links and options.delayed:
        ops += b.ops(Act.W, _weights(b_links[-1].mix, *b_links[-1].before))
    if f and f.chain.last:
        ops += [*f.ops(Act.F, f.chain.last), *f.send]
    if b and b.chain.first:
        ops += [*b.ops(Act.B, b.chain.first[::-1]), *b.send]
    return tuple(ops)


def _links(
    f: Side | None, ahead: Link | None, b: Side | None, behind: Link | None, options: Options
) -> Iterator[Op]:
    """Two links, in the order of issue. The stream of a phase says what runs beside what."""

    def forward(*phases: Phase | None) -> Iterator[Op]:
        if f:
            yield from f.ops(Act.F, [phase for phase in phases if phase])

    def backward(*phases: Phase | None) -> Iterator[Op]:
        if b:
            yield from b.ops(Act.B, [phase for phase in phases if phase])

    def weights(*phases: Phase | None) -> Iterator[Op]:
        if b and options.delayed:
            yield from b.ops(Act.W, _weights(*phases))

    ahead, behind = ahead or _NOTHING, behind or _NOTHING
    mixers = (behind.mix, *behind.before[::-1])
    experts = (behind.combine, behind.experts)
    yield from backward(*behind.after[::-1], behind.combine)
    yield from forward(*ahead.before, ahead.mix)
    yield from backward(behind.experts)
    yield from forward(ahead.dispatch)
    if not options.late_weights:
        yield from weights(*experts)
    yield from backward(behind.dispatch)
    if options.early_release:
        yield from backward(*mixers)
    yield from forward(ahead.experts, ahead.combine)
    if not options.early_release:
        yield from backward(*mixers)
    if options.late_weights:
        yield from weights(*experts)
    yield from forward(*ahead.after)
    if b and behind is not b.chain.links[0]:
        yield from weights(*mixers)


_NOTHING = Link(mix=Phase(kind="none"))
"""The side that is absent; nothing of it is issued."""


def weights_of(chain: Chain) -> list[Phase]:
    """The phases of a segment that leave weight gradients, in the order of their backwards."""
    links = ((link.combine, link.experts, link.mix, *link.before[::-1]) for link in chain.links[::-1])
    return [phase for link in links for phase in _weights(*link)]


def _weights(*phases: Phase | None) -> list[Phase]:
    return [phase for phase in phases if phase and phase.weights]
