"""Builders: from the size of a pipeline to the list of every rank.

Segments are dealt to pipeline ranks in turn, or folded onto them: `dealt` and `folded` say who holds which, and
everybody else reads it in a schedule's `holder`. A builder decides in which order each rank runs its `F` and
`B`; `with_messages` then places each receive right before the op that reads it, and each send right after the
op that made it. Receiving ahead of time is the engine's business: it may post any receive earlier, channel by
channel in the order of the list.

Every schedule made here passes `check`, for any number of ranks, virtual stages and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule, Turn
from braid.schedule.phases import Chain
from braid.validators import at_least, nearest

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
FORWARD = "forward"
BUILDERS: Mapping[str, str] = MappingProxyType(
    {
        ONE_F_ONE_B: "one segment per rank; each forward is followed by the oldest backward",
        INTERLEAVED: "several segments per rank; a smaller bubble for more messages and more live activations",
        FORWARD: "no backward: evaluation",
    }
)
"""Every builder by name, with what it is for."""


def build(
    name: str, *, pp: int, virtual: int = 1, micro_batches: int, group_size: int | None = None
) -> Schedule:
    """The schedule of the builder with this name. `group_size` is for `interleaved` alone."""
    _require(name, pp=pp, virtual=virtual, micro_batches=micro_batches, group_size=group_size)
    if name == ONE_F_ONE_B:
        return one_f_one_b(pp, micro_batches)
    if name == INTERLEAVED:
        return interleaved(pp, virtual, micro_batches, group_size)
    return forward_only(pp, virtual, micro_batches)


def schedule_problems(
    name: str, *, pp: int, virtual: int = 1, micro_batches: int, group_size: int | None = None
) -> Iterator[Problem]:
    """Everything that keeps `build` from making this schedule."""
    if name not in BUILDERS:
        rule = f"is no schedule{nearest(name, BUILDERS)}"
        yield Problem(field="schedule", value=name, rule=rule, remedy=" or ".join(BUILDERS))
    for field, value in (("pp", pp), ("virtual", virtual), ("micro_batches", micro_batches)):
        yield from at_least(field, value, 1)
    if name == ONE_F_ONE_B and virtual > 1:
        rule = f"{ONE_F_ONE_B} takes one segment per rank"
        yield Problem(field="virtual", value=virtual, rule=rule, remedy=f"1, or schedule to {INTERLEAVED}")
    if group_size is not None:
        if name != INTERLEAVED:
            rule = f"only {INTERLEAVED} has groups of micro-batches"
            yield Problem(field="group_size", value=group_size, rule=rule, remedy="nothing")
        elif group_size < pp:
            rule = "a smaller group than pp runs into itself: rank 0 waits for what it has not begun"
            yield Problem(field="group_size", value=group_size, rule=rule, remedy=f"{pp} or more")


def one_f_one_b(pp: int, micro_batches: int) -> Schedule:
    """1F1B: pp - rank - 1 forwards to warm up, then one forward and one backward in turn, then the rest."""
    _require(ONE_F_ONE_B, pp=pp, micro_batches=micro_batches)
    turns = [[(m, rank) for m in range(micro_batches)] for rank in range(pp)]
    order = [_alternate(turns[rank], turns[rank], warm_up=pp - rank - 1) for rank in range(pp)]
    bound = tuple(min(micro_batches, pp - rank) for rank in range(pp))
    return _schedule(ONE_F_ONE_B, order, segments=pp, micro_batches=micro_batches, live_bound=bound)


def interleaved(pp: int, virtual: int, micro_batches: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B in Megatron's order: groups of micro-batches, pp of them unless told otherwise, pass one
    virtual stage after the other, after 2 * (pp - rank - 1) + (virtual - 1) * group_size forwards to warm up.

    Micro-batches that `group_size` does not divide are shared evenly by as many groups as they need. Where the
    last group is not full, the order is that of a full one without the ops of the micro-batches that are not
    there: what is left of an order without a deadlock has none either, and holds no more memory.
    With one virtual stage this is 1F1B; on one rank it is the plain loop, micro-batch after micro-batch.
    """
    _require(INTERLEAVED, pp=pp, virtual=virtual, micro_batches=micro_batches, group_size=group_size)
    segments = pp * virtual
    if pp == 1:
        order = [_plain_loop(segments, micro_batches)]
        return _schedule(
            INTERLEAVED, order, segments=segments, micro_batches=micro_batches, live_bound=(segments,)
        )
    if virtual == 1:
        return replace(one_f_one_b(pp, micro_batches), name=INTERLEAVED)
    groups = ceil(micro_batches / (group_size or pp))
    group = max(pp, ceil(micro_batches / groups))
    order, bound = [], []
    for rank in range(pp):
        stages = held(dealt(pp, segments), rank)
        warm_up = 2 * (pp - rank - 1) + (virtual - 1) * group
        full = _alternate(
            grouped(stages, micro_batches, group), grouped(stages[::-1], micro_batches, group), warm_up
        )
        order.append([(act, turn) for act, turn in full if turn[0] < micro_batches])
        bound.append(min(virtual * micro_batches, warm_up + 1))
    return _schedule(
        INTERLEAVED, order, segments=segments, micro_batches=micro_batches, live_bound=tuple(bound)
    )


