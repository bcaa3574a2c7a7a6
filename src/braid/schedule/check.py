"""The schedule checker: proves a schedule correct and deadlock-free before anything runs, or lists all faults.

There are three kinds of rules: local ones for each rank (ops on the right rank, once, after their inputs),
pairwise ones (matching messages, order of collectives), and global ones (no deadlock, found by simulating all
lists together). Faults are data; `check` never raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from braid.schedule.event_simulator import Wait, follow_lists
from braid.schedule.faults import Fault, Rule
from braid.schedule.lifetime import lifetime_faults, sum_faults
from braid.schedule.offload import offload_faults
from braid.schedule.ops import Act, Channel, Message, Op, Ops, Schedule, Turn, message_of
from braid.schedule.order import collective_faults
from braid.schedule.recompute import replay_faults
from braid.schedule.station_faults import station_faults
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
        all_faults = tuple(_incomplete(schedule)) or (*_segment_faults(schedule), *_joint_faults(schedule))
        return CheckReport(faults=all_faults, live=live_peaks(schedule))
    plain, places = bare(schedule)
    faults = list(phase_faults(plain))
    incomplete = False
    matched: list[list[Op]] | None = None
    for view in (wide(plain), narrow(plain)):
        missing = tuple(_incomplete(view.schedule))
        incomplete = incomplete or bool(missing)
        messages = [[op for op in ops if op.act.sends or op.act.receives] for ops in view.schedule.ops]
        # Both views have the same messages in the same order: one of them is enough to match them.
        for fault in missing or _segment_faults(view.schedule, messages=messages != matched):
            shown = replace(fault, place=view.places[fault.rank][fault.place])
            if shown not in faults:
                faults.append(shown)
        matched = matched if missing else messages
    if not incomplete and schedule.modules is None:
        faults += _joint_faults(plain)
    shown_faults = [replace(fault, place=places[fault.rank][fault.place]) for fault in faults]
    if not incomplete and schedule.modules is not None:
        # The stations of a stage also share the collectives of its weights and replays.
        shown_faults += _joint_faults(schedule)
    shown_faults += replay_faults(schedule)
    shown_faults += offload_faults(schedule)
    if schedule.weights != "unplaced":
        shown_faults += [*lifetime_faults(schedule), *sum_faults(schedule)]
    return CheckReport(faults=tuple(shown_faults), live=live_peaks(plain))


def _segment_faults(schedule: Schedule, *, messages: bool = True) -> Iterator[Fault]:
    """The rules about whole segments and, unless they are known to match, their messages."""
    yield from _own_faults(schedule)
    yield from _once_faults(schedule)
    if messages:
        yield from _message_faults(schedule)
    yield from _live_faults(schedule)


def _joint_faults(schedule: Schedule) -> Iterator[Fault]:
    """The rules about what ranks do together, which phases do not change."""
    yield from station_faults(schedule)
    yield from collective_faults(dict(enumerate(schedule.ops)))
    yield from _deadlock_faults(schedule)


def live_peaks(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each rank, the peak number of live forwards; 0 in an evaluation. With `sizes`, forwards are weighted
    by the size of their segment."""
    return tuple(_peak(schedule, _turns(schedule, ops), sizes=sizes)[0] for ops in schedule.ops)


def segment_peaks(schedule: Schedule) -> tuple[int, ...]:
    """For each segment, the peak number of live forwards on any rank that holds it; 0 if it has no backward."""
    turns = [_turns(schedule, ops) for ops in schedule.ops]
    return tuple(
        max(_peak(schedule, turns[rank], only=segment)[0] for rank in stations)
        for segment, stations in enumerate(schedule.graph.stations)
    )


def _turns(schedule: Schedule, ops: Ops) -> Ops:
    """The `F` and `B` of a list, each once: where the forward of a turn starts and where its backward ends."""
    if not schedule.phases:
        return tuple(op for op in ops if op.act in (Act.F, Act.B))
    starts: dict[Turn, int] = {}
    ends: dict[Turn, int] = {}
    for place, op in enumerate(ops):
        act = op.act
        if act is Act.F:
            starts.setdefault((op.micro_batch, op.segment), place)  # type: ignore[arg-type]
        elif act is Act.B:
            ends[op.micro_batch, op.segment] = place  # type: ignore[index]
    return tuple(ops[place] for place in sorted((*starts.values(), *ends.values())))


