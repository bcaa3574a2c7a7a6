"""Pipeline schedule builders: 1F1B, interleaved 1F1B (Megatron), and forward-only for evaluation.

Segments (virtual stages) are placed on pipeline ranks round-robin or in a V shape: `round_robin` and `v_shape`
compute the placement, all other code reads it from `Schedule.holder`. A builder decides the order of `F` and
`B` on each rank; `with_messages` then places each receive right before the op that reads it, and each send
right after the op that produces it. The executor may post receives earlier, in list order within each channel.

Every schedule built here passes `check`, for any number of ranks, virtual stages and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from braid.errors import ConfigError, Problem
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule, Turn, segments_of
from braid.schedule.phases import Chain
from braid.validators import at_least, nearest

ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
FORWARD = "forward"
BUILDERS: Mapping[str, str] = MappingProxyType(
    {
        ONE_F_ONE_B: "one segment per rank; forwards and backwards alternate",
        INTERLEAVED: "several segments per rank; a smaller bubble for more messages and more live activations",
        FORWARD: "no backward: evaluation",
    }
)
"""The builders, each with a description."""


def build(
    name: str, *, pp: int, virtual: int = 1, micro_batches: int, group_size: int | None = None
) -> Schedule:
    """Build a schedule by name. Only `interleaved` takes a `group_size`."""
    _require(name, pp=pp, virtual=virtual, micro_batches=micro_batches, group_size=group_size)
    if name == ONE_F_ONE_B:
        return one_f_one_b(pp, micro_batches)
    if name == INTERLEAVED:
        return interleaved(pp, virtual, micro_batches, group_size)
    return forward_only(pp, virtual, micro_batches)


def schedule_problems(
    name: str, *, pp: int, virtual: int = 1, micro_batches: int, group_size: int | None = None
) -> Iterator[Problem]:
    """Why `build` cannot build this schedule."""
    if name not in BUILDERS:
        rule = f"is not a schedule{nearest(name, BUILDERS)}"
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
            rule = "must be at least pp: with a smaller group, rank 0 waits for an op it has not started"
            yield Problem(field="group_size", value=group_size, rule=rule, remedy=f"{pp} or more")


def one_f_one_b(pp: int, micro_batches: int) -> Schedule:
    """1F1B (PipeDream-flush): pp - rank - 1 warm-up forwards, then alternating forwards and backwards, then the
    remaining backwards."""
    _require(ONE_F_ONE_B, pp=pp, micro_batches=micro_batches)
    turns = [[(m, rank) for m in range(micro_batches)] for rank in range(pp)]
    order = [_alternate(turns[rank], turns[rank], warm_up=pp - rank - 1) for rank in range(pp)]
    bound = tuple(min(micro_batches, pp - rank) for rank in range(pp))
    return _schedule(ONE_F_ONE_B, order, segments=pp, micro_batches=micro_batches, live_bound=bound)


def interleaved(pp: int, virtual: int, micro_batches: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B in Megatron's order: groups of `group_size` (by default pp) micro-batches pass one
    virtual stage after the other, after 2 * (pp - rank - 1) + (virtual - 1) * group_size warm-up forwards.

    If `group_size` does not divide the micro-batches, they are spread evenly over as many groups as needed. An
    incomplete last group has the order of a complete one without the ops of the missing micro-batches: dropping
    whole micro-batches from a deadlock-free order cannot introduce a deadlock, nor raise the memory peak. With
    one virtual stage this is 1F1B; on one rank it is plain gradient accumulation.
    """
    _require(INTERLEAVED, pp=pp, virtual=virtual, micro_batches=micro_batches, group_size=group_size)
    segments = pp * virtual
    if pp == 1:
        order = [_sequential(segments, micro_batches)]
        return _schedule(
            INTERLEAVED, order, segments=segments, micro_batches=micro_batches, live_bound=(segments,)
        )
    if virtual == 1:
        return replace(one_f_one_b(pp, micro_batches), name=INTERLEAVED)
    groups = ceil(micro_batches / (group_size or pp))
    group = max(pp, ceil(micro_batches / groups))
    order, bound = [], []
    for rank in range(pp):
        stages = segments_of(round_robin(pp, segments), rank)
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
    """Evaluation with round-robin placement."""
    _require(FORWARD, pp=pp, virtual=virtual, micro_batches=micro_batches)
    return evaluation(round_robin(pp, pp * virtual), micro_batches)


