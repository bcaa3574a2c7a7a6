"""Replays: where a schedule that goes into phases runs some of them again, so that less is kept until then.

    B0.0:1.combine RECOMPUTE0.0:1.mix RECOMPUTE0.0:1.dispatch F1.0:0.mix RECOMPUTE0.0:1.experts B0.0:1.experts

`replayed_phases` says which phases have something to run again, `with_replays` places the ops. A replay stands
right before what needs it first. Where all of a block is recomputed, its `mix` and `dispatch` come earlier,
right behind the backward of its `combine`, which needs neither: rows on their way back then have the replay of
`mix` beside them, and rows that leave once more the forward of another micro-batch. All ranks that share
experts have the same list, and so issue their exchanges in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from braid.pattern import Block, Kind, Layout
from braid.schedule.faults import Fault, Rule
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule
from braid.schedule.phases import Phase, readers

KEEPERS = ("head", "enter", "experts")
"""Kinds of phases whose backward needs what they were given."""
MIXERS = frozenset({Kind.ATTENTION, Kind.LATENT_ATTENTION, Kind.MAMBA2, Kind.DELTA_NET})

Turn = tuple[int, int]
"""(micro-batch, segment)."""


def replayed_phases(
    layout: Layout,
    phases: Sequence[Sequence[Phase]],
    names: Collection[str],
    *,
    shared_experts: bool,
    dropout: bool,
) -> tuple[tuple[str, ...], ...]:
    """For each segment the phases in which something is recomputed, by the names of `train.recompute`.
    `shared_experts` says whether experts have one that every token visits, `dropout` whether layers have it."""
    blocks: dict[tuple[int | None, int], Block] = {}
    for segment in layout.segments:
        blocks |= {(None, block.index): block for block in segment.blocks}
    for depth in layout.mtp:
        blocks |= {(depth.depth, block.index): block for block in depth.blocks}

    def asked(*these: str) -> bool:
        return "full" in names or not set(these).isdisjoint(names)

    def of_mix(phase: Phase) -> bool:
        assert phase.block is not None
        held = {layer.kind for layer in blocks[phase.depth, phase.block].layers}
        dense = Kind.MLP in held or (Kind.MOE in held and shared_experts)
        mixes = not MIXERS.isdisjoint(held)
        return asked("block", "norm") or (asked("activation") and dense) or (asked("core") and mixes)

    def replayed(phase: Phase) -> bool:
        match phase.kind:
            case "mix":
                return of_mix(phase)
            case "dispatch":
                return asked("block")
            case "experts":
                return asked("block", "experts")
            case "combine":
                return asked("block") and dropout
            case "enter":
                return asked("norm")
            case "final_norm":
                return asked("norm") and phase.depth is None
            case _:
                return False

    return tuple(tuple(phase.name for phase in segment if replayed(phase)) for segment in phases)


def with_replays(schedule: Schedule, replayed: Sequence[Sequence[str]]) -> Schedule:
    """The schedule with a `RECOMPUTE` for each of these phases of every micro-batch; nothing else is moved."""
    if not any(replayed):
        return schedule
    named = replace(schedule, replayed=tuple(map(tuple, replayed)))
    return replace(named, ops=tuple(_placed(named, rank, ops) for rank, ops in enumerate(schedule.ops)))


def _placed(schedule: Schedule, rank: int, ops: Ops) -> Ops:
    before: dict[int, list[Op]] = defaultdict(list)
    for (micro_batch, segment), places in _backwards(ops).items():
        found = _anchors(schedule.phases[segment], set(schedule.replayed[segment]), places)
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


def _anchors(phases: Sequence[Phase], replayed: Collection[str], backward: Mapping[str, int]) -> dict[str, int]:
    """For each phase the op before which it is replayed."""
    anchors: dict[str, int] = {}
    combines = {(phase.depth, phase.block): phase.name for phase in phases if phase.kind == "combine"}
    dispatches = (phase for phase in phases if phase.kind == "dispatch")
    sent_again = {(phase.depth, phase.block) for phase in dispatches if phase.name in replayed}
    for phase in reversed(phases):
        if phase.name not in replayed:
            continue
        block = (phase.depth, phase.block)
        if phase.kind in ("mix", "dispatch") and block in sent_again:
            anchors[phase.name] = backward[combines[block]] + 1
        else:
            needs = [backward[phase.name], *(backward[each] for each in _keepers(phases, phase))]
            later = (anchors[each.name] for each in _given(phases, phase) if each.name in anchors)
            anchors[phase.name] = min([*needs, *later])
    return anchors


def _given(phases: Sequence[Phase], phase: Phase) -> list[Phase]:
    """The phases that are given what a replay of this one makes, where they are replayed themselves."""
    found = readers(phases)
    names = {reader for tensor in phase.writes for reader in found.get(tensor, ())}
    return [each for each in phases if each.name in names and each.kind in ("dispatch", *KEEPERS)]


def _keepers(phases: Sequence[Phase], phase: Phase) -> list[str]:
    """The phases whose backward needs what this one wrote."""
    return [each.name for each in _given(phases, phase) if each.kind in KEEPERS]


# ------------------------------------------------------------------------------------------------ proof


def without_replays(schedule: Schedule) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """The schedule that was given to `with_replays`; and for each rank the places of its ops in this one, with
    one past the end."""
    kept = [[place for place, op in enumerate(ops) if op.act is not Act.RECOMPUTE] for ops in schedule.ops]
    lists = tuple(tuple(ops[place] for place in own) for ops, own in zip(schedule.ops, kept, strict=True))
    places = tuple((*own, len(ops)) for ops, own in zip(schedule.ops, kept, strict=True))
    return replace(schedule, ops=lists, replayed=()), places


def replay_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each phase that is to be replayed is, once, after its forward and before everything that needs it."""
    for rank, ops in enumerate(schedule.ops):
        done: set[tuple[Act, int | None, int | None, str | None]] = set()
        replays: Counter[tuple[int | None, int | None, str | None]] = Counter()
        for place, op in enumerate(ops):
            for rule, why in _op_faults(schedule, op, done, replays):
                yield Fault(rank=rank, place=place, op=op, rule=rule, why=why)
            done.add((op.act, op.micro_batch, op.segment, op.phase))
            replays[op.micro_batch, op.segment, op.phase] += op.act is Act.RECOMPUTE


