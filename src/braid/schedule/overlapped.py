"""1F1B with overlapped expert communication: the phases of a forward interleave with those of another backward.

While the tokens of one micro-batch are in an all-to-all, the other micro-batch computes (as in DeepSeek-V3 and
Megatron's `overlap_moe_expert_parallel_comm`). `overlapped` pairs each forward after the warm-up with the
backward that (interleaved) 1F1B would run next, after one more warm-up forward: so the two are independent, at
the price of one more live micro-batch. `pair` decides the order in which the phases of the two are issued.

A link of f (forward) and a link of b (backward) interleave like this:

    b  after  combine*                experts             W  dispatch*                      mix          W
    f                   before  mix             dispatch*              experts  combine*         after

where a star marks the communication stream. With `early_release`, b's `mix` comes before f's `experts`: mixer
activations are freed earlier, but nothing overlaps with f's `combine`.

If `post` is a phase of its own, the next link's all-to-all is issued first, then the remaining weight gradients
of this link, and last the phases that depend on returning tokens:

    b  mix  | after  post  combine*  W of mix
    f       |                                  post  after | before  mix  ...

If the weight gradients of experts have two buckets (see `phases`), the second is delayed to the next link,
right before its `experts`:

    b  after  combine*               W(in) of the link before  experts             W(down)  dispatch*  ...
    f                   before  mix                                     dispatch*                      ...

Then more compute overlaps with `combine` and less with f's `dispatch`: that exposes less communication if
experts take longer than mixers and transfers take about as long as compute. Expert activations live longer.

The first forward and the last backward of a step have no partner. With `paired_ends` the first two forwards
overlap with each other, and so do the last two backwards; in between, a forward overlaps with the backward of
the micro-batch two before it, at the price of one more live micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from math import ceil
from typing import NamedTuple

from braid.schedule.builders import grouped, neighbour, round_robin
from braid.schedule.ops import Act, Op, Ops, Schedule, Turn, segments_of
from braid.schedule.phases import Chain, Link, Phase, Stream

OVERLAPPED = "overlapped"


class Options(NamedTuple):
    """Options of an overlapped schedule."""

    delayed: bool = False
    """Whether weight gradients are delayed to `W` ops."""
    early_release: bool = False
    """Whether the mixers of a backward precede the experts of the forward it is paired with."""
    paired_ends: bool = False
    """Whether the first two forwards overlap, and the last two backwards. Without a pipeline only."""


PLAIN = Options()


class Side(NamedTuple):
    """One of the two of a pair: a micro-batch on a segment, in one direction, with its messages."""

    turn: Turn
    chain: Chain
    receive: tuple[Op, ...] = ()
    send: tuple[Op, ...] = ()

    def ops(self, act: Act, phases: Sequence[Phase]) -> Iterator[Op]:
        micro_batch, segment = self.turn
        for phase in phases:
            yield Op(act=act, micro_batch=micro_batch, segment=segment, phase=phase.name)

    def wgrads(self, *phases: Phase | None) -> Ops:
        """A `W` for each bucket of these phases."""
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
    """Overlapped (interleaved) 1F1B over the chains of all segments. Warm-up and cool-down have one side
    only."""
    segments = len(chains)
    virtual, holder = segments // pp, round_robin(pp, segments)
    if options.paired_ends:
        assert segments == 1, "paired ends need a single segment: the ends of a pipeline wait for messages"
        lists, bound = [_paired_ends(chains[0], micro_batches, options)], [min(micro_batches, 3)]
        return _schedule(chains, holder, micro_batches, lists, bound, options)
    groups = ceil(micro_batches / (group_size or pp))
    group = max(pp, ceil(micro_batches / groups)) if pp > 1 else 1
    lists, bound, pairs = [], [], Pairs(chains, holder)
    for rank in range(pp):
        stages = segments_of(holder, rank)
        warm_up = 2 * (pp - rank - 1) + (virtual - 1) * group + 1
        forwards, backwards = (grouped(path, micro_batches, group) for path in (stages, stages[::-1]))
        ops: list[Op] = []
        for forward, backward in _pairs(forwards, backwards, warm_up):
            f = None if forward is None or forward[0] >= micro_batches else forward
            b = None if backward is None or backward[0] >= micro_batches else backward
            ops += pairs.ops(f, b, options)
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


def _pairs(
    forwards: Sequence[Turn], backwards: Sequence[Turn], warm_up: int
) -> Iterator[tuple[Turn | None, Turn | None]]:
    """Warm-up forwards, then a forward for every backward as long as there are any."""
    for turn in forwards[:warm_up]:
        yield turn, None
    yield from zip_longest(forwards[warm_up:], backwards)


def _paired_ends(chain: Chain, micro_batches: int, options: Options) -> Ops:
    """Two forwards, pairs of a forward and a backward, two backwards: the list of a rank without a pipeline.

    The trailing phases of a pair are issued while the next pair's tokens are in transit, so a backward may
    start before the previous one has ended. The exception is a unit of weights that would get gradients of
    both: then pairs do not overlap."""
    sides = [Side((micro_batch, 0), chain) for micro_batch in range(micro_batches)]
    ops, trailing, late = [*_overlap_same_direction(Act.F, sides[:2], options)], Ops(), Ops()
    # The first and last link take in the phases around the blocks.
    links = list(chain.links)
    links[0] = replace(links[0], before=(*chain.first, *links[0].before))
    links[-1] = replace(links[-1], after=(*links[-1].after, *chain.last))
    separate = len(links) == 1 or _reach(list(_stretches(chain.phases[::-1]))) > 0
    for f, b in zip(sides[2:], sides, strict=False):
        if separate:
            ops, trailing, late = [*ops, *trailing, *late], (), ()
        for f_link, b_link in zip(links, links[::-1], strict=True):
            ops += _links(f, f_link, b, b_link, options, late, trailing)
            trailing, late = _trailing(f, f_link, b, b_link, options), _late(b, b_link, options)
    return (*ops, *trailing, *late, *_overlap_same_direction(Act.B, sides[-2:], options))


def side(act: Act, turn: Turn | None, chains: Sequence[Chain], holder: Sequence[int]) -> Side | None:
    """A turn with its chain, and with messages to neighbours on other ranks."""
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


class Pairs:
    """The ops of pairs of turns. Those of two segments are the same for all micro-batches, so they are put in
    order once."""

    def __init__(self, chains: Sequence[Chain], holder: Sequence[int]) -> None:
        self.chains, self.holder = chains, holder
        self._known: dict[tuple[int | None, int | None, Options], list[tuple[Op, bool]]] = {}
        """For the segments of a pair, its ops for some micro-batches, and whether each is of the forward."""

    def ops(self, forward: Turn | None, backward: Turn | None, options: Options = PLAIN) -> Iterator[Op]:
        """The ops of a pair, of which one may be absent."""
        key = (forward and forward[1], backward and backward[1], options)
        if key not in self._known:
            f = side(Act.F, forward and (0, forward[1]), self.chains, self.holder)
            b = side(Act.B, backward and (1, backward[1]), self.chains, self.holder)
            self._known[key] = [(op, op.micro_batch == 0) for op in pair(f, b, options)]
        of_forward, of_backward = (turn and turn[0] for turn in (forward, backward))
        for op, forwards in self._known[key]:
            number = of_forward if forwards else of_backward
            yield Op(act=op.act, micro_batch=number, segment=op.segment, phase=op.phase, peer=op.peer)

    def all_wgrads(self, turn: Turn) -> Ops:
        """All weight gradients of a turn, in backward order."""
        links = (
            (link.post, link.combine, link.experts, link.mix, *link.before[::-1])
            for link in self.chains[turn[1]].links[::-1]
        )
        return Side(turn, self.chains[turn[1]]).wgrads(*(phase for link in links for phase in link))


def pair(f: Side | None, b: Side | None, options: Options = PLAIN) -> Ops:
    """Interleave a forward and a backward link by link, f's first with b's last. Unpaired links of b come
    before those of f. If there is a message to send, it precedes the weight gradients of b's first link."""
    ops, trailing, late = list[Op](), Ops(), Ops()
    f_links = f.chain.links if f else ()
    b_links = b.chain.links[::-1] if b else ()
    if f:
        ops += [*f.receive, *f.ops(Act.F, f.chain.first)]
    if b:
        ops += [*b.receive, *b.ops(Act.B, b.chain.last[::-1])]
    paired = min(len(f_links), len(b_links))
    pairs: list[tuple[Link | None, Link | None]] = [*zip(f_links, b_links, strict=False)]
    pairs += [(None, b_link) for b_link in b_links[paired:]] + [(f_link, None) for f_link in f_links[paired:]]
    for f_link, b_link in pairs:
        both_sides = (f if f_link else None, f_link, b if b_link else None, b_link)
        ops += _links(*both_sides, options, late if b_link else (), trailing)
        trailing = _trailing(*both_sides, options)
        late = _late(b, b_link, options) if b_link else late
        if not any(link and link.post for link in (f_link, b_link)):
            ops, trailing = [*ops, *trailing], ()
    last_wgrads = Ops()
    if b and b_links and options.delayed:
        last_wgrads = (*late, *b.wgrads(b_links[-1].mix, *b_links[-1].before))
    sends = any(side and side.send for side in (f, b))
    ops += trailing if sends else [*last_wgrads, *trailing]
    if f and not f.chain.last:
        ops += f.send
    if b and not b.chain.first:
        ops += b.send
    if sends:
        ops += last_wgrads
    if f and f.chain.last:
        ops += [*f.ops(Act.F, f.chain.last), *f.send]
    if b and b.chain.first:
        ops += [*b.ops(Act.B, b.chain.first[::-1]), *b.send]
    return tuple(ops)


