"""Activation offload in a schedule: places the ops that move what blocks have saved to host memory and back.

    F0.0:0.block OFFLOAD0.0:0.block#0 F0.0:1.block F0.0:2.block FREE0.0:0.block F0.0:3.block ...
    B0.0:3.block RELOAD0.0:0.block#0 B0.0:2.block B0.0:1.block B0.0:0.block

Of each segment, the first blocks are offloaded, which wait longest for their backward. Copies run beside
computation, one after another each way (`host_link`):

- `OFFLOAD` starts right behind the last forward phase of its block.
- `FREE` stands where the copy has ended, but not so late that more than one block is on the device that is not
  there in the end; the last one, no later than where the next turn or backward begins. There a link that is too
  slow makes the list wait, so that memory does not grow beyond the plan.
- `RELOAD` stands where the copy has to start so that it ends when the block is needed, but no earlier than
  blocks have left whose place it takes. Where all blocks are offloaded, none has, so two are on the device.
- Where at least four other turns begin between the forward and the backward of a turn, as in a pipeline, bounds
  are wider: `FREE` by the second of these turns, `RELOAD` from the second to last on. This takes the memory of
  two turns at most, which the estimate counts.

How long ops and copies take is given (`Durations`). Without it, each block counts the same, a backward as long
as two forwards, and the copies of a segment fill its forward.

A micro-batch whose backward follows its forward at once keeps a block if no other one runs meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.host_link import Back, Out, placed_back, placed_out
from braid.schedule.ops import Act, Op, Ops, Schedule, Turn
from braid.schedule.phases import Phase, Stream, phase_name

_FORWARD, _BACKWARD = 60, 120
"""Of a block without given durations; whole numbers for each of its phases, of which there are five at most."""


def block_of(phase: Phase) -> str | None:
    """The name of a phase's block in `OFFLOAD`, `FREE` and `RELOAD`. None outside of blocks, and in MTP depths,
    whose backward follows too soon."""
    return None if phase.block is None or phase.depth is not None else phase_name("block", phase.block)


def blocks_of(phases: Sequence[Phase]) -> dict[str, tuple[str, ...]]:
    """The blocks of a segment that have a backward, in forward order, each with its phases."""
    blocks: dict[str, tuple[str, ...]] = {}
    for phase in phases:
        name = block_of(phase)
        if name is not None and phase.backward:
            blocks[name] = (*blocks.get(name, ()), phase.name)
    return blocks


def chosen(phases: Sequence[Phase], share: float) -> tuple[str, ...]:
    """The blocks of a segment to offload: this share of them, rounded, the first ones first."""
    blocks = tuple(blocks_of(phases))
    return blocks[: int(share * len(blocks) + 0.5)]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """How long a rank computes, and how long its copies take: whole numbers of any unit."""

    op: Callable[[Op], int]
    """Of an op that computes."""
    copy: Callable[[Act, int, str], int]
    """Of the `OFFLOAD` or `RELOAD` of a block of a segment."""


def with_offloads(schedule: Schedule, share: float, durations: Durations | None = None) -> Schedule:
    """Insert `OFFLOAD`, `FREE` and `RELOAD` for this share of the blocks of each segment; all other ops keep
    their order. Replays are in the list already."""
    names = tuple(
        chosen(phases, share) if schedule.has_backward(segment) else ()
        for segment, phases in enumerate(schedule.phases)
    )
    if not any(names):
        return schedule
    slots = [0] * len(names)
    known = durations or equal_blocks(schedule, names)
    lists = tuple(_with_offloads(schedule, names, ops, slots, known) for ops in schedule.ops)
    return replace(schedule, ops=lists, offloaded=names, slots=tuple(slots))


def equal_blocks(schedule: Schedule, names: Sequence[Collection[str]]) -> Durations:
    """Durations if nothing is known: blocks are equal, and the copies of a segment fill its forward."""
    shares = {
        (segment, phase): (_FORWARD // len(computing), _BACKWARD // len(computing))
        for segment, phases in enumerate(schedule.phases)
        for block in blocks_of(phases).values()
        if (computing := computing_phases(phases, block))
        for phase in computing
    }
    copies = [
        _FORWARD * len(blocks_of(phases)) // max(len(own), 1)
        for phases, own in zip(schedule.phases, names, strict=True)
    ]

    def seconds(op: Op) -> int:
        forward, backward = shares.get((op.segment or 0, op.phase or ""), (0, 0))
        return {Act.F: forward, Act.B: backward}.get(op.act, 0)

    return Durations(op=seconds, copy=lambda act, segment, block: copies[segment])


def computing_phases(phases: Sequence[Phase], names: Collection[str]) -> tuple[str, ...]:
    """Those of some phases of a segment that run on the compute stream."""
    return tuple(each.name for each in phases if each.name in names and each.stream is Stream.COMPUTE)


def _with_offloads(
    schedule: Schedule, names: Sequence[Collection[str]], ops: Ops, slots: list[int], durations: Durations
) -> Ops:
    """The list of a rank with its copies; `slots` grows to the slots that each segment needs."""
    before: dict[int, list[Op]] = defaultdict(list)
    for act, place, key in _placed(schedule, names, ops, durations):
        micro_batch, segment, block = key
        before[place].append(Op(act=act, micro_batch=micro_batch, segment=segment, phase=block))
    used: dict[tuple[int, str], list[int]] = defaultdict(list)
    held: dict[_Key, int] = {}

    def in_slot(op: Op) -> Op:
        assert op.micro_batch is not None
        assert op.segment is not None
        assert op.phase is not None
        key, taken = (op.micro_batch, op.segment, op.phase), used[op.segment, op.phase]
        match op.act:
            case Act.OFFLOAD:
                held[key] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                taken.append(held[key])
                slots[op.segment] = max(slots[op.segment], held[key] + 1)
            case Act.RELOAD:
                taken.remove(held[key])
            case _:
                return op
        return replace(op, slot=held[key])

    return tuple(
        each
        for place, op in enumerate((*ops, None))
        for each in (*map(in_slot, before.get(place, ())), *(() if op is None else (op,)))
    )


_Key = tuple[int, int, str]
"""(micro-batch, segment, block)."""


class _Span(NamedTuple):
    """The places of a block's ops in a turn."""

    begin: int
    """Of its first forward."""
    end: int
    """Of its last forward."""
    start: int
    """Of the first op that needs what it has saved: a replay or a backward."""