# -------------------------------------------------------------------------------------- the ops of one rank


def _incomplete(schedule: Schedule) -> Iterator[Fault]:
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            message = op.act.sends or op.act.receives
            unnamed = op.micro_batch is None or op.segment is None
            if (op.act.direction and unnamed) or (message and op.peer is None):
                why = "it does not name its micro-batch, segment or peer"
                yield Fault(rank=rank, place=place, op=op, rule=Rule.COMPLETE, why=why)


_Key = tuple[Act, int, str | None]
"""(act, segment, edge): what an op does with every micro-batch."""


class _Expected(NamedTuple):
    """What must hold for an act on a segment and edge, for every micro-batch."""

    stations: tuple[int, ...]
    """Those that hold the segment."""
    reads: tuple[tuple[Rule, _Key], ...]
    """What must have run on the same rank before, and the rule that says so."""
    peers: tuple[int, ...]
    """The peers of the message; empty if there is no message."""


def _expected(schedule: Schedule, rank: int, key: _Key) -> _Expected:
    act, segment, edge = key
    graph, forward = schedule.graph, act.direction == "F"
    stations = graph.stations[segment]
    before, after = graph.previous(segment), graph.next(segment)
    source, target = (before, after) if forward else (after, before)
    if act.computes:
        return _Expected(stations, tuple(_inputs(schedule, act, segment, source)), ())
    reads = ((Rule.AFTER_INPUT, (Act(act.direction), segment, None)),) if act.sends else ()
    outward = act.sends == forward
    if edge is not None:
        known = [each for each in (graph.outputs if outward else graph.inputs)(segment) if each.name == edge]
        passes = known and (forward or schedule.backwards[known[0].source])
        peers = graph.stations[known[0].target if outward else known[0].source] if passes else ()
        return _Expected(stations, reads, peers)
    other = target if act.sends else source
    exists = other is not None and (forward or schedule.backwards[min(segment, other)])
    if other is None or not exists or graph.is_local(segment, other) or rank not in stations:
        return _Expected(stations, reads, ())
    return _Expected(stations, reads, graph.peers(rank, segment, other))


def _inputs(schedule: Schedule, act: Act, segment: int, source: int | None) -> Iterator[tuple[Rule, _Key]]:
    """What an `F` or `B` reads: from its module, and over edges."""
    graph, receive = schedule.graph, Act.RECV_F if act is Act.F else Act.RECV_B
    if source is not None:
        local = graph.is_local(segment, source)
        yield Rule.AFTER_INPUT, (act, source, None) if local else (receive, segment, None)
    for edge in graph.inputs(segment) if act is Act.F else graph.outputs(segment):
        yield Rule.INPUTS, (receive, segment, edge.name)