def _links(
    f: Side | None,
    f_link: Link | None,
    b: Side | None,
    b_link: Link | None,
    options: Options,
    late: Ops,
    trailing: Ops,
) -> Iterator[Op]:
    """Two links in the order of issue, without their own trailing ops but with those of the links before. What
    overlaps follows from the streams of the phases."""

    def forward(*phases: Phase | None) -> Iterator[Op]:
        if f:
            yield from f.ops(Act.F, [phase for phase in phases if phase])

    def backward(*phases: Phase | None) -> Iterator[Op]:
        if b:
            yield from b.ops(Act.B, [phase for phase in phases if phase])

    def wgrads(*phases: Phase | None) -> Iterator[Op]:
        if b and options.delayed:
            yield from b.wgrads(*phases)

    f_link, b_link = f_link or _ABSENT, b_link or _ABSENT
    mixers = (b_link.mix, *b_link.before[::-1])
    yield from backward(*b_link.after[::-1], b_link.post, b_link.combine)
    yield from trailing
    yield from forward(*f_link.before, f_link.mix)
    yield from late
    yield from backward(b_link.experts)
    yield from forward(f_link.dispatch)
    yield from wgrads(b_link.post, b_link.combine)
    yield from islice(wgrads(b_link.experts), 1)
    yield from backward(b_link.dispatch)
    if options.early_release:
        yield from backward(*mixers)
    yield from forward(f_link.experts, f_link.combine)
    if not options.early_release:
        yield from backward(*mixers)


