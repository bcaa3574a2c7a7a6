"""Activation checkpointing in a schedule: places the `RECOMPUTE` ops (replays) that rerun phases before
backward.

    B0.0:1.combine RECOMPUTE0.0:1.mix RECOMPUTE0.0:1.dispatch F1.0:0.mix RECOMPUTE0.0:1.experts B0.0:1.experts

Phases declare the regions that can be recomputed; `with_replays` places the ops. A replay comes right before
its first consumer. If a whole block is recomputed, its `mix` and `dispatch` come earlier, right after the
backward of its `combine`, which needs neither: the replay of `mix` then overlaps with the all-to-all of that
backward, and the repeated dispatch with the forward of another micro-batch. All ranks that share experts have
the same list, so they issue their all-to-alls in the same order.

Hyper-connections are recomputed from layer to layer over a **span** of several blocks. Only the residual
streams at the end of a span are saved, so the first backward within it needs the replays of all its phases,
from first to last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from braid.choices import recomputed
from braid.pattern import Block, Layout
from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule, Turn
from braid.schedule.phases import Phase, readers

SAVES_INPUT = ("head", "enter", "experts")
"""Kinds of phases whose backward needs their input."""
READS_STREAMS = ("block", "mix", "post")
"""Kinds of phases that read residual streams, and need their recomputed values if they were not saved."""


def span_ends(layout: Layout, blocks: int) -> frozenset[tuple[int | None, int]]:
    """The last block of each span of `blocks` blocks, as (MTP depth, index). Spans do not cross segments or MTP
    depths."""
    return frozenset(span[-1] for span in _spans(layout, blocks))


def span_starts(layout: Layout, blocks: int) -> frozenset[tuple[int | None, int]]:
    """The first block of each span."""
    return frozenset(span[0] for span in _spans(layout, blocks))


def _spans(layout: Layout, blocks: int) -> Iterator[list[tuple[int | None, int]]]:
    runs: list[tuple[int | None, Sequence[Block]]] = [(None, segment.blocks) for segment in layout.segments]
    runs += [(depth.depth, depth.blocks) for depth in layout.mtp]
    for depth, run in runs:
        places: list[tuple[int | None, int]] = [(depth, block.index) for block in run]
        yield from (places[first : first + blocks] for first in range(0, len(places), blocks))


def dropped_tensors(
    layout: Layout, phases: Sequence[Sequence[Phase]], names: Collection[str], span: int, *, hyper: bool
) -> tuple[tuple[str, ...], ...]:
    """For each segment, the tensors that are not saved: the residual streams of hyper-connections within a
    span, and what `mix` passes to `post`. None without hyper-connections (`hyper`)."""
    whole_blocks = not {"block", "full"}.isdisjoint(names)
    ends = span_ends(layout, 1 if whole_blocks else span)

    def dropped(phase: Phase, posts: Collection[tuple[int | None, int | None]]) -> tuple[str, ...]:
        if phase.kind == "mix" and (phase.depth, phase.block) in posts:
            return tuple(name for name in phase.writes if not name.endswith((".rows", ".probs", ".shared")))
        within = phase.block is not None and (phase.depth, phase.block) not in ends
        return phase.writes if phase.kind in READS_STREAMS and within else ()

    if not hyper or (not whole_blocks and "hyper" not in names):
        return ()
    by_segment = []
    for segment in phases:
        posts = {(phase.depth, phase.block) for phase in segment if phase.kind == "post"}
        by_segment.append(tuple(name for phase in segment for name in dropped(phase, posts)))
    return tuple(by_segment)


def with_replays(schedule: Schedule, names: Collection[str], dropped: Sequence[Sequence[str]] = ()) -> Schedule:
    """Insert a `RECOMPUTE` for each phase of every micro-batch with a region of these names; all other ops keep
    their order. `dropped` are the residual streams of each segment that are not saved."""
    not_saved = tuple(map(tuple, dropped)) or ((),) * schedule.segments
    named = replace(schedule, recompute=tuple(sorted(recomputed(names))), dropped=not_saved)
    if not any(named.replayed):
        return schedule
    return replace(named, ops=tuple(_with_replays(named, ops) for ops in schedule.ops))


def _with_replays(schedule: Schedule, ops: Ops) -> Ops:
    before: dict[int, list[Op]] = defaultdict(list)
    for (micro_batch, segment), places in _backward_places(ops).items():
        consumers = _Consumers(schedule.phases[segment], schedule.dropped[segment])
        anchors = _anchors(consumers, schedule.replayed[segment], places)
        for phase in schedule.phases[segment]:
            if phase.name in anchors:
                op = Op(act=Act.RECOMPUTE, micro_batch=micro_batch, segment=segment, phase=phase.name)
                if phase.kind == "dispatch":
                    # An all-to-all within this stage: its members are the stations of the stage.
                    graph, label = schedule.graph, f"exchange({phase.name})"
                    name, members = f"experts.{graph.stage_name(segment)}", graph.stations[segment]
                    op = replace(op, collectives=(Collective(communicator=name, label=label, members=members),))
                before[anchors[phase.name]].append(op)
    return tuple(each for place, op in enumerate(ops) for each in (*before.get(place, ()), op))


def _backward_places(ops: Ops) -> dict[Turn, dict[str, int]]:
    """The place of each phase's backward, by turn."""
    places: dict[Turn, dict[str, int]] = defaultdict(dict)
    for place, op in enumerate(ops):
        if op.act is Act.B and op.phase is not None:
            assert op.micro_batch is not None
            assert op.segment is not None
            places[op.micro_batch, op.segment][op.phase] = place
    return places


