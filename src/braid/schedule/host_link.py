"""When copies to the host and back run, and before which ops of a list theirs have to stand.

The link moves both ways at once, and each way one copy after another. What is known of the list is when each of
its ops begins, by the time that it computes:

- out, forward through the list: a copy starts when its block is made and the copy before it is done. `FREE`
  stands before the first op that begins when it has ended.
- back, backward through the list: a copy has to end when its block is needed and before the next copy starts:

      latest start = min(begin of the op that needs it, start of the next copy) - seconds

  and `RELOAD` stands before the op that runs at that time.

Memory sets bounds: where a copy out has not ended by `free_by`, the list waits; none starts to come back before
`reload_from`, and if the latest start was earlier, the op that needs it waits. Then the link moves more than
hides, and the planned memory is kept to.

Times are whole numbers of any unit, so that every machine finds the same places.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Out:
    """A copy to the host."""

    made: int
    """The place before which it may start: all that is copied is made by the ops before."""
    seconds: int
    free_by: int
    """The last place at which the device memory may be freed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Back:
    """A copy back to the device."""

    needed: int
    """The place of the op that needs it."""
    seconds: int
    reload_from: int
    """The first place at which the device memory may be allocated."""


class Placed(NamedTuple):
    """A copy with its op in the list."""

    place: int
    """The op before which `FREE` or `RELOAD` stands."""
    start: int
    end: int
    """When it runs, if nothing that is not planned delays it."""
    late: int
    """How long the list waits for it."""


def placed_out(begins: Sequence[int], copies: Sequence[Out]) -> list[Placed]:
    """Of copies in the order in which their blocks are made. `begins` has the time at which each op of the list
    begins, and that at which the last one ends."""
    found, free, waited = list[Placed](), begins[0], 0
    for copy in copies:
        start = max(begins[copy.made] + waited, free)
        free = start + copy.seconds
        place = max(copy.made, bisect_left(begins, free - waited, hi=copy.free_by))
        late = max(0, free - waited - begins[place])
        found.append(Placed(place, start, free, late))
        waited += late
    return found


def placed_back(begins: Sequence[int], copies: Sequence[Back]) -> list[Placed]:
    """Of copies in the order in which they are needed; `begins` as in `placed_out`. The list is the one without
    waiting: what is late delays the ops from there on, which none of the copies before it knows."""
    found, follower, floors = list[Placed](), begins[-1], accumulate((each.reload_from for each in copies), max)
    for copy, floor in reversed(list(zip(copies, floors, strict=True))):
        end = min(begins[copy.needed], follower)
        running = begins[max(bisect_right(begins, end - copy.seconds) - 1, 0)]
        # Of ops that begin at the same time, the first: those before the last one take none.
        place = min(max(bisect_left(begins, running), floor), copy.needed)
        start = max(end - copy.seconds, begins[place])
        found.append(Placed(place, start, start + copy.seconds, start + copy.seconds - end))
        follower = start
    return found[::-1]
