"""Seconds of every op of a plan, and what they are spent on.

The work of an op is that of the phase it runs, in the pass it runs: `F` forward; `B` gradients of inputs, and
those of weights unless a `W` does; `RECOMPUTE` the forward of the regions that are replayed. To it come the
collectives that the phase issues, which its stream waits for. Ops on units last as long as their collective.

All ranks of a station are alike, and so are all micro-batches: an op is timed once for each station and phase,
and once for all stations that hold equal blocks in equal order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Protocol

from braid.choices import recomputed
from braid.nn.cost import Call
from braid.nn.work import Moved, Pass, Piece, Work
from braid.planning.estimate.edges import EdgeEstimate, edges_of
from braid.planning.estimate.offload import moved, parts_of_blocks
from braid.planning.estimate.rank import HeldModule
from braid.planning.estimate.weights import (
    Counted,
    HeldUnit,
    part_of,
    phases_of,
    unit_calls,
)
from braid.planning.local_model import is_alone
from braid.planning.plan import Plan
from braid.schedule import Act, Op, Ops, Phase
from braid.schedule.phases import named

COPIES = "host_link"
"""What waits for copies to the host and back count as."""
WAYS = MappingProxyType({Act.OFFLOAD: "to_host", Act.RELOAD: "to_device"})
Parts = Mapping[str, float]
"""Seconds by what they are spent on: products, attention, scans, memory, host, or a family of ranks."""


class Meter(Protocol):
    """What turns work into seconds: a calibration and a cluster."""

    def piece(self, piece: Piece, direction: Pass) -> tuple[str, float]:
        """What a piece of work counts as, and its seconds on the device."""
        ...

    def call(self, call: Call, module: str) -> float:
        """The seconds of one call of a collective of a module."""
        ...

    def copy(self, size: int, way: str) -> float:
        """The seconds of a copy of `size` bytes, `to_host` or `to_device`."""
        ...

    def message(self, size: int, module: str, stages: tuple[int, int]) -> float:
        """The seconds of a message of `size` bytes between two stages of a module."""
        ...

    def host(self, ops: int, launches: int) -> float:
        """The seconds that the host takes for a step with so many ops, which start so many kernels."""
        ...

    @property
    def optimizer(self) -> float:
        """Bytes that the optimizer moves in a second."""
        ...


@dataclass(frozen=True)
class _Timed:
    """What an op is made of, before it is added up."""

    pieces: tuple[tuple[Piece, Pass], ...] = ()
    calls: tuple[Call, ...] = ()


class OpTimes:
    """The seconds of the ops of a plan."""

    def __init__(self, plan: Plan, meter: Meter, stations: Sequence[Station]) -> None:
        """`stations` are those of the plan, or of one with other micro-batches."""
        self.plan, self.meter, self.stations = plan, meter, stations
        self._messages: dict[tuple[int, Act, int | None, str | None], float] = {}
        self._known: dict[tuple[int, Act, int | None, str | None, str | None], Parts] = {}
        self._updates: dict[int, Parts] = {}

    def parts(self, station: int, op: Op) -> Parts:
        """What the seconds of an op are spent on."""
        key = (station, op.act, op.segment, op.phase, op.unit)
        if key not in self._known:
            self._known[key] = self._parts(station, op)
        return self._known[key]

    def seconds(self, station: int, op: Op) -> float:
        return sum(self.parts(station, op).values())

    def message(self, station: int, op: Op) -> float:
        """The seconds of the message of a send or a receive."""
        key = (station, op.act, op.segment, op.edge)
        if key not in self._messages:
            self._messages[key] = self._message(station, op)
        return self._messages[key]

    def _message(self, station: int, op: Op) -> float:
        held = self.stations[station]
        if op.edge is not None:
            edge = next(each for each in held.edges if each.name == op.edge)
            size = edge.source_bytes if op.act is Act.SEND_F else edge.target_bytes
            return 0.0 if edge.is_local else self.meter.message(size, op.edge, (0, 1))
        assert op.segment is not None
        module = held.module_of(op.segment)
        _, sender, receiver = self.plan.schedule.pipe_of(op)
        return self.meter.message(held.stream_bytes(module), module.name, (sender, receiver))

    def update(self, station: int) -> Parts:
        """What follows the last op of a step: the norm of the gradients, the optimizer; and what precedes the
        first one, as quantising weights does, which takes as long."""
        original = self.stations[station].original
        number = station if original is None else original.number
        if number not in self._updates:
            self._updates[number] = self._update(self.stations[number])
        return self._updates[number]

    def _update(self, held: Station) -> Parts:
        moved = 0
        for unit in held.units:
            main = max(unit.stored, 4)
            narrow = unit.stored if is_alone(self.plan) and unit.stored < main else 0
            # The norm reads gradients; the update reads them again, and reads and writes weights and moments.
            moved += unit.kept_learned * (2 * main + 2 * main + narrow) + 2 * unit.kept_moments * main
        seconds = moved / self.meter.optimizer
        parts = _summed((call.family, self._call(call, module)) for module, call in held.once)
        if quantising := sum(unit.quantising_bytes for unit in held.units):
            what, taken = self.meter.piece(Piece(Moved(quantising)), "forward")
            parts[what] = parts.get(what, 0.0) + taken
        return {"optimizer": seconds, **parts}

    def _parts(self, station: int, op: Op) -> Parts:
        held = self.stations[station]
        if held.original is not None:
            return self.parts(held.original.number, held.original_op(op))
        if op.act.computes:
            timed = held.timed(op)
            assert op.segment is not None
            return self._add_up(timed, held.module_of(op.segment).name)
        if op.act in WAYS:
            return {COPIES: self.meter.copy(held.moved_bytes(op), WAYS[op.act])}
        if op.act in (Act.UNSHARD, Act.REDUCE_GRAD) and not is_alone(self.plan):
            wanted = "all_gather" if op.act is Act.UNSHARD else ""
            unit, module = held.unit(op.unit or "")
            calls = [call for call in unit_calls(unit) if (call.op == "all_gather") == bool(wanted)]
            return _summed((call.family, self._call(call, module)) for call in calls)
        return {}

    def _call(self, call: Call, module: str) -> float:
        return call.times * self.meter.call(call, module)

    def _add_up(self, timed: _Timed, module: str) -> Parts:
        """The seconds of an op on the device."""
        parts = _summed(self.meter.piece(piece, direction) for piece, direction in timed.pieces)
        for call in timed.calls:
            parts[call.family] = parts.get(call.family, 0.0) + self._call(call, module)
        return parts


def stations_of(plan: Plan, counted: Sequence[Sequence[Counted]], load: float) -> list[Station]:
    """All stations, by what each holds. Those that hold a twin refer to the station that holds its original."""
    found: list[Station] = []
    holders: dict[int, Station] = {}
    for number, own in enumerate(counted):
        original = own[0].held.original if own else None
        station = Station(plan, number, own, load, None if original is None else holders[id(original)])
        found.append(station)
        for each in own:
            holders[id(each.held)] = station
    return found


class Station:
    """What one rank of a station holds and runs."""

    def __init__(
        self, plan: Plan, number: int, counted: Sequence[Counted], load: float, original: Station | None
    ) -> None:
        """`load`: how many times its share the slowest rank of the experts has. `original`: the station that
        holds the original of this one's only module, a twin."""
        self.plan, self.number, self.load, self.original = plan, number, load, original
        self.counted, self.modules = counted, tuple(each.held for each in counted)
        self.edges: tuple[EdgeEstimate, ...] = tuple(edges_of(plan)) if plan.encoders else ()
        self.by_segment = {segment: module for module in self.modules for segment in module.segments}
        self._timed: dict[tuple[Act, int | None, str | None], _Timed] = {}
        self._of_original: dict[tuple[Act, int | None, str | None, str | None], Op] = {}

    def module_of(self, segment: int) -> HeldModule:
        return self.by_segment[segment]

    def stream_bytes(self, module: HeldModule) -> int:
        """Bytes of a message between two stages of a module."""
        tokens = module.workload.local_tokens(module.model.groups.tp_cp)
        return tokens * prod(module.model.shape.stream) * module.workload.narrow

    def moved_bytes(self, op: Op) -> int:
        """Bytes that an `OFFLOAD` or `RELOAD` moves."""
        assert op.segment is not None
        return moved(self.module_of(op.segment).costs[self._offloaded[op.segment, op.phase or ""]])

    @cached_property
    def _offloaded(self) -> dict[tuple[int, str], str]:
        return parts_of_blocks(self.plan, self.number)

    @cached_property
    def _units(self) -> list[tuple[HeldUnit, str]]:
        return [(unit, each.held.name) for each in self.counted for unit in each.units]

    @property
    def units(self) -> list[HeldUnit]:
        return [unit for unit, _ in self._units]

    def unit(self, name: str) -> tuple[HeldUnit, str]:
        """A unit and the name of its module."""
        return next(each for each in self._units if each[0].name == name)

    @cached_property
    def once(self) -> list[tuple[str, Call]]:
        """All-reduces that there are once in a step: of the gradients of replicated weights, and of what ranks
        need to quantise their shards when it begins."""
        return [(each.held.name, call) for each in self.counted for call in each.once]

    @cached_property
    def _originals(self) -> dict[str, str]:
        """Of a twin: the blocks of the original, by its own."""
        return {own: theirs for theirs, own in self.modules[0].blocks.items()}

    def original_op(self, op: Op) -> Op:
        """The op of the original that does the same."""
        key = (op.act, op.segment, op.phase, op.unit)
        if key not in self._of_original:
            self._of_original[key] = self._original_op(op)
        return self._of_original[key]

    def _original_op(self, op: Op) -> Op:
        assert self.original is not None
        segment, phase, unit = op.segment, op.phase, op.unit
        if segment is not None:
            segment = self.original.modules[0].segments[self.modules[0].segments.index(segment)]
        if phase is not None:
            block, dot, kind = phase.partition(".")
            phase = self._originals.get(block, block) + dot + kind
        if unit is not None and unit.startswith("stack.blocks."):
            stack, blocks, block, *inner = unit.split(".")
            unit = ".".join((stack, blocks, self._originals[block], *inner))
        return Op(act=op.act, segment=segment, phase=phase, unit=unit)

    @cached_property
    def works(self) -> dict[str, dict[str, Work]]:
        """The work of each part of the modules, by kind of phase."""
        return {
            module.name_of(part): work
            for module in self.modules
            for part, work in module.model.works(module.workload, self.load).items()
        }

    @cached_property
    def calls(self) -> dict[tuple[str, str, str], tuple[Call, ...]]:
        """The collectives of each part in a micro-batch, by kind of phase and direction."""
        found: dict[tuple[str, str, str], tuple[Call, ...]] = defaultdict(tuple)
        for module in self.modules:
            for part, cost in module.costs.items():
                for call in cost.calls:
                    found[part, call.phase, call.direction] += (call,)
        return found

    @cached_property
    def calls_by_module(self) -> dict[str, list[Call]]:
        """All collectives of each module."""
        found: dict[str, list[Call]] = {}
        for module in self.modules:
            found[module.name] = [call for cost in module.costs.values() for call in cost.calls]
            if not is_alone(self.plan):
                units = (unit for unit, name in self._units if name == module.name)
                found[module.name] += [call for unit in units for call in unit_calls(unit)]
        return found

    @cached_property
    def phases(self) -> dict[tuple[int, str], Phase]:
        """The phase of each name that an op may use, by segment."""
        return {
            (segment, name): phase
            for segment in self.by_segment
            for name, phase in named(self.plan.schedule.phases[segment]).items()
        }

    def started(self, ops: Ops) -> tuple[int, int]:
        """What the host starts for a list: ops, and their kernels. It runs ahead of the device, so a step is as
        long as the slower of the two."""
        computing = [op for op in ops if op.act.computes]
        alike = Counter((op.act, op.segment, op.phase) for op in computing)
        kernels = 0
        for (act, segment, phase), times in alike.items():
            pieces = self.timed(Op(act=act, segment=segment, phase=phase)).pieces
            kernels += times * sum(piece.launches for piece, _ in pieces)
        return len(computing), kernels

    def timed(self, op: Op) -> _Timed:
        """The work and the collectives of an op; the same for all micro-batches."""
        if self.original is not None:
            return self.original.timed(self.original_op(op))
        key = (op.act, op.segment, op.phase)
        if key not in self._timed:
            self._timed[key] = self._timed_op(op)
        return self._timed[key]

    def _timed_op(self, op: Op) -> _Timed:
        assert op.segment is not None
        assert op.phase is not None
        phase = self.phases[op.segment, op.phase]
        inner = phases_of(self.plan, op.segment) if phase.kind == "segment" else (phase,)
        each = [self._timed_phase(op, one) for one in inner]
        return _Timed(
            tuple(piece for one in each for piece in one.pieces), tuple(c for one in each for c in one.calls)
        )

    def _timed_phase(self, op: Op, phase: Phase) -> _Timed:
        module, part = self.module_of(op.segment or 0), part_of(phase)
        own = part if phase.depth is None or phase.block is None else f"{part}.blocks.{phase.block}"
        part, own = module.name_of(part), module.name_of(own)
        kinds = self._kinds(phase, own)
        works = [self.works[own][kind] for kind in kinds]
        match op.act:
            case Act.F:
                return self._forward(part, kinds, works)
            case Act.RECOMPUTE:
                return self._replay(part, kinds, works)
            case Act.W:
                return _Timed(_in_pass("wgrad", _bucket(op.phase or "", works)))
            case _:
                return self._backward(part, kinds, works, phase)

    def _kinds(self, phase: Phase, part: str) -> tuple[str, ...]:
        """The kinds of phases, as the work of a part is given, that a phase runs."""
        known = self.works.get(part, {})
        if phase.kind == "block":
            own = ("mix", "dispatch", "experts", "combine", "post")
            return tuple(kind for kind in own if kind in known)
        kinds = ("combine", "post") if phase.kind == "combine" and phase.joins else (phase.kind,)
        return tuple(kind for kind in kinds if kind in known)

    def _forward(self, part: str, kinds: Iterable[str], works: Iterable[Work]) -> _Timed:
        pieces = _in_pass("forward", (piece for work in works for piece in work.forward))
        return _Timed(pieces, tuple(self._calls(part, kinds, "forward")))

    def _replay(self, part: str, kinds: Iterable[str], works: Iterable[Work]) -> _Timed:
        regions = recomputed(self.plan.run.train.recompute)
        replayed = (work.forward if "block" in regions else work.replayed(regions) for work in works)
        pieces = _in_pass("forward", (piece for each in replayed for piece in each))
        return _Timed(pieces, tuple(self._calls(part, kinds, "recompute")))

    def _backward(self, part: str, kinds: Iterable[str], works: list[Work], phase: Phase) -> _Timed:
        pieces = _in_pass("backward", (piece for work in works for piece in work.backward))
        delayed = self.plan.schedule.delayed and bool(phase.buckets)
        if phase.grad_units and not delayed:
            pieces += _in_pass("wgrad", (piece for work in works for piece in work.wgrad))
        return _Timed(pieces, tuple(self._calls(part, kinds, "backward")))

    def _calls(self, part: str, kinds: Iterable[str], direction: str) -> Iterator[Call]:
        for kind in kinds:
            yield from self.calls.get((part, kind, direction), ())


def _in_pass(direction: Pass, pieces: Iterable[Piece]) -> tuple[tuple[Piece, Pass], ...]:
    return tuple((piece, direction) for piece in pieces)


def _bucket(name: str, works: Iterable[Work]) -> Sequence[Piece]:
    """The weight gradients of a bucket. Of two, `in` has those of the first products of experts."""
    pieces = [piece for work in works for piece in work.wgrad]
    if name.endswith(".experts.in"):
        pieces = pieces[:-1]
    elif name.endswith(".experts.down"):
        pieces = pieces[-1:]
    return pieces


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for name, seconds in pairs:
        total[name] += seconds
    return dict(total)
