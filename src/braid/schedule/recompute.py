"""Replays: where a schedule that goes into phases runs some of them again, so that less is kept until then.

    B0.0:1.combine RECOMPUTE0.0:1.mix RECOMPUTE0.0:1.dispatch F1.0:0.mix RECOMPUTE0.0:1.experts B0.0:1.experts

Phases say what of them can be recomputed, `with_replays` places the ops. A replay stands
right before what needs it first. Where all of a block is recomputed, its `mix` and `dispatch` come earlier,
right behind the backward of its `combine`, which needs neither: rows on their way back then have the replay of
`mix` beside them, and rows that leave once more the forward of another micro-batch. All ranks that share
experts have the same list, and so issue their exchanges in the same order.

Hyper-connections are recomputed from one layer to the next, and over several blocks: a **span** of them. Only
the streams behind a span are kept, so that the first backward within it needs the replays of all its phases,
from the first to the last.
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

KEEPERS = ("head", "enter", "experts")
"""Kinds of phases whose backward needs what they were given."""
STREAMERS = ("block", "mix", "post")
"""Kinds of phases that read residual streams, and need them again where nobody has kept them."""


def span_ends(layout: Layout, blocks: int) -> frozenset[tuple[int | None, int]]:
    """The last block of each span of so many, as (MTP depth, index). No span leaves its segment, or its
    depth."""
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
    """For each segment the tensors that phases write and that nobody keeps: streams within a span of
    hyper-connections, and the ways out of it. Nothing where there is but one residual stream, as `hyper`
    says."""
    whole = not {"block", "full"}.isdisjoint(names)
    ends = span_ends(layout, 1 if whole else span)

    def dropped(phase: Phase, posts: Collection[tuple[int | None, int | None]]) -> tuple[str, ...]:
        if phase.kind == "mix" and (phase.depth, phase.block) in posts:
            return tuple(name for name in phase.writes if not name.endswith((".rows", ".probs", ".shared")))
        within = phase.block is not None and (phase.depth, phase.block) not in ends
        return phase.writes if phase.kind in STREAMERS and within else ()

    if not hyper or (not whole and "hyper" not in names):
        return ()
    found = []
    for segment in phases:
        posts = {(phase.depth, phase.block) for phase in segment if phase.kind == "post"}
        found.append(tuple(name for phase in segment for name in dropped(phase, posts)))
    return tuple(found)


def with_replays(schedule: Schedule, names: Collection[str], dropped: Sequence[Sequence[str]] = ()) -> Schedule:
    """The schedule with a `RECOMPUTE` for each phase of every micro-batch that has something of these names;
    nothing else is moved. For each segment, `dropped` are residual streams that nobody keeps."""
    gone = tuple(map(tuple, dropped)) or ((),) * schedule.segments
    named = replace(schedule, recompute=tuple(sorted(recomputed(names))), dropped=gone)
    if not any(named.replayed):
        return schedule
    return replace(named, ops=tuple(_placed(named, rank, ops) for rank, ops in enumerate(schedule.ops)))


def _placed(schedule: Schedule, rank: int, ops: Ops) -> Ops:
    before: dict[int, list[Op]] = defaultdict(list)
    for (micro_batch, segment), places in _backwards(ops).items():
        given = _ReplayNeeds(schedule.phases[segment], schedule.dropped[segment])
        found = _anchors(given, schedule.replayed[segment], places)
        for phase in schedule.phases[segment]:
            if phase.name in found:
                op = Op(act=Act.RECOMPUTE, micro_batch=micro_batch, segment=segment, phase=phase.name)
                if phase.kind == "dispatch":
                    op = replace(op, collectives=(_exchange(phase, rank),))
                before[found[phase.name]].append(op)
    return tuple(each for place, op in enumerate(ops) for each in (*before.get(place, ()), op))


def _exchange(phase: Phase, rank: int) -> Collective:
    """Among ranks of this stage alone."""
    return Collective(communicator=f"experts.{rank}", label=f"exchange({phase.name})", members=(rank,))


def _backwards(ops: Ops) -> dict[Turn, dict[str, int]]:
    """Where each phase of each micro-batch runs backward."""
    found: dict[Turn, dict[str, int]] = defaultdict(dict)
    for place, op in enumerate(ops):
        if op.act is Act.B and op.phase is not None:
            assert op.micro_batch is not None
            assert op.segment is not None
            found[op.micro_batch, op.segment][op.phase] = place
    return found


class _ReplayNeeds:
    """Who needs what replays make."""

    def __init__(self, phases: Sequence[Phase], dropped: Collection[str]) -> None:
        self.phases = phases
        by_name, found = {phase.name: phase for phase in phases}, readers(phases)
        self._readers = {
            phase.name: [
                by_name[reader]
                for tensor in phase.writes
                for reader in found.get(tensor, ())
                if by_name[reader].kind in ("dispatch", *KEEPERS)
                or (tensor in dropped and by_name[reader].kind in STREAMERS)
            ]
            for phase in phases
        }

    def to(self, phase: Phase) -> list[Phase]:
        """The phases that are given what a replay of this one makes, where they are replayed themselves."""
        return list(dict.fromkeys(self._readers[phase.name]))

    def keepers(self, phase: Phase) -> list[str]:
        """The phases whose backward needs what this one wrote."""
        return [each.name for each in self.to(phase) if each.kind in (*KEEPERS, "post")]


def _anchors(given: _ReplayNeeds, replayed: Collection[str], backward: Mapping[str, int]) -> dict[str, int]:
    """For each phase the op before which it is replayed."""
    anchors: dict[str, int] = {}
    phases = given.phases
    combines = {(phase.depth, phase.block): phase.name for phase in phases if phase.kind == "combine"}
    dispatches = (phase for phase in phases if phase.kind == "dispatch")
    sent_again = {(phase.depth, phase.block) for phase in dispatches if phase.name in replayed}
    for phase in reversed(phases):
        if phase.name not in replayed:
            continue
        block = (phase.depth, phase.block)
        needs = [backward[phase.name], *(backward[each] for each in given.keepers(phase))]
        needs += [anchors[each.name] for each in given.to(phase) if each.name in anchors]
        if phase.kind in ("mix", "dispatch") and block in sent_again:
            needs.append(backward[combines[block]] + 1)
        anchors[phase.name] = min(needs)
    return anchors


# ------------------------------------------------------------------------------------------------ proof


_Key = tuple[int | None, int | None, str | None]
"""A phase of a micro-batch: which one, in which segment, and its name."""


def replay_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each phase that is to be replayed is, once, after its forward and before everything that needs it."""
    needed = _needed(schedule)
    for rank, ops in enumerate(schedule.ops):
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
            yield Rule.COMPLETE, "it does not say what it is about"
        return
    if op.act is Act.RECOMPUTE:
        if op.phase not in schedule.replayed[op.segment]:
            yield Rule.EXISTS, "nothing of this phase is recomputed"
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
    """For each `B` and `RECOMPUTE` of a phase, the phases whose replay it needs."""
    found: dict[tuple[Act, int, str], list[str]] = defaultdict(list)
    dropped = schedule.dropped or ((),) * len(schedule.phases)
    for segment, (phases, gone) in enumerate(zip(schedule.phases, dropped, strict=True)):
        given = _ReplayNeeds(phases, gone)
        for phase in phases:
            if phase.name not in schedule.replayed[segment]:
                continue
            for name in dict.fromkeys([phase.name, *given.keepers(phase)]):
                found[Act.B, segment, name].append(phase.name)
            for reader in given.to(phase):
                found[Act.RECOMPUTE, segment, reader.name].append(phase.name)
    return found