def _trailing(
    f: Side | None, f_link: Link | None, b: Side | None, b_link: Link | None, options: Options
) -> Ops:
    """The last ops of two links, which may be issued after the next links' all-to-alls have started. Without
    the weight gradients of b's first link, which `pair` places."""
    forward, wgrads = Ops(), Ops()
    if f and f_link:
        forward = tuple(f.ops(Act.F, [phase for phase in (f_link.post, *f_link.after) if phase]))
    if b and b_link and options.delayed and b_link is not b.chain.links[0]:
        wgrads = b.wgrads(b_link.mix, *b_link.before[::-1])
    return (*wgrads, *forward) if f_link and f_link.post else (*forward, *wgrads)


def _late(b: Side | None, b_link: Link, options: Options) -> Ops:
    """The weight gradients of experts that are delayed to the next link: all buckets but the first."""
    return b.wgrads(b_link.experts)[1:] if b and options.delayed else ()


def _overlap_same_direction(act: Act, sides: Sequence[Side], options: Options = PLAIN) -> Ops:
    """Overlap forwards with forwards, or backwards with backwards: each computes up to its next communication,
    then the next one takes over. Weight gradients follow directly, while tokens are in transit. Backwards are
    staggered so that each unit of weights has the complete gradient of one before the next adds to it."""
    paths: list[list[Ops]] = []
    for number, side in enumerate(sides):
        stretches = list(_stretches(side.chain.phases if act is Act.F else side.chain.phases[::-1]))
        stagger = number * _reach(stretches) if act is Act.B else 0
        delayed = options.delayed and act is Act.B
        own = [(*side.ops(act, each), *(side.wgrads(*each) if delayed else ())) for each in stretches]
        paths.append([*[()] * stagger, *own])
    return tuple(op for turn in zip_longest(*paths, fillvalue=()) for ops in turn for op in ops)


def _stretches(phases: Sequence[Phase]) -> Iterator[Sequence[Phase]]:
    """Split phases after each one that communicates."""
    begin = 0
    for end, phase in enumerate(phases, 1):
        if phase.stream is Stream.COMMUNICATION or end == len(phases):
            yield phases[begin:end]
            begin = end


def _reach(stretches: Sequence[Sequence[Phase]]) -> int:
    """The most stretches over which a backward adds to one unit of weights: that of a block with a projection
    after its experts, or that of an MTP depth around its blocks."""
    by_unit: dict[tuple[int | None, int | None], list[int]] = {}
    for number, stretch in enumerate(stretches):
        for phase in stretch:
            if phase.kind in ("mix", "enter", "final_norm") or (phase.joins and phase.buckets):
                by_unit.setdefault((phase.depth, phase.block), []).append(number)
    return max((numbers[-1] - numbers[0] for numbers in by_unit.values()), default=0)


_ABSENT = Link(mix=Phase(kind="none"))
"""Stands for the link of an absent side; none of its ops are issued."""
