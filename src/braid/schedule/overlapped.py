"""The overlapped schedule: the forward of one micro-batch between the phases of another's backward.

While tokens of one micro-batch travel to their experts or back, the other one computes. `pair` says in which
order the phases of two segments are issued, `overlapped` which segments are paired: each forward after the
warm-up with the backward that a pipeline without overlap would run next, one forward later than there. So the
two never depend on each other, for the price of one more forward that waits for its backward.

Phase by phase, a link of f (forward) and a link of b (backward) interleave like this:

    b  after  combine*                experts             W  dispatch*                      mix          W
    f                   before  mix             dispatch*              experts  combine*         after

where a star marks the communication stream. With `early_release`, b's `mix` comes before f's `experts`: memory
of mixers is free earlier, but f's `combine` then has nothing beside it.

Where `post` is a phase of its own, rows of the next link are first sent on their way; then comes what nobody
waits for at the end of this one, and last what waits for rows that return:

    b  mix  | after  post  combine*  W of mix
    f       |                                  post  after | before  mix  ...

Where weight gradients of experts lie in two buckets (see `phases`), the second one waits for the next link, and
comes right before its `experts`:

    b  after  combine*               W(in) of the link before  experts             W(down)  dispatch*  ...
    f                   before  mix                                     dispatch*                      ...

Then `combine` has more beside it, and f's `dispatch` less: where experts take longer than mixers, and transfers
about as long as computation, less of them is left over. Rows of experts are held for longer.

The first forward of a step and its last backward have nothing beside them. With `paired_ends` the first two
forwards run beside each other, and so do the last two backwards; in between, a forward runs beside the backward
of the micro-batch two before it, for the price of one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from math import ceil
from typing import NamedTuple

from braid.schedule.builders import dealt, grouped, held, neighbour
from braid.schedule.ops import Act, Op, Ops, Schedule, Turn
from braid.schedule.phases import Chain, Link, Phase, Stream

OVERLAPPED = "overlapped"


class Options(NamedTuple):
    """What can be chosen about an overlapped schedule."""

    delayed: bool = False
    """Whether weight gradients have ops of their own."""
    early_release: bool = False
    """Whether the mixers of a backward go before the experts of the forward beside it."""
    paired_ends: bool = False
    """Whether the first two forwards run beside each other, and the last two backwards. Not in a pipeline."""


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

    def weights(self, *phases: Phase | None) -> Ops:
        """One for each bucket of these phases."""
        micro_batch, segment = self.turn
        buckets = (bucket for phase in phases if phase for bucket in phase.buckets)
        return tuple(Op(act=Act.W, micro_batch=micro_batch, segment=segment, phase=name) for name in buckets)


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
    if options.paired_ends:
        assert segments == 1, "the ends of a pipeline wait for messages"
        lists, bound = [_ends_paired(chains[0], micro_batches, options)], [min(micro_batches, 3)]
        return _schedule(chains, holder, micro_batches, lists, bound, options)
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
    return _schedule(chains, holder, micro_batches, lists, bound, options)


def _schedule(
    chains: Sequence[Chain],
    holder: tuple[int, ...],
    micro_batches: int,
    lists: Sequence[Ops],
    bound: Sequence[int],
    options: Options,
) -> Schedule:
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


def _ends_paired(chain: Chain, micro_batches: int, options: Options) -> Ops:
    """Two forwards, a forward beside each backward, two backwards: the list of a rank without a pipeline.

    In between nothing waits for its partner, and a backward may begin before the one before it is through: what
    nobody waits for at the end of a link comes when rows of the next one are on their way. Not so where weights
    that are reduced together would get gradients of both."""
    sides = [Side((micro_batch, 0), chain) for micro_batch in range(micro_batches)]
    ops, waiting, late = [*in_turns(Act.F, sides[:2], options)], Ops(), Ops()
    links = _with_ends(chain)
    apart = len(links) == 1 or _reach(list(_stretches(chain.phases[::-1]))) > 0
    for f, b in zip(sides[2:], sides, strict=False):
        if apart:
            ops, waiting, late = [*ops, *waiting, *late], (), ()
        for ahead, behind in zip(links, links[::-1], strict=True):
            ops += _links(f, ahead, b, behind, options, late, waiting)
            waiting, late = _waiting(f, ahead, b, behind, options), _late(b, behind, options)
    return (*ops, *waiting, *late, *in_turns(Act.B, sides[-2:], options))


def _with_ends(chain: Chain) -> Sequence[Link]:
    """Links with all that stands before the first and after the last of them."""
    links = list(chain.links)
    links[0] = replace(links[0], before=(*chain.first, *links[0].before))
    links[-1] = replace(links[-1], after=(*links[-1].after, *chain.last))
    return links


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
    is left over of f. Weight gradients of b's first link wait until its message is on its way, where there is
    one."""
    ops, waiting, late = list[Op](), Ops(), Ops()
    f_links = f.chain.links if f else ()
    b_links = b.chain.links[::-1] if b else ()
    if f:
        ops += [*f.receive, *f.ops(Act.F, f.chain.first)]
    if b:
        ops += [*b.receive, *b.ops(Act.B, b.chain.last[::-1])]
    both = min(len(f_links), len(b_links))
    pairs: list[tuple[Link | None, Link | None]] = [*zip(f_links, b_links, strict=False)]
    pairs += [(None, behind) for behind in b_links[both:]] + [(ahead, None) for ahead in f_links[both:]]
    for ahead, behind in pairs:
        both_sides = (f if ahead else None, ahead, b if behind else None, behind)
        ops += _links(*both_sides, options, late if behind else (), waiting)
        waiting = _waiting(*both_sides, options)
        late = _late(b, behind, options) if behind else late
        if not any(link and link.post for link in (ahead, behind)):
            ops, waiting = [*ops, *waiting], ()
    own = Ops()
    if b and b_links and options.delayed:
        own = (*late, *b.weights(b_links[-1].mix, *b_links[-1].before))
    alone = not any(side and side.send for side in (f, b))
    ops += [*own, *waiting] if alone else waiting
    if f and not f.chain.last:
        ops += f.send
    if b and not b.chain.first:
        ops += b.send
    if not alone:
        ops += own
    if f and f.chain.last:
        ops += [*f.ops(Act.F, f.chain.last), *f.send]
    if b and b.chain.first:
        ops += [*b.ops(Act.B, b.chain.first[::-1]), *b.send]
    return tuple(ops)


