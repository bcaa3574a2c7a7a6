"""Order of collectives: checks that ranks agree, on each communicator and across communicators.

Ranks that issue collectives of two communicators in opposite orders deadlock even if each communicator by
itself sees a consistent order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Collective, Op


def collective_faults(lists: Mapping[int, Sequence[Op]]) -> Iterator[Fault]:
    """Check the collectives declared by the ops of each rank, of a schedule or of an execution log.

    All members of a communicator must issue the same sequence on it, and there must be one total order that is
    consistent with the sequences of all ranks.
    """
    issued = {rank: tuple(_issued(ops)) for rank, ops in lists.items()}
    disagreements = tuple(_disagreements(lists, issued))
    yield from disagreements or _cycles(issued)


class _Issue(NamedTuple):
    """A collective issued by one rank."""

    place: int
    op: Op
    collective: Collective
    number: int
    """Its index on the communicator."""

    @property
    def name(self) -> tuple[str, int]:
        """Equal on all members."""
        return self.collective.communicator, self.number


def _issued(ops: Sequence[Op]) -> Iterator[_Issue]:
    numbers: Counter[str] = Counter()
    for place, op in enumerate(ops):
        for collective in op.collectives:
            yield _Issue(place, op, collective, numbers[collective.communicator])
            numbers[collective.communicator] += 1


def _disagreements(
    lists: Mapping[int, Sequence[Op]], issued: Mapping[int, Sequence[_Issue]]
) -> Iterator[Fault]:
    """For each communicator and rank, the first collective that differs from that of the lowest rank."""
    by_communicator: dict[str, dict[int, list[_Issue]]] = defaultdict(lambda: defaultdict(list))
    for rank, issues in issued.items():
        for issue in issues:
            by_communicator[issue.collective.communicator][rank].append(issue)
    for sequences in by_communicator.values():
        lowest = min(sequences)
        reference = sequences[lowest]
        members = {member for issue in reference for member in issue.collective.members if member in lists}
        for rank in sorted(members | sequences.keys()):
            if fault := _first_difference(rank, sequences.get(rank, []), lowest, reference, len(lists[rank])):
                yield fault


def _first_difference(
    rank: int, own: Sequence[_Issue], lowest: int, reference: Sequence[_Issue], end: int
) -> Fault | None:
    for number in range(max(len(own), len(reference))):
        ours = own[number] if number < len(own) else None
        theirs = reference[number] if number < len(reference) else None
        here, there = ours and ours.collective, theirs and theirs.collective
        if here == there and here and rank in here.members:
            continue
        issue = ours or theirs
        assert issue
        place = ours.place if ours else end
        why = f"it issues {here or 'nothing'} here, rank {lowest} issues {there or 'nothing'}"
        if here == there:
            why = f"rank {rank} is not a member"
        return Fault(rank=rank, place=place, op=issue.op, rule=Rule.SAME_COLLECTIVES, why=why)
    return None


def _cycles(issued: Mapping[int, Sequence[_Issue]]) -> Iterator[Fault]:
    """A cycle of collectives, each of which precedes the next on some rank."""
    graph: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    edges: dict[tuple[tuple[str, int], tuple[str, int]], tuple[int, _Issue]] = {}
    for rank, issues in issued.items():
        for earlier, later in pairwise(issues):
            graph.add(later.name, earlier.name)
            edges.setdefault((earlier.name, later.name), (rank, later))
    try:
        graph.prepare()
    except CycleError as error:
        cycle = list(pairwise(error.args[1]))
        why = "; ".join(
            f"rank {edges[first, then][0]} issues {first[0]} {first[1]} before {then[0]} {then[1]}"
            for first, then in cycle
        )
        rank, issue = edges[cycle[0]]
        yield Fault(rank=rank, place=issue.place, op=issue.op, rule=Rule.COMMON_ORDER, why=why)
