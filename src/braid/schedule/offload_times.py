"""Known durations for the places of copies: words of a run, such as `[*E]=25100,43000,97700,98100`.

A word has the microseconds of one kind of block, by its text in the pattern: those of its forward, of its
backward with replays, and of its copies to the host and back. `head` has what the last segment computes besides
its blocks; it is not copied. The run keeps the words, so all its ranks have the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from braid.schedule.offload import Durations, block_of, blocks_of, computing_phases
from braid.schedule.ops import Act, Op, Schedule

HEAD = "head"
FORM = "must be BLOCK=FORWARD,BACKWARD,OUT,BACK, whole microseconds from 1, and head=FORWARD,BACKWARD,0,0"


class Times(NamedTuple):
    """Microseconds of a kind of block."""

    forward: int
    backward: int
    out: int
    back: int


def parsed(words: Iterable[str]) -> dict[str, Times]:
    """The times of each kind of block. A `ValueError` names the word that is none."""
    found: dict[str, Times] = {}
    for word in words:
        kind, _, figures = word.partition("=")
        numbers = figures.split(",")
        if not kind or kind in found or len(numbers) != 4 or not all(map(str.isdecimal, numbers)):
            raise ValueError(f"{word}: {FORM}, each kind once")
        found[kind] = Times(*map(int, numbers))
        if 0 in found[kind] and kind != HEAD:
            raise ValueError(f"{word}: {FORM}")
    return found


def words_of(times: Mapping[str, Times]) -> tuple[str, ...]:
    return tuple(f"{kind}={','.join(map(str, each))}" for kind, each in times.items())


def durations(schedule: Schedule, kinds: Mapping[int, str], times: Mapping[str, Times]) -> Durations:
    """Of the ops of a schedule; `kinds` are those of its blocks, by their index. The phases of a block that
    compute have equal parts of its time."""
    shares: dict[tuple[int, str | None], tuple[int, int]] = {}
    copies: dict[tuple[int, str], Times] = {}
    for segment, phases in enumerate(schedule.phases):
        names = blocks_of(phases)
        for phase in phases:
            block = block_of(phase)
            if phase.block is not None and block in names:
                copies[segment, block] = known = times[kinds[phase.block]]
                computing = computing_phases(phases, names[block])
                if phase.name in computing:
                    parts = len(computing)
                    shares[segment, phase.name] = known.forward // parts, known.backward // parts
        if HEAD in times:
            shares[segment, HEAD] = times[HEAD].forward, times[HEAD].backward

    def seconds(op: Op) -> int:
        forward, backward = shares.get((op.segment or 0, op.phase), (0, 0))
        return {Act.F: forward, Act.B: backward}.get(op.act, 0)

    def copy(act: Act, segment: int, block: str) -> int:
        known = copies[segment, block]
        return known.out if act is Act.OFFLOAD else known.back

    return Durations(op=seconds, copy=copy)