class _Copied(NamedTuple):
    """A block that goes to the host in one micro-batch, and the places of its ops and their bounds."""

    key: _Key
    made: int
    free_by: int
    needed: int
    reload_from: int


def _placed(
    schedule: Schedule, names: Sequence[Collection[str]], ops: Ops, durations: Durations
) -> Iterator[tuple[Act, int, _Key]]:
    """Each copy, and before which place of a list it stands. Memory is freed before more is allocated."""
    begins = list(accumulate((durations.op(op) if op.act.computes else 0 for op in ops), initial=0))
    copies = sorted(_copies(schedule, names, ops), key=lambda copy: (copy.made, copy.needed))
    yield from ((Act.OFFLOAD, copy.made, copy.key) for copy in copies)
    outs = placed_out(
        begins,
        [
            Out(made=each.made, seconds=durations.copy(Act.OFFLOAD, *each.key[1:]), free_by=each.free_by)
            for each in copies
        ],
    )
    frees = [_next_computing(ops, each.place - 1) for each in outs]
    yield from ((Act.FREE, place, copy.key) for copy, place in zip(copies, frees, strict=True))
    coming = sorted(zip(copies, frees, strict=True), key=lambda each: each[0].needed)
    backs = placed_back(
        begins,
        [
            Back(
                needed=copy.needed,
                seconds=durations.copy(Act.RELOAD, *copy.key[1:]),
                reload_from=max(copy.reload_from, free),
            )
            for copy, free in coming
        ],
    )
    yield from ((Act.RELOAD, back.place, copy.key) for (copy, _), back in zip(coming, backs, strict=True))