def _own_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each op is valid, on its own rank, after its inputs, and has the right peers."""
    for rank, ops in enumerate(schedule.ops):
        known: dict[_Key, _Expected | tuple[Rule, str]] = {}
        done: set[tuple[int, _Key]] = set()
        for place, op in enumerate(ops):
            if op.micro_batch is None or op.segment is None:
                continue
            key = (op.act, op.segment, op.edge)
            if key not in known:
                known[key] = _missing(schedule, key) or _expected(schedule, rank, key)
            expected = known[key]
            faults: Iterable[tuple[Rule, str]]
            if op.micro_batch >= schedule.micro_batches:
                faults = (_beyond(schedule),)
            elif isinstance(expected, _Expected):
                faults = _op_faults(op, rank, expected, op.micro_batch, done)
            else:
                faults = (expected,)
            for rule, why in faults:
                yield Fault(rank=rank, place=place, op=op, rule=rule, why=why)
            done.add((op.micro_batch, key))


def _beyond(schedule: Schedule) -> tuple[Rule, str]:
    counts = f"{schedule.micro_batches} micro-batches and {schedule.segments} segments"
    return Rule.EXISTS, f"there are {counts}{'' if schedule.backward else ', and no backward'}"


def _missing(schedule: Schedule, key: _Key) -> tuple[Rule, str] | None:
    """Why there is no such op in this schedule."""
    act, segment, edge = key
    backward = act.direction == "B"
    if segment >= schedule.segments or act.direction not in ("F", "B") or (backward and not schedule.backward):
        return _beyond(schedule)
    if edge is not None and schedule.graph.edge(edge) is None:
        return Rule.EXISTS, f"there is no edge {edge}"
    if backward and not schedule.backwards[segment]:
        return Rule.TRAINS, f"segment {segment} has no backward: neither it nor what it reads is trained"
    return None


def _op_faults(
    op: Op, rank: int, expected: _Expected, micro_batch: int, done: set[tuple[int, _Key]]
) -> Iterator[tuple[Rule, str]]:
    stations, reads, peers = expected
    if rank not in stations:
        yield Rule.OWN_RANK, f"segment {op.segment} is held by {_ranks(stations)}"
    if op.act is Act.B and op.segment is not None and (micro_batch, (Act.F, op.segment, None)) not in done:
        yield Rule.F_BEFORE_B, f"F{micro_batch}.{op.segment} has not run"
    for rule, (act, segment, edge) in reads:
        if (micro_batch, (act, segment, edge)) not in done:
            missing = Op(act=act, micro_batch=micro_batch, segment=segment, edge=edge)
            yield rule, f"{missing} has not run"
    if not op.act.computes and (not peers or op.peers != peers):
        why = f"its {'peer is' if len(peers) == 1 else 'peers are'} {_ranks(peers)}"
        yield Rule.PEER, why if peers else "no message crosses ranks here"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _once_faults(schedule: Schedule) -> Iterator[Fault]:
    """No compute op is repeated or missing, on any station of its segment."""
    stations = schedule.graph.stations
    seen: set[tuple[Act, int, int, int]] = set()
    for rank, ops in enumerate(schedule.ops):
        for place, op in enumerate(ops):
            if not op.act.computes or op.micro_batch is None or op.segment is None:
                continue
            own = stations[op.segment] if op.segment in range(schedule.segments) else (rank,)
            key = (op.act, op.micro_batch, op.segment, rank if rank in own else own[0])
            if key in seen:
                yield Fault(rank=rank, place=place, op=op, rule=Rule.ONCE, why="it has run before")
            seen.add(key)
    for segment, own in enumerate(stations):
        for micro_batch, rank in product(range(schedule.micro_batches), own):
            for act in (Act.F, Act.B) if schedule.backwards[segment] else (Act.F,):
                if (act, micro_batch, segment, rank) not in seen:
                    op = Op(act=act, micro_batch=micro_batch, segment=segment)
                    place = len(schedule.ops[rank])
                    yield Fault(rank=rank, place=place, op=op, rule=Rule.ONCE, why="it is missing")


def _peak(
    schedule: Schedule, ops: Ops, *, sizes: Sequence[int] | None = None, only: int | None = None
) -> tuple[int, int]:
    """The peak number of live forwards, of all segments that have a backward or of `only` one, and the first
    place where it is reached."""
    counted = {segment for segment, has in enumerate(schedule.backwards) if has and only in (None, segment)}
    live = peak = where = 0
    for place, op in enumerate(ops):
        if op.act.computes and op.segment in counted:
            size = 1 if sizes is None else sizes[op.segment]
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
        for segment in schedule.segments_of(rank):
            limit = schedule.graph.segments[segment].bound
            peak, place = _peak(schedule, ops, only=segment) if limit is not None else (0, 0)
            if limit is not None and peak > limit:
                why = f"{peak} forwards of segment {segment} are alive, at most {limit} may be"
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
            message = message_of(op)
            for channel in schedule.channels_of(rank, op):
                side = (sent if op.act.sends else received)[channel]
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


def _deadlock_faults(schedule: Schedule) -> Iterator[Fault]:
    """A fault for each cycle of waiting ranks, and for each rank that waits for one that has ended."""
    waiting = {wait.rank: wait for wait in follow_lists(schedule).waits}
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
