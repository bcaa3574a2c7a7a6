"""The order of collectives: whether ranks agree on it, on each communicator and over all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Collective, Op


def collective_faults(lists: Mapping[int, Sequence[Op]]) -> Iterator[Fault]:
    """Whether ranks agree on the collectives that their ops declare: of a schedule, or of what was executed.

    Each communicator must see the same sequence from all its members, and taken together the sequences of all
    ranks must fit one order: otherwise two ranks can each hold a communicator for which the other one waits.
    """
    issued = {rank: tuple(_issued(ops)) for rank, ops in lists.items()}
    disagreements = tuple(_disagreements(lists, issued))
    yield from disagreements or _circles(issued)


class _Issue(NamedTuple):
    """One collective, as one rank issues it."""

    place: int
    op: Op
    collective: Collective
    number: int
    """How many went before on the same communicator."""

    @property
    def name(self) -> tuple[str, int]:
        """The same for all members."""
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
    """On each communicator, for each rank, the first collective that is not the one of its lowest rank."""
    by_communicator: dict[str, dict[int, list[_Issue]]] = defaultdict(lambda: defaultdict(list))
    for rank, issues in issued.items():
        for issue in issues:
            by_communicator[issue.collective.communicator][rank].append(issue)
    for sequences in by_communicator.values():
        lowest = min(sequences)
        wanted = sequences[lowest]
        members = {member for issue in wanted for member in issue.collective.members if member in lists}
        for rank in sorted(members | sequences.keys()):
            if fault := _first_difference(rank, sequences.get(rank, []), lowest, wanted, len(lists[rank])):
                yield fault


def _first_difference(
    rank: int, own: Sequence[_Issue], lowest: int, wanted: Sequence[_Issue], end: int
) -> Fault | None:
    for number in range(max(len(own), len(wanted))):
        ours = own[number] if number < len(own) else None
        theirs = wanted[number] if number < len(wanted) else None
        here, there = ours and ours.collective, theirs and theirs.collective
        if here == there and here and rank in here.members:
            continue
        shown = ours or theirs
        assert shown
        place = ours.place if ours else end
        why = f"here comes {here or 'nothing'}, on rank {lowest} {there or 'nothing'}"
        if here == there:
            why = f"rank {rank} is no member"
        return Fault(rank=rank, place=place, op=shown.op, rule=Rule.SAME_COLLECTIVES, why=why)
    return None


def _circles(issued: Mapping[int, Sequence[_Issue]]) -> Iterator[Fault]:
    """A circle of collectives of which each comes before the next on some rank."""
    graph: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    seen: dict[tuple[tuple[str, int], tuple[str, int]], tuple[int, _Issue]] = {}
    for rank, issues in issued.items():
        for earlier, later in pairwise(issues):
            graph.add(later.name, earlier.name)
            seen.setdefault((earlier.name, later.name), (rank, later))
    try:
        graph.prepare()
    except CycleError as error:
        steps = list(pairwise(error.args[1]))
        told = [
            f"rank {seen[first, then][0]} issues {first[0]} {first[1]} before {then[0]} {then[1]}"
            for first, then in steps
        ]
        rank, issue = seen[steps[0]]
        why = "; ".join(told)
        yield Fault(rank=rank, place=issue.place, op=issue.op, rule=Rule.COMMON_ORDER, why=why)