def _copies(schedule: Schedule, names: Sequence[Collection[str]], ops: Ops) -> Iterator[_Copied]:
    """The blocks that a rank offloads in each micro-batch: those between whose forward and backward it runs two
    others, during which they leave and come back."""
    turns, runs = _turns(schedule, ops), _runs(schedule, ops)
    begun = sorted(
        place
        for spans in turns.values()
        for place in (min(each.begin for each in spans.values()), min(each.start for each in spans.values()))
    )
    for (micro_batch, segment), spans in turns.items():
        forward, backward = list(spans), sorted(spans, key=lambda name: spans[name].start)
        wanted = [name for name in reversed(forward) if name in names[segment]]
        end, start = spans[forward[-1]].end, spans[backward[0]].start
        others = begun[bisect_right(begun, end) : bisect_left(begun, start)]
        for number, name in enumerate(wanted):
            made, needed = _behind_sends(ops, spans[name].end), spans[name].start
            inside = [run for run in runs[bisect_left(runs, (made, made)) :] if run[1] < needed]
            if len(inside) < 2:
                continue
            if len(others) >= _WIDE:
                free_by, reload_from = others[1], others[-2]
            else:
                # One block more may be there than in the end; the last one stays while the head runs.
                behind = _first_backward(ops, end, (micro_batch, segment))
                if number:
                    behind = spans[forward[len(forward) - number]].end + 1
                free_by = min([behind, *others[:1]])
                left = min(number + 1, backward.index(name) - 1)
                reload_from = spans[backward[left]].start if left >= 0 else inside[-1][0]
            free_by = max(free_by, _next_computing(ops, inside[0][1]))
            yield _Copied((micro_batch, segment, name), made, free_by, needed, reload_from)


_WIDE = 4
"""Turns between the forward and the backward of another, from which on its bounds are wide."""


def _runs(schedule: Schedule, ops: Ops) -> list[tuple[int, int]]:
    """The first and the last place of each forward and each backward of a block, in order."""
    of_phase = _block_names(schedule)
    runs: dict[tuple[object, ...], tuple[int, int]] = {}
    for place, op in enumerate(ops):
        if op.act in (Act.F, Act.B) and (name := of_phase(op)) is not None:
            key = (op.act, op.micro_batch, op.segment, name)
            runs[key] = (runs.get(key, (place,))[0], place)
    return sorted(runs.values())


def _first_backward(ops: Ops, place: int, turn: Turn) -> int:
    """Where the backward of a turn begins, behind a place."""
    return next(
        each
        for each in range(place, len(ops))
        if ops[each].act in (Act.B, Act.RECOMPUTE) and (ops[each].micro_batch, ops[each].segment) == turn
    )


def _turns(schedule: Schedule, ops: Ops) -> dict[Turn, dict[str, _Span]]:
    """Where the blocks of each turn run, in forward order."""
    of_phase = _block_names(schedule)
    turns: dict[Turn, dict[str, _Span]] = defaultdict(dict)
    for place, op in enumerate(ops):
        name = of_phase(op)
        if name is None or op.act not in (Act.F, Act.B, Act.RECOMPUTE):
            continue
        assert op.micro_batch is not None
        assert op.segment is not None
        spans = turns[op.micro_batch, op.segment]
        if op.act is Act.F:
            begin = spans[name].begin if name in spans else place
            spans[name] = _Span(begin, place, len(ops))
        elif spans[name].start == len(ops):
            spans[name] = spans[name]._replace(start=place)
    return turns


def _block_names(schedule: Schedule) -> Callable[[Op], str | None]:
    """The block that each op runs a phase of."""
    by_phase = {
        (segment, phase): block
        for segment, phases in enumerate(schedule.phases)
        for block, names in blocks_of(phases).items()
        for phase in names
    }
    return lambda op: None if op.phase is None else by_phase.get((op.segment or 0, op.phase))


def _behind_sends(ops: Ops, place: int) -> int:
    """Behind an op and what it sends: a peer waits for that."""
    return next((each for each in range(place + 1, len(ops)) if not ops[each].act.sends), len(ops))


def _next_computing(ops: Ops, place: int) -> int:
    return next((each for each in range(place + 1, len(ops)) if ops[each].act.computes), len(ops))


# ------------------------------------------------------------------------------------------------ check