class _Consumers:
    """The phases that consume recomputed outputs."""

    def __init__(self, phases: Sequence[Phase], dropped: Collection[str]) -> None:
        self.phases = phases
        by_name, read_by = {phase.name: phase for phase in phases}, readers(phases)
        self._consumers = {
            phase.name: [
                by_name[reader]
                for tensor in phase.writes
                for reader in read_by.get(tensor, ())
                if by_name[reader].kind in ("dispatch", *SAVES_INPUT)
                or (tensor in dropped and by_name[reader].kind in READS_STREAMS)
            ]
            for phase in phases
        }

    def replays(self, phase: Phase) -> list[Phase]:
        """The phases whose replay, if they have one, reads the recomputed output of this phase."""
        return list(dict.fromkeys(self._consumers[phase.name]))

    def backwards(self, phase: Phase) -> list[str]:
        """The phases whose backward reads the recomputed output of this phase."""
        return [each.name for each in self.replays(phase) if each.kind in (*SAVES_INPUT, "post")]


def _anchors(consumers: _Consumers, replayed: Collection[str], backward: Mapping[str, int]) -> dict[str, int]:
    """For each replayed phase, the place of the op that its replay precedes."""
    anchors: dict[str, int] = {}
    phases = consumers.phases
    combines = {(phase.depth, phase.block): phase.name for phase in phases if phase.kind == "combine"}
    dispatches = (phase for phase in phases if phase.kind == "dispatch")
    dispatched_again = {(phase.depth, phase.block) for phase in dispatches if phase.name in replayed}
    for phase in reversed(phases):
        if phase.name not in replayed:
            continue
        block = (phase.depth, phase.block)
        needs = [backward[phase.name], *(backward[each] for each in consumers.backwards(phase))]
        needs += [anchors[each.name] for each in consumers.replays(phase) if each.name in anchors]
        if phase.kind in ("mix", "dispatch") and block in dispatched_again:
            needs.append(backward[combines[block]] + 1)
        anchors[phase.name] = min(needs)
    return anchors


# ------------------------------------------------------------------------------------------------ check


_Key = tuple[int | None, int | None, str | None]
"""(micro-batch, segment, phase)."""


def replay_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each replayed phase is replayed once, after its forward and before all its consumers."""
    needed = _needed(schedule)
    for rank, ops in enumerate(schedule.ops):
        if not needed and not any(op.act is Act.RECOMPUTE for op in ops):
            continue  # nothing is replayed, and nothing needs to be
        forward: set[_Key] = set()
        replayed: set[_Key] = set()
        for place, op in enumerate(ops):
            key = (op.micro_batch, op.segment, op.phase)
            if op.act is Act.F:
                forward.add(key)
            elif op.act in (Act.B, Act.RECOMPUTE):
                for rule, why in _op_faults(schedule, op, needed, forward, replayed):
                    yield Fault(rank=rank, place=place, op=op, rule=rule, why=why)
                if op.act is Act.RECOMPUTE:
                    replayed.add(key)


def _op_faults(
    schedule: Schedule,
    op: Op,
    needed: Mapping[tuple[Act, int, str], Sequence[str]],
    forward: Collection[_Key],
    replayed: Collection[_Key],
) -> Iterator[tuple[Rule, str]]:
    if op.segment is None or op.phase is None or op.segment >= len(schedule.phases):
        if op.act is Act.RECOMPUTE:
            yield Rule.COMPLETE, "it does not name a segment and phase"
        return
    if op.act is Act.RECOMPUTE:
        if op.phase not in schedule.replayed[op.segment]:
            yield Rule.EXISTS, "this phase is not recomputed"
            return
        if (op.micro_batch, op.segment, op.phase) not in forward:
            yield Rule.AFTER_INPUT, f"{replace(op, act=Act.F, collectives=())} has not run"
        if (op.micro_batch, op.segment, op.phase) in replayed:
            yield Rule.ONCE, "it has run before"
    for name in needed.get((op.act, op.segment, op.phase), ()):
        if (op.micro_batch, op.segment, name) not in replayed:
            missing = replace(op, act=Act.RECOMPUTE, phase=name, collectives=())
            yield Rule.AFTER_INPUT, f"{missing} has not run"


def _needed(schedule: Schedule) -> dict[tuple[Act, int, str], list[str]]:
    """For each `B` and `RECOMPUTE` of a phase, the phases whose replay must precede it."""
    needed: dict[tuple[Act, int, str], list[str]] = defaultdict(list)
    dropped = schedule.dropped or ((),) * len(schedule.phases)
    for segment, (phases, not_saved) in enumerate(zip(schedule.phases, dropped, strict=True)):
        consumers = _Consumers(phases, not_saved)
        for phase in phases:
            if phase.name not in schedule.replayed[segment]:
                continue
            for name in dict.fromkeys([phase.name, *consumers.backwards(phase)]):
                needed[Act.B, segment, name].append(phase.name)
            for consumer in consumers.replays(phase):
                needed[Act.RECOMPUTE, segment, consumer.name].append(phase.name)
    return needed
