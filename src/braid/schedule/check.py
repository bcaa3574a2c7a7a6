"""The schedule checker: proves a schedule correct and deadlock-free before anything runs, or lists all faults.

There are three kinds of rules: local ones for each rank (ops on the right rank, once, after their inputs),
pairwise ones (matching messages, order of collectives), and global ones (no deadlock, found by simulating all
lists together). Faults are data; `check` never raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from braid.schedule.event_simulator import Wait, simulate_lists
from braid.schedule.faults import Fault, Rule
from braid.schedule.lifetime import lifetime_faults, sum_faults
from braid.schedule.ops import Act, Channel, Message, Op, Ops, Schedule, channel_of, message_of
from braid.schedule.order import collective_faults
from braid.schedule.recompute import replay_faults
from braid.schedule.views import bare, narrow, phase_faults, wide


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of `check`."""

    faults: tuple[Fault, ...]
    live: tuple[int, ...]
    """For each rank, the peak number of live forwards: those whose backward has not run."""

    @property
    def sound(self) -> bool:
        return not self.faults


def check(schedule: Schedule) -> CheckReport:
    """Check all rules. If ops are incomplete, only that is reported: the other rules cannot be checked."""
    if not schedule.phases:
        return CheckReport(faults=_segment_faults(schedule), live=live_peaks(schedule))
    plain, places = bare(schedule)
    faults = list(phase_faults(plain))
    for view in (wide(plain), narrow(plain)):
        for fault in _segment_faults(view.schedule):
            shown = replace(fault, place=view.places[fault.rank][fault.place])
            if shown not in faults:
                faults.append(shown)
    shown_faults = [replace(fault, place=places[fault.rank][fault.place]) for fault in faults]
    shown_faults += replay_faults(schedule)
    if schedule.weights != "unplaced":
        shown_faults += [*lifetime_faults(schedule), *sum_faults(schedule)]
    return CheckReport(faults=tuple(shown_faults), live=_live_peaks(plain))


def _segment_faults(schedule: Schedule) -> tuple[Fault, ...]:
    return tuple(_incomplete(schedule)) or (
        *_own_faults(schedule),
        *_once_faults(schedule),
        *_message_faults(schedule),
        *_live_faults(schedule),
        *collective_faults(dict(enumerate(schedule.ops))),
        *_deadlock_faults(schedule.ops),
    )


def live_peaks(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each rank, the peak number of live forwards; 0 in an evaluation. With `sizes`, forwards are weighted
    by the size of their segment."""
    return _live_peaks(bare(schedule)[0], sizes)


def _live_peaks(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    if schedule.phases:
        schedule = wide(schedule).schedule
    return tuple(_peak(schedule, ops, sizes)[0] for ops in schedule.ops)


# -------------------------------------------------------------------------------------- the ops of one rank


def _incomplete(schedule: Schedule) -> Iterator[Fault]:
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            message = op.act.sends or op.act.receives
            unnamed = op.micro_batch is None or op.segment is None
            if (op.act.direction and unnamed) or (message and op.peer is None):
                why = "it does not name its micro-batch, segment or peer"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.COMPLETE, why=why)


class _Expected(NamedTuple):
    """What must hold for an act on a segment, for every micro-batch."""

    holder: int
    reads: tuple[Act, int] | None
    """The act and segment on the same rank that produce its input; None for the batch, the loss and a
    receive."""
    peer: int | None
    """The peer of the message; None if there is no message."""


def _expected(schedule: Schedule, act: Act, segment: int) -> _Expected:
    holder = schedule.holder
    onward = 1 if act.direction == "F" else -1
    source, target = segment - onward, segment + onward
    other = target if act.sends else source
    exists = 0 <= other < schedule.segments and (act.direction == "F" or schedule.has_backward(other))
    local = exists and holder[other] == holder[segment]
    reads: tuple[Act, int] | None = None
    if act.sends:
        reads = (Act(act.direction), segment)
    elif act.computes and exists:
        reads = (act, source) if local else (Act.RECV_F if act is Act.F else Act.RECV_B, segment)
    message = act.sends or act.receives
    peer = holder[other] if message and exists and not local else None
    return _Expected(holder=holder[segment], reads=reads, peer=peer)


def _own_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each op is valid, on its own rank, after its inputs, and has the right peer."""
    expected = {
        (act, segment): _expected(schedule, act, segment)
        for act in Act
        for segment in range(schedule.segments)
        if act.direction == "F" or (act.direction == "B" and schedule.has_backward(segment))
    }
    every = range(schedule.micro_batches)
    for rank, ops in enumerate(schedule.ops):
        done: set[tuple[Act, int, int]] = set()
        for place, op in enumerate(ops):
            if op.micro_batch is None or op.segment is None:
                continue
            known = expected.get((op.act, op.segment)) if op.micro_batch in every else None
            if known:
                for rule, why in _op_faults(op, rank, known, op.micro_batch, done):
                    yield Fault(rank=rank, place=place, op=op, rule=rule, why=why)
            else:
                counts = f"{schedule.micro_batches} micro-batches and {schedule.segments} segments"
                why = f"there are {counts}{_backward_note(schedule, op.segment)}"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.EXISTS, why=why)
            done.add((op.act, op.micro_batch, op.segment))


def _op_faults(
    op: Op, rank: int, expected: _Expected, micro_batch: int, done: set[tuple[Act, int, int]]
) -> Iterator[tuple[Rule, str]]:
    holder, reads, peer = expected
    if holder != rank:
        yield Rule.OWN_RANK, f"segment {op.segment} is held by rank {holder}"
    if op.act is Act.B and (Act.F, micro_batch, op.segment) not in done:
        yield Rule.F_BEFORE_B, f"F{micro_batch}.{op.segment} has not run"
    if reads and (reads[0], micro_batch, reads[1]) not in done:
        yield Rule.AFTER_INPUT, f"{reads[0].value}{micro_batch}.{reads[1]} has not run"
    if not op.act.computes and (peer is None or op.peer != peer):
        why = "no message crosses ranks here" if peer is None else f"its peer is rank {peer}"
        yield Rule.PEER, why


