"""Activation offload in a schedule: places the ops that move what blocks have saved to host memory and back.

    F0.0:0.block OFFLOAD0.0:0.block#0 F0.0:1.block F0.0:2.block FREE0.0:0.block F0.0:3.block ...
    B0.0:3.block RELOAD0.0:0.block#0 B0.0:2.block B0.0:1.block B0.0:0.block

Of each segment, the first blocks are offloaded, which wait longest for their backward. Copies run beside
computation, in the order of the list:

- `OFFLOAD` starts right behind the last forward phase of its block.
- `FREE` waits for it. The forward of the blocks of a segment is shared equally among its copies: with n of N
  blocks offloaded, the i-th is freed behind the forward of i · N / n blocks, and of the block after it. A link
  that takes longer than that delays the forward, but never lets memory grow beyond the plan.
- `RELOAD` has as much time as that: a backward takes as long as two forwards, so it stands N / 2n backwards
  before it is needed, or before the next copy needs the link, and at least one. It comes no earlier than blocks
  have left whose place it takes. Where all blocks are offloaded, none has, so two are on the device at once.

A micro-batch whose backward follows its forward at once keeps a block if no other one runs meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Op, Ops, Schedule, Turn
from braid.schedule.phases import Phase, phase_name


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


def with_offloads(schedule: Schedule, share: float) -> Schedule:
    """Insert `OFFLOAD`, `FREE` and `RELOAD` for this share of the blocks of each segment; all other ops keep
    their order. Replays are in the list already."""
    names = tuple(
        chosen(phases, share) if schedule.has_backward(segment) else ()
        for segment, phases in enumerate(schedule.phases)
    )
    if not any(names):
        return schedule
    slots = [0] * len(names)
    lists = tuple(_with_offloads(schedule, names, ops, slots) for ops in schedule.ops)
    return replace(schedule, ops=lists, offloaded=names, slots=tuple(slots))


def _with_offloads(schedule: Schedule, names: Sequence[Collection[str]], ops: Ops, slots: list[int]) -> Ops:
    """The list of a rank with its copies; `slots` grows to the slots that each segment needs."""
    before: dict[int, list[Op]] = defaultdict(list)
    for act, spans in _placed(schedule, names, ops):
        for key, place in spans.items():
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

    end: int
    """Of its last forward."""
    start: int
    """Of the first op that needs what it has saved: a replay or a backward."""


def _placed(
    schedule: Schedule, names: Sequence[Collection[str]], ops: Ops
) -> Iterator[tuple[Act, dict[_Key, int]]]:
    """Before which place of a list each op stands. Memory is freed before more is allocated."""
    offloads, frees, reloads = dict[_Key, int](), dict[_Key, int](), dict[_Key, int]()
    for (micro_batch, segment), spans in _turns(schedule, ops).items():
        forward, backward = list(spans), sorted(spans, key=lambda name: spans[name].start)
        wanted = [name for name in forward if name in names[segment]]
        starts = _reload_starts([backward.index(name) for name in reversed(wanted)], len(backward))
        for number, name in enumerate(wanted):
            key, start = (micro_batch, segment, name), starts[len(wanted) - 1 - number]
            offload = _behind_sends(ops, spans[name].end)
            share = -(-(number + 1) * len(forward) // len(wanted))  # rounded up
            behind = min(max(share - 1, number + 1), len(forward) - 1)
            free = _next_computing(ops, spans[forward[behind]].end)
            reload = spans[backward[start]].start if start >= 0 else _computing_before(ops, spans[name].start)
            if any(_runs_a_block(schedule, op) for op in ops[offload:reload]) and free <= reload:
                offloads[key], frees[key], reloads[key] = offload, free, reload
    yield from ((Act.OFFLOAD, offloads), (Act.FREE, frees), (Act.RELOAD, reloads))


def _reload_starts(needed: Sequence[int], blocks: int) -> list[int]:
    """Before which backward of a turn each reload stands: -1 is the op before the first. `needed` are the
    backwards of the blocks that come back, in order."""
    each, free = -(-blocks // (2 * len(needed) or 1)), blocks
    starts: list[int] = []
    for number, deadline in reversed(list(enumerate(needed))):
        free = min(deadline, free) - each
        free = max(free, min(number + 1, deadline - 1))
        starts.insert(0, free)
    return starts


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
            spans[name] = _Span(place, len(ops))
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


def _runs_a_block(schedule: Schedule, op: Op) -> bool:
    return op.act in (Act.F, Act.B) and any(
        phase.name == op.phase and phase.block is not None for phase in schedule.phases[op.segment or 0]
    )


def _behind_sends(ops: Ops, place: int) -> int:
    """Behind an op and what it sends: a peer waits for that."""
    return next((each for each in range(place + 1, len(ops)) if not ops[each].act.sends), len(ops))


def _next_computing(ops: Ops, place: int) -> int:
    return next((each for each in range(place + 1, len(ops)) if ops[each].act.computes), len(ops))


def _computing_before(ops: Ops, place: int) -> int:
    return next((each for each in range(place - 1, -1, -1) if ops[each].act.computes), 0)


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
