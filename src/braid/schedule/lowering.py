"""Lowering: inserts the FSDP ops (unshard, reshard, gradient accumulation and reduction) into a compute
schedule.

    F0.0 B0.0 F1.0 B1.0
    UNSHARD(a) WAIT(a) F0.0 B0.0 ACCUM(a) F1.0 B1.0 REDUCE_GRAD(a) RESHARD(a) FINISH

Compute ops and messages keep their order. Lowering depends only on the `Use` of units by each op, in training
and evaluation alike. All ranks of a stage get the same list, so they issue the same collectives in the same
order.

With several modules, the stations of a stage have different lists, but the same ops of that stage. So each
module of a station is lowered as if it were alone, and the results are merged: what is inserted depends on the
ops of the stage only, and comes between the same ones on all its stations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from braid.choices import Strategy
from braid.schedule.graph import Graph
from braid.schedule.lifetime import Use, Uses, uses_of
from braid.schedule.ops import Act, Collective, Op, Ops, Schedule


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When units are unsharded, resharded and reduced. Distances count the ops that use units; messages do not
    count."""

    lookahead: int = 1
    """Prefetch distance: how many ops ahead of its use the all-gather of a unit starts."""
    keep: int | None = None
    """A unit stays unsharded if its next use is at most this many ops away, or so close that its prefetch would
    start at once. None: until its last use in the step."""
    reduce_every: bool = False
    """Whether gradients are reduced after every micro-batch instead of once per step."""
    gathers: bool = True
    """Whether weights are sharded at all. A single process holds all of them, and only accumulates
    gradients."""


POLICIES: Mapping[Strategy, Policy] = MappingProxyType(
    {
        "none": Policy(),
        "optimizer": Policy(),
        "gradients": Policy(reduce_every=True),
        "all": Policy(keep=2, reduce_every=True),
    }
)
"""The policy of each sharding strategy: none, ZeRO-1, ZeRO-2 and ZeRO-3."""

RESIDENT = Policy(gathers=False)
"""The policy of a single process, which keeps all weights."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What lowering knows about the weights of a pipeline rank."""

    units: Mapping[str, str]
    """The mesh that each unit is sharded over."""
    uses: Uses
    policy: Policy


def lowered(schedule: Schedule, meshes: Mapping[str, str], policy: Policy | Mapping[str, Policy]) -> Schedule:
    """Lower every rank's list of a schedule in phases. `meshes` maps each unit to its mesh. Modules may have a
    policy each; either all of them gather weights, or none."""
    graph, uses = schedule.graph, uses_of(schedule)
    policies = dict.fromkeys(graph.modules, policy) if isinstance(policy, Policy) else policy
    by_module = {name: Sharding(units=meshes, uses=uses, policy=policies[name]) for name in graph.modules}
    gathers = {each.policy.gathers for each in by_module.values()}
    assert len(gathers) == 1, "some modules gather their weights, others keep them"
    lists = (
        tuple(_lower_modules(ops, schedule.segments_of(rank), graph, by_module))
        for rank, ops in enumerate(schedule.ops)
    )
    weights: Literal["resident", "sharded"] = "sharded" if gathers.pop() else "resident"
    return replace(schedule, ops=tuple(lists), weights=weights)


def lower(ops: Ops, sharding: Sharding, rank: int = 0) -> Ops:
    """Insert UNSHARD, WAIT, RESHARD, ACCUM, REDUCE_GRAD and FINISH into the list of a pipeline rank.

    Between two ops that use units the order is: sends, since a peer waits for them; reductions and reshards of
    the earlier op; all-gathers for the later ones; receives. So all-gathers overlap with receives.
    """
    return tuple(_Lowering(ops, sharding, Stage(str(rank), (rank,))).run())


class Stage(NamedTuple):
    """The ranks that share the collectives of a list."""

    name: str
    members: tuple[int, ...]
    """Pipeline ranks, or stations."""


_FOLLOWS = (Act.ACCUM, Act.REDUCE_GRAD, Act.RESHARD)
"""What is inserted behind the op that it belongs to."""


def _lower_modules(
    ops: Ops, held: Sequence[int], graph: Graph, by_module: Mapping[str, Sharding]
) -> Iterator[Op]:
    """Lower the ops of each module that a rank holds by themselves, and merge them in the order of its list."""
    module_of = {segment: graph.segments[segment].module for segment in held}
    first = module_of[held[0]]  # an op on the wrong rank goes with it, so that `check` can name it
    streams: dict[str, deque[Op]] = {}
    for segment, module in module_of.items():
        if module not in streams:
            own = tuple(
                op for op in ops if op.segment is not None and module_of.get(op.segment, first) == module
            )
            stage = Stage(graph.stage_name(segment), graph.stations[segment])
            *alone, _ = _Lowering(own, by_module[module], stage).run()  # without its FINISH
            streams[module] = deque(alone)
    if len(streams) == 1:
        yield from streams[module_of[held[0]]]
    else:
        yield from _merged(ops, lambda segment: streams[module_of.get(segment, first)])
    yield Op(act=Act.FINISH)
    yield from (op for op in ops if op.segment is None)