def _op_faults(
    schedule: Schedule,
    op: Op,
    done: Collection[tuple[Act, int | None, int | None, str | None]],
    replays: Mapping[tuple[int | None, int | None, str | None], int],
) -> Iterator[tuple[Rule, str]]:
    if op.act not in (Act.RECOMPUTE, Act.B) or op.segment is None or op.segment >= len(schedule.phases):
        if op.act is Act.RECOMPUTE:
            yield Rule.COMPLETE, "it does not say what it is about"
        return
    turn, listed = (op.micro_batch, op.segment), schedule.replayed[op.segment] if schedule.replayed else ()
    if op.act is Act.RECOMPUTE:
        if op.phase not in listed:
            yield Rule.EXISTS, "nothing of this phase is recomputed"
            return
        if (Act.F, *turn, op.phase) not in done:
            yield Rule.AFTER_INPUT, f"{replace(op, act=Act.F, collectives=())} has not run"
        if replays[*turn, op.phase]:
            yield Rule.ONCE, "it has run before"
    for name in _needed(schedule.phases[op.segment], op, listed):
        if (Act.RECOMPUTE, *turn, name) not in done:
            needed = replace(op, act=Act.RECOMPUTE, phase=name, collectives=())
            yield Rule.AFTER_INPUT, f"{needed} has not run"


def _needed(phases: Sequence[Phase], op: Op, listed: Collection[str]) -> Iterator[str]:
    """The phases whose replay an op needs."""
    for phase in phases:
        if op.act is Act.B:
            needs = phase.name == op.phase or op.phase in _keepers(phases, phase)
        else:
            needs = op.phase in [each.name for each in _given(phases, phase)]
        if needs and phase.name in listed:
            yield phase.name