def forward_only(pp: int, virtual: int, micro_batches: int) -> Schedule:
    """Evaluation where segments are dealt."""
    _require(FORWARD, pp=pp, virtual=virtual, micro_batches=micro_batches)
    return evaluation(dealt(pp, pp * virtual), micro_batches)


def evaluation(holder: Sequence[int], micro_batches: int) -> Schedule:
    """Forwards alone, whoever holds the segments; nothing is kept for a backward. Where they are dealt, groups
    of pp micro-batches or a few more pass one virtual stage after the other; where they are folded, a rank
    begins pp - rank micro-batches and then takes one of each arm in turn."""
    pp = max(holder) + 1
    if tuple(holder) == folded(pp):
        order = [_there_and_back(held(holder, rank), micro_batches, first=pp - rank) for rank in range(pp)]
    else:
        group = ceil(micro_batches / max(1, micro_batches // pp))
        order = [grouped(held(holder, rank), micro_batches, group) for rank in range(pp)]
    forwards = [[(Act.F, turn) for turn in turns if turn[0] < micro_batches] for turns in order]
    return Schedule(
        name=FORWARD,
        micro_batches=micro_batches,
        holder=tuple(holder),
        backward=False,
        live_bound=(0,) * pp,
        ops=tuple(with_messages(rank, forwards[rank], holder) for rank in range(pp)),
    )


def _there_and_back(arms: Sequence[int], micro_batches: int, first: int) -> list[Turn]:
    down, up = arms
    turns = [(micro_batch, down) for micro_batch in range(first)]
    for micro_batch in range(micro_batches):
        turns += [(micro_batch, up), (micro_batch + first, down)]
    return turns


def with_sums(schedule: Schedule, copies: Mapping[str, Sequence[int]]) -> Schedule:
    """The schedule with a closing `SUM_COPIES` for every weight of which several ranks hold a copy.

    `copies` says which pipeline ranks hold each; a weight that one rank holds needs no sum. All ranks take the
    weights in the same order, so that no two sums can wait for each other.
    """
    sums = []
    for name, holders in copies.items():
        members = tuple(sorted(set(holders)))
        collective = Collective(communicator=name, label="grad", members=members)
        if len(members) > 1:
            sums.append(Op(act=Act.SUM_COPIES, collectives=(collective,)))
    return replace(
        schedule,
        ops=tuple(
            (*ops, *(op for op in sums if rank in op.collectives[0].members))
            for rank, ops in enumerate(schedule.ops)
        ),
    )


def in_phases(schedule: Schedule, chains: Sequence[Chain]) -> Schedule:
    """A schedule of whole segments in phases: each `F` and `B` becomes one op for each phase of its segment, in
    the order of the chain or in reverse. Messages stay where they are."""
    phases = tuple(chain.phases for chain in chains)
    names = [tuple(phase.name for phase in segment) for segment in phases]

    def split(op: Op) -> Iterator[Op]:
        if op.act not in (Act.F, Act.B) or op.segment is None:
            yield op
            return
        for name in names[op.segment] if op.act is Act.F else names[op.segment][::-1]:
            yield Op(act=op.act, micro_batch=op.micro_batch, segment=op.segment, phase=name)

    lists = tuple(tuple(part for op in ops for part in split(op)) for ops in schedule.ops)
    return replace(schedule, ops=lists, phases=phases)


# ----------------------------------------------------------------------------------------- who holds what


def dealt(pp: int, segments: int) -> tuple[int, ...]:
    """The rank of each segment, dealt in turn: segment i is virtual stage i // pp of rank i % pp."""
    return tuple(segment % pp for segment in range(segments))


def folded(pp: int) -> tuple[int, ...]:
    """The rank of each of 2 * pp segments, down the pipeline and up again: rank 0 has both ends."""
    return (*range(pp), *range(pp)[::-1])


def held(holder: Sequence[int], rank: int) -> tuple[int, ...]:
    """The segments of a rank, in the order of a forward."""
    return tuple(segment for segment, each in enumerate(holder) if each == rank)


# ------------------------------------------------------------------------------------- how they are made

Order = Sequence[tuple[Act, Turn]]
"""What one rank computes, in order, before messages are placed."""


def with_messages(rank: int, order: Order, holder: Sequence[int]) -> Ops:
    """The list of one rank: every op that computes, after the receive it reads and before the send it feeds."""
    ops = []
    for act, (micro_batch, segment) in order:
        step, receive, send = (1, Act.RECV_F, Act.SEND_F) if act is Act.F else (-1, Act.RECV_B, Act.SEND_B)
        source, target = neighbour(holder, segment, -step), neighbour(holder, segment, step)
        if source not in (None, rank):
            ops.append(Op(act=receive, micro_batch=micro_batch, segment=segment, peer=source))
        ops.append(Op(act=act, micro_batch=micro_batch, segment=segment))
        if target not in (None, rank):
            ops.append(Op(act=send, micro_batch=micro_batch, segment=segment, peer=target))
    return tuple(ops)


def neighbour(holder: Sequence[int], segment: int, step: int) -> int | None:
    """Which rank holds the segment before or after this one, if there is one."""
    return holder[segment + step] if 0 <= segment + step < len(holder) else None


def _schedule(
    name: str, order: Sequence[Order], *, segments: int, micro_batches: int, live_bound: tuple[int, ...]
) -> Schedule:
    pp = len(order)
    holder = dealt(pp, segments)
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        holder=holder,
        backward=True,
        live_bound=live_bound,
        ops=tuple(with_messages(rank, order[rank], holder) for rank in range(pp)),
    )


def _alternate(forwards: Sequence[Turn], backwards: Sequence[Turn], warm_up: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    order = [(Act.F, turn) for turn in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [(Act.F, forward), (Act.B, backward)]
    return order + [(Act.B, turn) for turn in backwards[len(forwards) - warm_up :]]


def grouped(stages: Sequence[int], micro_batches: int, group: int) -> list[Turn]:
    """Group after group through all virtual stages; the last group is full, with micro-batches past the end."""
    return [
        (micro_batch, segment)
        for first in range(0, micro_batches, group)
        for segment in stages
        for micro_batch in range(first, first + group)
    ]


def _plain_loop(segments: int, micro_batches: int) -> Order:
    return [
        (act, (micro_batch, segment))
        for micro_batch in range(micro_batches)
        for act, path in ((Act.F, range(segments)), (Act.B, range(segments)[::-1]))
        for segment in path
    ]


def _require(
    name: str, *, pp: int, virtual: int = 1, micro_batches: int, group_size: int | None = None
) -> None:
    problems = schedule_problems(
        name, pp=pp, virtual=virtual, micro_batches=micro_batches, group_size=group_size
    )
    if found := list(problems):
        raise ConfigError(found)