def _once_faults(schedule: Schedule) -> Iterator[Fault]:
    """No compute op is repeated or missing."""
    seen: set[tuple[Act, int, int]] = set()
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            if not op.act.computes or op.micro_batch is None or op.segment is None:
                continue
            key = (op.act, op.micro_batch, op.segment)
            if key in seen:
                yield Fault(rank=rank, place=place, op=op, rule=Rule.ONCE, why="it has run before")
            seen.add(key)
    for segment, rank in enumerate(schedule.holder):
        for micro_batch in range(schedule.micro_batches):
            for act in (Act.F, Act.B) if schedule.has_backward(segment) else (Act.F,):
                if (act, micro_batch, segment) not in seen:
                    op = Op(act=act, micro_batch=micro_batch, segment=segment)
                    place = len(schedule.ops[rank])
                    yield Fault(rank=rank, place=place, op=op, rule=Rule.ONCE, why="it is missing")


def _backward_note(schedule: Schedule, segment: int) -> str:
    if not schedule.backward:
        return ", and no backward"
    frozen = 0 <= segment < schedule.segments and not schedule.has_backward(segment)
    return ", and nothing up to this segment is trained" if frozen else ""


def _peak(schedule: Schedule, ops: Ops, sizes: Sequence[int] | None = None) -> tuple[int, int]:
    """The peak number of live forwards of a rank, and the first place where it is reached. A forward without a
    backward keeps nothing."""
    live = peak = where = 0
    for place, op in enumerate(ops):
        if op.act.computes and (op.segment is None or schedule.has_backward(op.segment)):
            size = 1 if sizes is None or op.segment is None else sizes[op.segment]
            live += size if op.act is Act.F else -size
            if live > peak:
                peak, where = live, place
    return peak, where


def _live_faults(schedule: Schedule) -> Iterator[Fault]:
    if not schedule.backward:
        return
    for rank, (ops, bound) in enumerate(zip(schedule.ops, schedule.live_bound, strict=True)):
        peak, place = _peak(schedule, ops)
        if peak > bound:
            why = f"{peak} forwards are alive, at most {bound} may be"
            yield Fault(rank=rank, place=place, op=ops[place], rule=Rule.LIVE, why=why)


# ---------------------------------------------------------------------------------- what ranks agree on

_Location = tuple[int, int, Op]
"""(rank, place, op)."""


def _message_faults(schedule: Schedule) -> Iterator[Fault]:
    """The two sides of each channel have the same messages in the same order."""
    sent: dict[Channel, dict[Message, _Location]] = defaultdict(dict)
    received: dict[Channel, dict[Message, _Location]] = defaultdict(dict)
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            if not (op.act.sends or op.act.receives):
                continue
            side = (sent if op.act.sends else received)[channel_of(rank, op)]
            message = message_of(op)
            if message in side:
                why = f"it is {'sent' if op.act.sends else 'received'} twice"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.MATCHED, why=why)
            side.setdefault(message, (rank, place, op))
    for channel in {**sent, **received}:
        yield from _channel_faults(channel, sent[channel], received[channel])


def _channel_faults(
    channel: Channel, sent: Mapping[Message, _Location], received: Mapping[Message, _Location]
) -> Iterator[Fault]:
    for message, (rank, place, op) in sent.items():
        if message not in received:
            why = f"rank {channel[2]} never receives it"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.MATCHED, why=why)
    for message, (rank, place, op) in received.items():
        if message not in sent:
            why = f"rank {channel[1]} never sends it"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.MATCHED, why=why)
    send_order = [message for message in sent if message in received]
    receive_order = [message for message in received if message in sent]
    for sent_next, received_next in zip(send_order, receive_order, strict=True):
        if sent_next != received_next:
            rank, place, op = received[received_next]
            why = f"rank {channel[1]} sends {sent[sent_next][2]} first"
            yield Fault(rank=rank, place=place, op=op, rule=Rule.CHANNEL_ORDER, why=why)
            return


# ---------------------------------------------------------------------------------- all lists together


def _deadlock_faults(lists: Sequence[Ops]) -> Iterator[Fault]:
    """A fault for each cycle of waiting ranks, and for each rank that waits for one that has ended."""
    waiting = {wait.rank: wait for wait in simulate_lists(lists, lambda op: 0.0, 0.0).waits}
    visited: set[int] = set()
    for rank in waiting:
        path: list[int] = []
        while rank in waiting and rank not in visited:
            visited.add(rank)
            path.append(rank)
            awaited = waiting[rank].awaited
            rank = next((other for other in awaited if other in waiting), awaited[0])
        if not path:
            continue
        if rank in path:
            yield _deadlock([waiting[member] for member in path[path.index(rank) :]], rank, "")
        elif rank not in waiting:
            yield _deadlock([waiting[path[-1]]], rank, ", which has ended")


def _deadlock(waits: Sequence[Wait], last: int, end: str) -> Fault:
    chain = ", which waits ".join(
        f"in {wait.op} for rank {following}{end}"
        for wait, following in zip(waits, [*(wait.rank for wait in waits[1:]), last], strict=True)
    )
    first = waits[0]
    why = f"rank {first.rank} waits {chain}"
    return Fault(rank=first.rank, place=first.place, op=first.op, rule=Rule.DEADLOCK, why=why)