def _links(
    f: Side | None,
    ahead: Link | None,
    b: Side | None,
    behind: Link | None,
    options: Options,
    late: Ops,
    waiting: Ops,
) -> Iterator[Op]:
    """Two links, in the order of issue, but for what may wait; and between them what has waited of the links
    before. The stream of a phase says what runs beside what."""

    def forward(*phases: Phase | None) -> Iterator[Op]:
        if f:
            yield from f.ops(Act.F, [phase for phase in phases if phase])

    def backward(*phases: Phase | None) -> Iterator[Op]:
        if b:
            yield from b.ops(Act.B, [phase for phase in phases if phase])

    def weights(*phases: Phase | None) -> Iterator[Op]:
        if b and options.delayed:
            yield from b.weights(*phases)

    ahead, behind = ahead or _NOTHING, behind or _NOTHING
    mixers = (behind.mix, *behind.before[::-1])
    yield from backward(*behind.after[::-1], behind.post, behind.combine)
    yield from waiting
    yield from forward(*ahead.before, ahead.mix)
    yield from late
    yield from backward(behind.experts)
    yield from forward(ahead.dispatch)
    yield from weights(behind.post, behind.combine)
    yield from islice(weights(behind.experts), 1)
    yield from backward(behind.dispatch)
    if options.early_release:
        yield from backward(*mixers)
    yield from forward(ahead.experts, ahead.combine)
    if not options.early_release:
        yield from backward(*mixers)


def _waiting(f: Side | None, ahead: Link | None, b: Side | None, behind: Link | None, options: Options) -> Ops:
    """What comes last of two links, and may wait until rows of the next ones are on their way. Weight gradients
    of b's first link are not among it."""
    forward, weights = Ops(), Ops()
    if f and ahead:
        forward = tuple(f.ops(Act.F, [phase for phase in (ahead.post, *ahead.after) if phase]))
    if b and behind and options.delayed and behind is not b.chain.links[0]:
        weights = b.weights(behind.mix, *behind.before[::-1])
    return (*weights, *forward) if ahead and ahead.post else (*forward, *weights)


def _late(b: Side | None, behind: Link, options: Options) -> Ops:
    """The weight gradients of experts that wait for the next link: those of all buckets but the first."""
    return b.weights(behind.experts)[1:] if b and options.delayed else ()


def in_turns(act: Act, sides: Sequence[Side], options: Options = PLAIN) -> Ops:
    """Forwards beside each other, or backwards: each computes until something of it travels, then it is the
    next one's turn. Weight gradients come right behind, while it travels. Backwards stay as far apart as it
    takes for weights that are reduced together to have the whole gradient of one before the next adds to it."""
    paths: list[list[Ops]] = []
    for number, side in enumerate(sides):
        stretches = list(_stretches(side.chain.phases if act is Act.F else side.chain.phases[::-1]))
        apart = number * _reach(stretches) if act is Act.B else 0
        delayed = options.delayed and act is Act.B
        own = [(*side.ops(act, each), *(side.weights(*each) if delayed else ())) for each in stretches]
        paths.append([*[()] * apart, *own])
    return tuple(op for turn in zip_longest(*paths, fillvalue=()) for ops in turn for op in ops)


def _stretches(phases: Sequence[Phase]) -> Iterator[Sequence[Phase]]:
    """Phases up to the next one that travels, again and again."""
    begin = 0
    for end, phase in enumerate(phases, 1):
        if phase.stream is Stream.COMMUNICATION or end == len(phases):
            yield phases[begin:end]
            begin = end


def _reach(stretches: Sequence[Sequence[Phase]]) -> int:
    """Over how many stretches a backward adds to the gradients of weights that are reduced together: those of a
    block, where a projection follows its experts; those of an MTP depth around its blocks."""
    found: dict[tuple[int | None, int | None], list[int]] = {}
    for number, stretch in enumerate(stretches):
        for phase in stretch:
            if phase.kind in ("mix", "enter", "final_norm") or (phase.joins and phase.buckets):
                found.setdefault((phase.depth, phase.block), []).append(number)
    return max((numbers[-1] - numbers[0] for numbers in found.values()), default=0)


_NOTHING = Link(mix=Phase(kind="none"))
"""The side that is absent; nothing of it is issued."""


def all_weights(b: Side) -> Ops:
    """All weight gradients of a segment, in the order of its backward."""
    links = (
        (link.post, link.combine, link.experts, link.mix, *link.before[::-1]) for link in b.chain.links[::-1]
    )
    return b.weights(*(phase for link in links for phase in link))
