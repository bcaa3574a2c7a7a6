"""Elastic restarts: which slots of a machine the next attempt of a run uses (`--restarts N --min-world M`).

A slot is a place for a rank: a GPU, or on the CPU just a number. A slot whose rank is killed or fails twice in
a row before a step is done is out of service. So is one that somebody lists in the file `out-of-service` of the
run, a slot per line; removing the line returns it. The next attempt uses the largest world that the run fits
into: the data-parallel axis shrinks, the others stay, as do the samples and micro-batches of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

START_FAILURES = 2
"""Failures in a row before a step was done that put a slot out of service."""

SEARCH_RANGE = 1024
"""How many world sizes `nearest_worlds` tries in each direction."""

_LINE = re.compile(r"(\d{1,9})\b", re.ASCII)


def largest_world(fits: Callable[[int], bool], available: int, smallest: int) -> int | None:
    """The largest world from `smallest` to `available` that fits; None if there is none."""
    return next((world for world in range(available, smallest - 1, -1) if fits(world)), None)


def nearest_worlds(fits: Callable[[int], bool], world: int, most: int) -> tuple[int, ...]:
    """The nearest smaller and the nearest larger world size that fit, if they are within reach. None above
    `most` fits."""
    below = min(world - 1, most)
    smaller = next((n for n in range(below, max(0, below - SEARCH_RANGE), -1) if fits(n)), None)
    larger = next((n for n in range(max(1, world + 1), min(world + SEARCH_RANGE, most) + 1) if fits(n)), None)
    return tuple(n for n in (smaller, larger) if n is not None)


class Slots:
    """The slots of one machine."""

    def __init__(self, count: int, *, min_world: int, fits: Callable[[int], bool], file: Path) -> None:
        """`fits` says whether the run can be planned for a number of ranks; `file` lists slots that are out of
        service."""
        self.count, self.min_world, self.file = count, min_world, file
        self._fits = {world: fits(world) for world in range(min_world, count + 1)}
        self._failures: dict[int, int] = {}
        """By slot: how often in a row it failed before a step was done."""

    def out_of_service(self) -> frozenset[int]:
        """The slots that the file lists; none if the run may not go on with fewer ranks."""
        if self.count == self.min_world:
            return frozenset()
        try:
            lines = self.file.read_text(errors="replace").splitlines()
        except OSError:
            return frozenset()
        return frozenset(int(found[1]) for line in lines if (found := _LINE.match(line.strip())))

    def usable(self) -> tuple[int, ...]:
        """The slots of the next attempt; none if fewer than `min_world` ranks could be placed."""
        out = self.out_of_service()
        available = [slot for slot in range(self.count) if slot not in out]
        world = largest_world(self._fits.__getitem__, len(available), self.min_world)
        return () if world is None else tuple(available[:world])

    def should_change(self, used: Collection[int]) -> bool:
        """Whether an attempt that runs on these slots should stop: one of them is out of service, or more ranks
        could run."""
        best = self.usable()
        return bool(best) and (len(best) > len(used) or not self.out_of_service().isdisjoint(used))

    def note_progress(self) -> None:
        """A step is done: failures before it do not count any more."""
        self._failures.clear()

    def note_failure(self, slot: int, how: str) -> str | None:
        """A slot failed. If that puts it out of service, the message about it."""
        self._failures[slot] = self._failures.get(slot, 0) + 1
        if self._failures[slot] < START_FAILURES or self.count == self.min_world:
            return None
        del self._failures[slot]
        failed = f"slot {slot} failed {START_FAILURES} times in a row before a step was done"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(f"{slot} {how}, {START_FAILURES} times in a row before a step was done\n")
        except OSError as error:
            return f"{failed}; it stays in use, as {self.file} cannot be written: {error.strerror}"
        return f"{failed}: out of service; remove its line from {self.file} to use it again"