def evaluation(holder: Sequence[int], micro_batches: int) -> Schedule:
    """Forwards only, for any placement; no activations are kept. Round-robin: groups of pp micro-batches or a
    few more pass one virtual stage after the other. V shape: a rank starts pp - rank micro-batches on its first
    segment, then alternates between its two segments."""
    pp = max(holder) + 1
    if tuple(holder) == v_shape(pp):
        order = [_v_order(segments_of(holder, rank), micro_batches, first=pp - rank) for rank in range(pp)]
    else:
        group = ceil(micro_batches / max(1, micro_batches // pp))
        order = [grouped(segments_of(holder, rank), micro_batches, group) for rank in range(pp)]
    forwards = [[(Act.F, turn) for turn in turns if turn[0] < micro_batches] for turns in order]
    return Schedule(
        name=FORWARD,
        micro_batches=micro_batches,
        holder=tuple(holder),
        backward=False,
        live_bound=(0,) * pp,
        ops=tuple(with_messages(rank, forwards[rank], holder) for rank in range(pp)),
    )


def _v_order(segments: Sequence[int], micro_batches: int, first: int) -> list[Turn]:
    down, up = segments
    turns = [(micro_batch, down) for micro_batch in range(first)]
    for micro_batch in range(micro_batches):
        turns += [(micro_batch, up), (micro_batch + first, down)]
    return turns


def with_sums(schedule: Schedule, copies: Mapping[str, Sequence[int]]) -> Schedule:
    """Append a `SUM_COPIES` for every weight that several pipeline ranks hold.

    `copies` maps each weight to its ranks; a weight on a single rank needs no sum. All ranks sum the weights in
    the same order, so the sums cannot deadlock.
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
    """Split every `F` and `B` of a schedule of whole segments into one op per phase, in forward order or
    reversed. Messages stay where they are."""
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


# ------------------------------------------------------------------------------------------- placement


def round_robin(pp: int, segments: int) -> tuple[int, ...]:
    """The rank of each segment in a looping pipeline: segment i is virtual stage i // pp of rank i % pp."""
    return tuple(segment % pp for segment in range(segments))


def v_shape(pp: int) -> tuple[int, ...]:
    """The rank of each of 2 * pp segments, down the pipeline and back up: rank 0 has both ends of the model."""
    return (*range(pp), *range(pp)[::-1])


# ---------------------------------------------------------------------------------------------- orders

Order = Sequence[tuple[Act, Turn]]
"""The compute ops of one rank, before messages are placed."""


def with_messages(rank: int, order: Order, holder: Sequence[int]) -> Ops:
    """The list of one rank: each compute op between the receive of its input and the send of its output."""
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
    """The rank of the previous or next segment; None at the ends of the model."""
    return holder[segment + step] if 0 <= segment + step < len(holder) else None


def _schedule(
    name: str, order: Sequence[Order], *, segments: int, micro_batches: int, live_bound: tuple[int, ...]
) -> Schedule:
    pp = len(order)
    holder = round_robin(pp, segments)
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        holder=holder,
        backward=True,
        live_bound=live_bound,
        ops=tuple(with_messages(rank, order[rank], holder) for rank in range(pp)),
    )


def _alternate(forwards: Sequence[Turn], backwards: Sequence[Turn], warm_up: int) -> Order:
    """Warm-up forwards, then alternating forwards and backwards, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    order = [(Act.F, turn) for turn in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [(Act.F, forward), (Act.B, backward)]
    return order + [(Act.B, turn) for turn in backwards[len(forwards) - warm_up :]]


def grouped(stages: Sequence[int], micro_batches: int, group: int) -> list[Turn]:
    """Group after group through all virtual stages. The last group is padded with micro-batches past the end,
    which the caller drops."""
    return [
        (micro_batch, segment)
        for first in range(0, micro_batches, group)
        for segment in stages
        for micro_batch in range(first, first + group)
    ]


def _sequential(segments: int, micro_batches: int) -> Order:
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
    if all_problems := list(problems):
        raise ConfigError(all_problems)
