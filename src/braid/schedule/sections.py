"""Sections of an op list: the stretches that begin and end with no micro-batch in flight.

A CUDA graph of a section needs nothing from the ops before it but weights, inputs and gradients so far. If
micro-batches run one after the other, each is a section, and all sections are alike; an overlapped schedule has
some micro-batch in flight from its first op to its last, so all its micro-batches are one section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from braid.schedule.ops import Act, Op, Schedule


@dataclass(frozen=True, kw_only=True)
class Section:
    """The ops from `start` to before `stop` of a list."""

    start: int
    stop: int
    micro_batches: tuple[int, ...]
    """In the order of their first op."""
    form: tuple[Op, ...]
    """Its ops, as if the first micro-batch were 0. Sections of equal form do the same."""

    @property
    def first(self) -> bool:
        """Whether its gradients are the first of the step."""
        return 0 in self.micro_batches


def sections_of(schedule: Schedule, rank: int) -> tuple[Section, ...]:
    """The sections of a rank that keeps its weights. Other ops than those of micro-batches (`FINISH`, messages,
    those on sharded weights) are in none: a section ends before them."""
    return tuple(_sections(schedule.ops[rank]))


def _sections(ops: tuple[Op, ...]) -> Iterator[Section]:
    left = Counter((op.micro_batch, op.segment) for op in ops if op.act.computes)
    begun, start = set[tuple[int | None, int | None]](), 0
    for place, op in enumerate(ops):
        if op.act.computes:
            if not begun and start < place and any(each.act.computes for each in ops[start:place]):
                yield _section(ops, start, place)
                start = place
            turn = (op.micro_batch, op.segment)
            begun.add(turn)
            left[turn] -= 1
            if not left[turn]:
                begun.discard(turn)
        elif op.act not in (Act.ACCUM, Act.REDUCE_GRAD) and not op.act.copies:
            assert not begun or op.act.sends or op.act.receives or op.act.shards, f"{op} within a section"
            if not begun:
                if any(each.act.computes for each in ops[start:place]):
                    yield _section(ops, start, place)
                start = place + 1
    if any(each.act.computes for each in ops[start:]):
        yield _section(ops, start, len(ops))


def _section(ops: tuple[Op, ...], start: int, stop: int) -> Section:
    own = ops[start:stop]
    micro_batches = tuple(dict.fromkeys(op.micro_batch for op in own if op.micro_batch is not None))
    return Section(
        start=start,
        stop=stop,
        micro_batches=micro_batches,
        form=tuple(_relative(op, min(micro_batches)) for op in own),
    )


def _relative(op: Op, first: int) -> Op:
    if op.act is Act.REDUCE_GRAD:  # without other ranks it accumulates, as in every micro-batch but the last
        return replace(op, act=Act.ACCUM)
    return op if op.micro_batch is None else replace(op, micro_batch=op.micro_batch - first)
