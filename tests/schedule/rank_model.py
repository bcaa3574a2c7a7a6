"""A plain executor of schedules with modules, rank by rank, to compare the checker with.

It is stricter than the event simulator about who waits for whom: every turn is a barrier of all ranks of its
segment, and a message of an edge consists of the pieces that single ranks exchange. A communicator works
through what a rank gives it in order, as NCCL does: batches at the heads of the queues of several ranks are
exchanged when every send meets its receive.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from braid.schedule import Act, Op, Schedule

Pairs = frozenset[tuple[int, int]]
"""The ranks that exchange rows of an edge: (source, target)."""
Pieces = Callable[[str, int], Pairs]
"""By edge and micro-batch."""
Rows = frozenset[tuple[int, int, int]]
"""What one rank sends another: (sender, receiver, micro-batch)."""


def every_pair(schedule: Schedule) -> Pieces:
    """Every rank of a source sends to every rank of its reader."""
    ranks = [segment.ranks for segment in schedule.graph.segments]
    ends = {edge.name: (ranks[edge.source], ranks[edge.target]) for edge in schedule.graph.edges}
    return lambda edge, micro_batch: frozenset((a, b) for a in ends[edge][0] for b in ends[edge][1] if a != b)


def some_pairs(schedule: Schedule, seed: int) -> Pieces:
    """Some of them; in some micro-batches none."""

    def pieces(edge: str, micro_batch: int) -> Pairs:
        chance = random.Random(f"{seed} {edge} {micro_batch}")
        share = chance.choice((0.0, 0.2, 0.6))
        return frozenset(each for each in sorted(every(edge, micro_batch)) if chance.random() < share)

    every = every_pair(schedule)
    return pieces


@dataclass
class Queue:
    """What a rank has given a communicator."""

    entries: list[tuple[Rows, Rows]] = field(default_factory=list)
    """What it sends and receives, batch by batch."""
    done: int = 0


def stuck_ranks(schedule: Schedule, pieces: Pieces, *, apart: bool = False) -> dict[int, str]:
    """Where each rank stands that never finishes. With `apart`, a rank on both sides of an edge posts its
    receives when it waits for them, not together with its sends."""
    return _Run(schedule, pieces, apart).run()


def _waiting(ops: Iterable[Op]) -> list[Op]:
    """The ops that may wait: messages, and the first of each turn."""
    turns: dict[object, Op] = {}
    for op in ops:
        if op.act in (Act.F, Act.B):
            turns.setdefault((op.act, op.micro_batch, op.segment), op)
        elif op.act.sends or op.act.receives:
            turns[op] = op
    return list(turns.values())


class _Run:
    def __init__(self, schedule: Schedule, pieces: Pieces, apart: bool) -> None:
        self.schedule, self.pieces, self.apart = schedule, pieces, apart
        graph = schedule.graph
        shown = [_waiting(ops) for ops in schedule.ops]
        self.lists = {rank: shown[station] for station, ranks in enumerate(graph.ranks) for rank in ranks}
        self.segments = [segment.ranks for segment in graph.segments]
        self.edges = {edge.name: edge for edge in graph.edges}
        self.place = dict.fromkeys(self.lists, 0)
        self.posted: set[tuple[int, int]] = set()
        """(rank, place) of ops that have posted."""
        self.present: dict[object, set[int]] = defaultdict(set)
        self.mail: dict[object, list[int]] = defaultdict(list)
        """By direction, sender, receiver and module: the micro-batches that are on their way or received."""
        self.read: dict[object, int] = defaultdict(int)
        self.queues: dict[tuple[str, str], dict[int, Queue]] = defaultdict(lambda: defaultdict(Queue))

    def run(self) -> dict[int, str]:
        moved = True
        while moved:
            moved = False
            for rank, ops in self.lists.items():
                while self.place[rank] < len(ops) and self._step(rank, ops[self.place[rank]]):
                    self.place[rank] += 1
                    moved = True
            for queues in self.queues.values():
                while self._exchange(queues):
                    moved = True
        return {
            rank: str(ops[self.place[rank]]) for rank, ops in self.lists.items() if self.place[rank] < len(ops)
        }

    def _step(self, rank: int, op: Op) -> bool:
        """One op of one rank; False where it has to wait."""
        if op.act in (Act.F, Act.B):
            present = self.present[op.act, op.micro_batch, op.segment]
            present.add(rank)
            return len(present) == len(self.segments[op.segment])
        return (self._on_edge if op.edge else self._in_pipeline)(rank, op)

    def _in_pipeline(self, rank: int, op: Op) -> bool:
        onward = op.act in (Act.SEND_F, Act.RECV_B)
        line = self.segments[op.segment].index(rank)
        peer = self.segments[op.segment + (1 if onward else -1)][line]
        module = self.schedule.graph.segments[op.segment].module
        ends = (rank, peer) if op.act.sends else (peer, rank)
        channel = (op.act.direction, module, *ends)
        bound = self.schedule.send_bound(op)
        if op.act.sends:
            if bound is not None and len(self.mail[channel]) - self.read[channel] >= bound:
                return False
            self.mail[channel].append(op.micro_batch)
            return True
        if self.read[channel] == len(self.mail[channel]):
            return False
        assert self.mail[channel][self.read[channel]] == op.micro_batch, f"{op} on rank {rank} gets another"
        self.read[channel] += 1
        return True

    def _on_edge(self, rank: int, op: Op) -> bool:
        edge, direction = self.edges[op.edge], op.act.direction
        queue = self.queues[direction, op.edge][rank]
        pairs = self.pieces(op.edge, op.micro_batch)
        rows = {(*(pair if direction == "F" else pair[::-1]), op.micro_batch) for pair in pairs}
        sends = frozenset(each for each in rows if each[0] == rank)
        receives = frozenset(each for each in rows if each[1] == rank)
        other = edge.target if (direction == "F") == op.act.sends else edge.source
        both = rank in self.segments[other]
        if op.act.sends:
            bound = self.schedule.send_bound(op)
            if bound is not None and len(queue.entries) - queue.done >= bound:
                return False
            queue.entries.append((sends, receives if both and not self.apart else frozenset()))
            return True
        if (self.apart or not both) and (rank, self.place[rank]) not in self.posted:
            self.posted.add((rank, self.place[rank]))
            queue.entries.append((frozenset(), receives))
        return not any(receives & entry[1] for entry in queue.entries[queue.done :])

    def _exchange(self, queues: Mapping[int, Queue]) -> bool:
        """Exchange all batches at the heads of queues whose sends and receives meet."""
        heads = {r: q.entries[q.done] for r, q in queues.items() if q.done < len(q.entries)}
        while unmet := [rank for rank, entry in heads.items() if not _meets(rank, entry, heads)]:
            for rank in unmet:
                del heads[rank]
        for rank in heads:
            queues[rank].done += 1
        return bool(heads)


def _meets(rank: int, entry: tuple[Rows, Rows], heads: Mapping[int, tuple[Rows, Rows]]) -> bool:
    """Whether all that a rank sends and receives is at the head of the queue of the other rank too."""
    sends, receives = entry
    return all(row[1] in heads and row in heads[row[1]][1] for row in sends) and all(
        row[0] in heads and row in heads[row[0]][0] for row in receives
    )