@dataclass(kw_only=True)
class _Copies:
    """The copies of a rank up to some place of its list."""

    forward: dict[_Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The phases of each block that have run."""
    latest: dict[_Key, Act] = field(default_factory=dict)
    """The last op of each block that has been offloaded."""
    slots: dict[_Key, int | None] = field(default_factory=dict)
    """The slots in use."""


_BEFORE = MappingProxyType({Act.OFFLOAD: None, Act.FREE: Act.OFFLOAD, Act.RELOAD: Act.FREE})
"""Which op of the same block each op follows."""


def offload_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each block that is offloaded goes through its ops in order, between its forward and what needs it, and no
    two blocks share a slot."""
    blocks = [blocks_of(phases) for phases in schedule.phases]
    of_phase = _block_names(schedule)
    for rank, ops in enumerate(schedule.ops):
        if not any(op.act.copies for op in ops):
            continue  # what this follows are copies
        copies = _Copies()
        for place, op in enumerate(ops):
            for rule, why in _op_faults(schedule, rank, op, copies, blocks, of_phase):
                yield Fault(rank=rank, place=place, op=op, rule=rule, why=why)
        for (micro_batch, segment, block), act in copies.latest.items():
            if act is not Act.RELOAD:
                op = Op(act=Act.RELOAD, micro_batch=micro_batch, segment=segment, phase=block)
                yield Fault(rank=rank, place=len(ops), op=op, rule=Rule.OFFLOADED, why="it is missing")


def _op_faults(
    schedule: Schedule,
    rank: int,
    op: Op,
    copies: _Copies,
    blocks: Sequence[Mapping[str, Collection[str]]],
    of_phase: Callable[[Op], str | None],
) -> Iterator[tuple[Rule, str]]:
    if op.act.copies:
        yield from _copy_faults(schedule, rank, op, copies, blocks)
        return
    block = of_phase(op)
    if block is None or op.micro_batch is None or op.segment is None or op.phase is None:
        return
    key = (op.micro_batch, op.segment, block)
    if op.act is Act.F:
        copies.forward[key].add(op.phase)
    elif op.act in (Act.B, Act.RECOMPUTE) and copies.latest.get(key, Act.RELOAD) is not Act.RELOAD:
        missing = Op(act=Act.RELOAD, micro_batch=op.micro_batch, segment=op.segment, phase=block)
        yield Rule.OFFLOADED, f"{missing} has not run"


def _copy_faults(
    schedule: Schedule,
    rank: int,
    op: Op,
    copies: _Copies,
    blocks: Sequence[Mapping[str, Collection[str]]],
) -> Iterator[tuple[Rule, str]]:
    if (
        op.micro_batch is None
        or op.segment is None
        or op.phase is None
        or ((op.slot is None) != (op.act is Act.FREE))
    ):
        yield Rule.COMPLETE, "it does not name its micro-batch, segment, block or slot"
        return
    if op.segment >= len(schedule.offloaded) or op.phase not in schedule.offloaded[op.segment]:
        yield Rule.EXISTS, "this block is not offloaded"
        return
    if rank not in schedule.graph.stations[op.segment]:
        yield Rule.OWN_RANK, f"segment {op.segment} is on another rank"
    key, after = (op.micro_batch, op.segment, op.phase), _BEFORE[op.act]
    latest = copies.latest.get(key)
    if latest is not after:
        past = "nothing" if latest is None else latest.value
        yield Rule.OFFLOADED, f"it follows {past} of its block: it must follow {after.value if after else 'F'}"
    copies.latest[key] = op.act
    if op.act is Act.OFFLOAD:
        missing = set(blocks[op.segment][op.phase]) - copies.forward[key]
        for phase in sorted(missing):
            ahead = Op(act=Act.F, micro_batch=op.micro_batch, segment=op.segment, phase=phase)
            yield Rule.OFFLOADED, f"{ahead} has not run"
        if op.slot is not None and op.slot >= schedule.slots[op.segment]:
            yield Rule.SLOT, f"each block of segment {op.segment} has {schedule.slots[op.segment]} slots"
        for (micro_batch, *block), slot in copies.slots.items():
            if slot == op.slot and block == [op.segment, op.phase]:
                yield Rule.SLOT, f"micro-batch {micro_batch} is still in slot {slot}"
        copies.slots[key] = op.slot
    elif op.act is Act.RELOAD:
        if copies.slots.get(key) != op.slot:
            yield Rule.SLOT, f"it is in slot {copies.slots.get(key)}"
        copies.slots.pop(key, None)