def _merged(ops: Ops, stream_of: Callable[[int], deque[Op]]) -> Iterator[Op]:
    """The lowered ops of several modules, in the order of the list of their rank."""
    for op in ops:
        if op.segment is None:
            continue
        stream = stream_of(op.segment)
        while (each := stream.popleft()) is not op:
            yield each
        yield op
        while stream and stream[0].act in _FOLLOWS:
            yield stream.popleft()


class _Slot(NamedTuple):
    """An op that uses units, and the ops up to the next such op."""

    op: Op
    use: Use
    sends: Ops
    """Sends directly behind it."""
    rest: Ops


class _Lowering:
    """The state of lowering one list."""

    def __init__(self, ops: Ops, sharding: Sharding, stage: Stage) -> None:
        self.sharding, self.policy, self.stage = sharding, sharding.policy, stage
        self.before, self.slots = _slots(ops, sharding.uses)
        self.last_of: dict[tuple[str, int | None], int] = {}
        """The last slot of each micro-batch that adds to the gradient of a unit."""
        for number, slot in enumerate(self.slots):
            for unit in slot.use.grads:
                self.last_of[unit, slot.op.micro_batch] = number
        self.next_grads = _next_slots([slot.use.grads for slot in self.slots])
        """For each slot and unit whose gradient it adds to, the next slot that adds to it."""
        self.next_reads = _next_slots([slot.use.reads for slot in self.slots])
        """For each slot and unit that it reads, the next slot that reads it."""
        self.gathered: set[str] = set()
        self.waited: set[str] = set()
        self.accumulations: dict[str, Op] = {}
        """The `ACCUM` of each unit, the same for all micro-batches."""

    def run(self) -> Iterator[Op]:
        rest = self.before
        for number, slot in enumerate(self.slots):
            yield from self._begin_gathers(number)
            yield from rest
            yield from self._waits(slot.use)
            yield slot.op
            yield from slot.sends
            yield from self._gradients(number)
            yield from self._releases(number)
            rest = slot.rest
        # Copies are summed after their gradients are reduced, hence after FINISH.
        end = next((place for place, op in enumerate(rest) if op.act is Act.SUM_COPIES), len(rest))
        yield from (*rest[:end], Op(act=Act.FINISH), *rest[end:])

    def _begin_gathers(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        for slot in self.slots[number : number + self.policy.lookahead + 1]:
            for unit in slot.use.reads:
                if unit not in self.gathered:
                    self.gathered.add(unit)
                    yield Op(act=Act.UNSHARD, unit=unit, collectives=(self._collective("gather", unit),))

    def _waits(self, use: Use) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        for unit in use.reads:
            if unit not in self.waited:
                self.waited.add(unit)
                yield Op(act=Act.WAIT, unit=unit)

    def _gradients(self, number: int) -> Iterator[Op]:
        """Accumulate or reduce a gradient that no further op of the same micro-batch adds to next."""
        micro_batch = self.slots[number].op.micro_batch
        for unit, later in zip(self.slots[number].use.grads, self.next_grads[number], strict=True):
            if later is None or (self.policy.reduce_every and self.last_of[unit, micro_batch] == number):
                collectives = (self._collective("reduce", unit),) if self.policy.gathers else ()
                yield Op(act=Act.REDUCE_GRAD, unit=unit, collectives=collectives)
            elif self.slots[later].op.micro_batch != micro_batch:
                if unit not in self.accumulations:
                    self.accumulations[unit] = Op(act=Act.ACCUM, unit=unit)
                yield self.accumulations[unit]

    def _releases(self, number: int) -> Iterator[Op]:
        if not self.policy.gathers:
            return
        keep, lookahead = self.policy.keep, self.policy.lookahead
        for unit, later in zip(self.slots[number].use.reads, self.next_reads[number], strict=True):
            if later is None or (keep is not None and later - number > max(keep, lookahead + 1)):
                self.gathered.discard(unit)
                self.waited.discard(unit)
                yield Op(act=Act.RESHARD, unit=unit)

    def _collective(self, what: str, unit: str) -> Collective:
        """A collective within this stage."""
        communicator = f"{self.sharding.units[unit]}.{self.stage.name}"
        return Collective(communicator=communicator, label=f"{what}({unit})", members=self.stage.members)


def _slots(ops: Ops, uses: Uses) -> tuple[Ops, list[_Slot]]:
    """The ops before the first that uses units, and the slots from there on."""
    users = [(place, use) for place, op in enumerate(ops) if (use := uses(op))]
    if not users:
        return ops, []
    slots = []
    ends = [*(place for place, _ in users[1:]), len(ops)]
    for (place, use), end in zip(users, ends, strict=True):
        first = place + 1
        while first < end and ops[first].act.sends:
            first += 1
        slots.append(_Slot(ops[place], use, ops[place + 1 : first], ops[first:end]))
    return ops[: users[0][0]], slots


def _next_slots(used: Sequence[Sequence[str]]) -> list[list[int | None]]:
    """For the units of each slot, the next slot that has them too."""
    upcoming: dict[str, int] = {}
    found = []
    for number in reversed(range(len(used))):
        found.append([upcoming.get(unit) for unit in used[number]])
        upcoming.update(dict.fromkeys(used[number], number))
    return found[::-1]
