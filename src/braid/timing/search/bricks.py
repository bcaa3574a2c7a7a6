"""What a layer takes, shared by all candidates that have it in the same sizes.

A model is made of a few **bricks**: what comes before the blocks, each different block once, and what comes
behind them. Their work depends on tp, cp, ep, etp and rows, their weights on the ranks that share them. So one
small model, with one block of each kind, is built for each (tp, cp, ep, etp), and serves all candidates.

Everything here comes from the same functions that `estimate` and `predict` use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from braid.choices import Recompute, Strategy, recomputed
from braid.config import Mesh, Run
from braid.model import declaration
from braid.model.declaration import form_of
from braid.nn.cost import Call, Cost, Workload
from braid.nn.work import Work
from braid.pattern import Layout, Stage, parse
from braid.planning import modules
from braid.planning.divisibility import AxisSizes, axis_sizes
from braid.planning.estimate.rank import HeldModule, first_rank, model_of, workload_of
from braid.planning.estimate.weights import (
    HeldUnit,
    UnitWeights,
    held_units,
    muon_of,
    part_of,
    unit_calls,
    unit_weights,
)
from braid.planning.plan import Plan
from braid.schedule import Phase, Schedule, Stream
from braid.schedule.graph import LANGUAGE
from braid.schedule.phases import Unit
from braid.timing.links import Span, span
from braid.timing.meter import ClusterMeter
from braid.timing.search.choices import MeshSizes
from braid.topology import Grid

FIRST = 0
"""The number of the brick before the blocks; those of blocks follow, then the last, then a copy of the
embedding that it may need."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Phases = tuple[Phase, ...]


class Seconds(NamedTuple):
    """Columns of the time of a brick in a micro-batch: on the compute stream, and on that of exchanges."""

    forward: int = 0
    backward: int = 1
    wgrad: int = 2
    """Delayed weight gradients; others count as backward."""
    replay: int = 3
    exchange_forward: int = 4
    exchange_backward: int = 5
    exchange_replay: int = 6
    launches: int = 7
    """Kernels that the host starts."""
    ops: int = 8


AT = Seconds()


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes and seconds of the weights of every brick of a mesh, one number for each brick."""

    steady: Array
    """Weights and optimizer between steps."""
    gathered: Array
    largest: Array
    """The largest unit."""
    sharded_gradients: Array
    """Bytes of gradients as the optimizer gets them."""
    whole_gradients: Array
    """Bytes before they are reduced."""
    gather: Array
    """Seconds to gather all units once."""
    reduce: Array
    """Seconds to reduce all gradients once."""
    updated: Array
    """Bytes that the optimizer moves."""
    reducing: Array
    """Bytes of a gradient while it is reduced; of the last brick, that of its last part."""
    reducing_whole: Array
    """The same beside gradients that are kept whole."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes of the activations of every brick for one micro-batch."""

    kept: Array
    passing: Array
    """More than that at the peak of backward; of the last brick, that of its last part."""
    kept_by_part: Array
    """As `kept`; of the last brick, that of its last part."""
    shared: float
    """What all bricks share."""


class Split(NamedTuple):
    """How blocks are split into phases."""

    fine: bool
    posts: bool


class _Slot(NamedTuple):
    """A phase of a brick, and what it runs."""

    brick: int
    phase: Phase
    part: str
    """As `costs` names it."""
    inner: str
    """As `works` names it."""
    kinds: tuple[str, ...]
    columns: tuple[int, int, int]


class Examples:
    """One block of each kind of a run: what the bricks of all sizes are built from."""

    def __init__(self, run: Run, layout: Layout) -> None:
        kinds = kinds_of(run, layout)
        self.run, self.kinds, self.count = run, tuple(kinds), max(kinds) + 2
        """`kinds` has the brick of each block; `count` bricks, and a copy of the embedding."""
        blocks = [layout.blocks[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
        depths = "".join(f"/{depth}" for depth in layout.mtp)
        # Each block in a segment of its own, and what comes behind them alone.
        self.layout = parse("".join(f"{block}|" for block in blocks) + depths)
        self.last_part = f"mtp.{len(layout.mtp) - 1}" if layout.mtp else "head"
        self._form = form_of(run.model, run.train.dtype)
        self.units = declaration.units(self.layout, self._form)
        self._phases: dict[Split, tuple[Phases, ...]] = {}

    def phases(self, split: Split) -> tuple[Phases, ...]:
        """The phases of each segment."""
        if split not in self._phases:
            late = split.fine and self.run.mesh.late_weights
            form = replace(self._form, fine=split.fine, posts=split.posts, late_weights=late)
            self._phases[split] = tuple(chain.phases for chain in declaration.chains(self.layout, form))
        return self._phases[split]

    def plain_phases(self) -> tuple[Phases, ...]:
        return self.phases(Split(fine=False, posts=False))

    def brick(self, phase: Phase) -> int:
        if phase.depth is not None or phase.kind in ("final_norm", "head"):
            return self.count - 1
        return FIRST if phase.block is None else phase.block + 1

    def brick_of_part(self, part: str) -> int | None:
        """The brick of a part of the model; None for the positions, which all share."""
        if part.startswith("blocks."):
            return int(part.removeprefix("blocks.")) + 1
        return None if part == "positions" else FIRST if part == "embedding" else self.count - 1


class Bricks:
    """The bricks of a run with one (tp, cp, ep, etp)."""

    def __init__(self, examples: Examples, sizes: MeshSizes, *, alone: bool, load: float = 1.0) -> None:
        """`alone` says that one process holds everything, `load` how many times its share the slowest rank of
        the experts has."""
        self.examples, self.alone, self.load, self.count = examples, alone, load, examples.count
        self.plan = _plan(examples.run, examples.layout, examples.units, examples.plain_phases(), sizes, alone)
        self.model = model_of(self.plan, first_rank(self.plan, 0), "cuda")
        names = (name for name, _ in self.model.named_parameters())
        self.module = HeldModule(
            name=LANGUAGE, stage=0, segments=tuple(range(len(examples.layout.segments))),
            layers=str(examples.layout), model=self.model, axes=self.plan.axes, strategy="all",
            workload=workload_of(self.plan, "cuda"), trained=frozenset(names),
        )  # fmt: skip
        self._work: dict[int, dict[str, dict[str, _Work]]] = {}
        self._slots: dict[Split, list[_Slot]] = {}
        self._tables: dict[tuple[int, Split, bool], Array] = {}
        self._replays: dict[tuple[int, Split, tuple[Recompute, ...]], Array] = {}
        self._call_tables: dict[tuple[int, Split, tuple[Recompute, ...], tuple[Span, ...]], Array] = {}
        self._calls: dict[
            tuple[int, tuple[Recompute, ...]], tuple[list[tuple[str, Call]], tuple[str, ...]]
        ] = {}
        self._spent: dict[
            tuple[int, tuple[Recompute, ...], tuple[Span, ...]], dict[tuple[str, str, str], float]
        ] = {}
        self._costs: dict[tuple[int, tuple[Recompute, ...], bool], dict[str, Cost]] = {}
        self._usage: dict[tuple[int, tuple[Recompute, ...], bool], Usage] = {}
        self._weights: list[UnitWeights] | None = None
        self._by_muon: frozenset[str] = frozenset()
        self._units: dict[tuple[int, ...], list[tuple[int, HeldUnit]]] = {}

    # -------------------------------------------------------------------------------------- seconds

    def work_table(self, rows: int, split: Split, delayed: bool, meter: ClusterMeter) -> Array:
        """The times of all bricks without collectives and recomputation: the same for all meshes. `split` says
        how blocks are split into phases, `delayed` that weight gradients wait."""
        key = (rows, split, delayed)
        if key not in self._tables:
            self._tables[key] = self._work_table(rows, split, delayed, meter)
        return self._tables[key]

    def _work_table(self, rows: int, split: Split, delayed: bool, meter: ClusterMeter) -> Array:
        works = self._seconds_of(rows, meter)
        table = np.zeros((self.count + 1, len(AT)))
        for slot in self._slots_of(split, works):
            row, (forward, backward, _) = table[slot.brick], slot.columns
            later = delayed and bool(slot.phase.buckets)
            wgrad = AT.wgrad if later and backward == AT.backward else backward
            row[AT.ops] += 2 + later
            for kind in slot.kinds:
                each = works[slot.inner][kind]
                row[forward] += each.forward[0]
                row[backward] += each.backward[0]
                row[wgrad] += each.wgrad[0]
                row[AT.launches] += each.forward[1] + each.backward[1] + each.wgrad[1]
        return table

    def replay_table(
        self, rows: int, split: Split, recompute: tuple[Recompute, ...], meter: ClusterMeter
    ) -> Array:
        """What recomputation adds to it, without collectives."""
        key = (rows, split, recompute)
        if key not in self._replays:
            table, names = np.zeros((self.count + 1, len(AT))), recomputed(recompute)
            works = self._seconds_of(rows, meter) if names else {}
            for slot in self._slots_of(split, works) if names else ():
                if slot.phase.replayed_units(names) is None:
                    continue
                table[slot.brick, AT.ops] += 1
                for kind in slot.kinds:
                    seconds, launches = works[slot.inner][kind].replayed(names)
                    table[slot.brick, slot.columns[2]] += seconds
                    table[slot.brick, AT.launches] += launches
            self._replays[key] = table
        return self._replays[key]

    def call_table(
        self,
        rows: int,
        split: Split,
        recompute: tuple[Recompute, ...],
        meter: ClusterMeter,
        known: dict[str, Span],
    ) -> Array:
        """What collectives add to both. Meshes share it if their groups lie on nodes alike; `known` has the
        spans of a mesh that were asked for before."""
        _, families = self._calls_of(rows, recompute)
        for family in families:
            if family not in known:
                known[family] = span(meter.plan.grid, family, meter.cluster.domain)
        spans = tuple(known[family] for family in families)
        key = (rows, split, recompute, spans)
        if key not in self._call_tables:
            self._call_tables[key] = self._call_table(rows, split, recompute, meter, spans)
        return self._call_tables[key]

    def _call_table(
        self,
        rows: int,
        split: Split,
        recompute: tuple[Recompute, ...],
        meter: ClusterMeter,
        spans: tuple[Span, ...],
    ) -> Array:
        seconds = self._call_seconds(rows, recompute, meter, spans)
        table, names = np.zeros((self.count + 1, len(AT))), recomputed(recompute)
        for slot in self._slots_of(split, self._seconds_of(rows, meter)):
            row, (forward, backward, replay) = table[slot.brick], slot.columns
            again = bool(names) and slot.phase.replayed_units(names) is not None
            for kind in slot.kinds:
                row[forward] += seconds.get((slot.part, kind, "forward"), 0.0)
                row[backward] += seconds.get((slot.part, kind, "backward"), 0.0)
                if again:
                    row[replay] += seconds.get((slot.part, kind, "recompute"), 0.0)
        return table

    def _call_seconds(
        self, rows: int, recompute: tuple[Recompute, ...], meter: ClusterMeter, spans: tuple[Span, ...]
    ) -> dict[tuple[str, str, str], float]:
        """The seconds of the collectives of each part, by kind of phase and direction."""
        key = (rows, recompute, spans)
        if key not in self._spent:
            seconds: dict[tuple[str, str, str], float] = defaultdict(float)
            for part, call in self._calls_of(rows, recompute)[0]:
                seconds[part, call.phase, call.direction] += call.times * meter.call(call, LANGUAGE)
            self._spent[key] = seconds
        return self._spent[key]

    def _calls_of(
        self, rows: int, recompute: tuple[Recompute, ...]
    ) -> tuple[list[tuple[str, Call]], tuple[str, ...]]:
        """The collectives of each part, and the families of their ranks."""
        key = (rows, recompute)
        if key not in self._calls:
            costs = self.costs(rows, recompute, False)
            calls = [(part, call) for part, cost in costs.items() for call in cost.calls]
            self._calls[key] = calls, tuple(dict.fromkeys(call.family for _, call in calls))
        return self._calls[key]

    def _slots_of(self, split: Split, works: Mapping[str, Mapping[str, _Work]]) -> list[_Slot]:
        """The phases of all bricks; `works` has the kinds of each part, which are the same for all rows."""
        if split not in self._slots:
            self._slots[split] = [
                self._slot(phase, works) for phases in self.examples.phases(split) for phase in phases
            ]
        return self._slots[split]

    def _slot(self, phase: Phase, works: Mapping[str, Mapping[str, _Work]]) -> _Slot:
        part = part_of(phase)
        inner = part if phase.depth is None or phase.block is None else f"{part}.blocks.{phase.block}"
        brick = self.examples.brick(phase)
        return _Slot(brick, phase, part, inner, tuple(_kinds(phase, works[inner])), _columns(phase))

    def message(self, rows: int, meter: ClusterMeter) -> float:
        """Seconds of a message between two stages."""
        grid = meter.plan.grid
        line = grid.group_of(grid.ranks[0], "pp")
        if len(line) == 1:
            return 0.0
        workload = self._workload(rows)
        tokens = workload.local_tokens(self.model.groups.tp_cp)
        size = tokens * prod(self.model.shape.stream) * workload.narrow
        ends = [(stage, stage + 1) for stage in range(len(line) - 1)]
        return min(meter.message(size, LANGUAGE, pair) for pair in (ends[0], ends[-1], ends[len(ends) // 2]))

    def _workload(self, rows: int) -> Workload:
        return replace(self.module.workload, rows=rows)

    def _seconds_of(self, rows: int, meter: ClusterMeter) -> dict[str, dict[str, _Work]]:
        """The work of each part by kind of phase; the same for all meshes."""
        if rows not in self._work:
            works = self.model.works(self._workload(rows), self.load)
            # Equal blocks have one and the same.
            known = {
                id(kinds): {kind: _Work(work, meter) for kind, work in kinds.items()}
                for kinds in works.values()
            }
            self._work[rows] = {part: known[id(kinds)] for part, kinds in works.items()}
        return self._work[rows]

    def costs(self, rows: int, recompute: tuple[Recompute, ...], fine: bool) -> dict[str, Cost]:
        key = (rows, recompute, fine)
        if key not in self._costs:
            workload = replace(self._workload(rows), recompute=recomputed(recompute), fine=fine)
            self._costs[key] = self.model.costs(workload)
        return self._costs[key]

    # --------------------------------------------------------------------------------------- memory

    def usage(self, rows: int, recompute: tuple[Recompute, ...], fine: bool) -> Usage:
        """What a micro-batch keeps."""
        key = (rows, recompute, fine)
        if key not in self._usage:
            kept, passing, by_part = (np.zeros(self.count + 1) for _ in range(3))
            costs = self.costs(*key)
            for part, cost in costs.items():
                brick = self.examples.brick_of_part(part)
                if brick is not None:
                    kept[brick] += cost.kept
                    passing[brick], by_part[brick] = cost.passing, cost.kept
            shared = costs["positions"].kept
            self._usage[key] = Usage(kept=kept, passing=passing, kept_by_part=by_part, shared=shared)
        return self._usage[key]

    def weights(self, axes: AxisSizes, strategy: Strategy, meter: ClusterMeter) -> Weights:
        """The weights of all bricks on a mesh with these axes."""
        table = np.zeros((10, self.count + 1))
        for brick, unit in self._units_of(axes, strategy):
            main, narrow = max(unit.stored, 4), unit.stored < 4
            optimizer = unit.kept_moments + (unit.kept_learned if self.alone and narrow else 0)
            extra = unit.stored if self.alone and narrow else 0
            seconds = dict.fromkeys(("all_gather", "reduce"), 0.0)
            for call in () if self.alone else unit_calls(unit):
                seconds["all_gather" if call.op == "all_gather" else "reduce"] += call.times * meter.call(
                    call, LANGUAGE
                )
            row = table[:, brick]
            row += (
                unit.kept_bytes + optimizer * main,
                0 if self.alone else unit.gathered_bytes,
                0,
                unit.kept_learned * (main if self.alone else unit.stored),
                unit.gathered_learned * unit.stored,
                seconds["all_gather"],
                seconds["reduce"],
                unit.kept_learned * (4 * main + extra) + 2 * unit.kept_moments * main,
                0,
                0,
            )
            if not self.alone:
                row[2] = max(row[2], unit.gathered_bytes)
            if not self.alone and (brick != self.count - 1 or unit.part == self.examples.last_part):
                own = unit.computed if not unit.in_place else unit.stored
                row[8] = max(row[8], unit.gathered_learned * (own + unit.stored))
                own = 0 if unit.in_place else unit.computed
                row[9] = max(row[9], unit.gathered_learned * (own + unit.stored))
        return Weights(
            steady=table[0], gathered=table[1], largest=table[2], sharded_gradients=table[3],
            whole_gradients=table[4], gather=table[5], reduce=table[6], updated=table[7],
            reducing=table[8], reducing_whole=table[9],
        )  # fmt: skip

    def _units_of(self, axes: AxisSizes, strategy: Strategy) -> list[tuple[int, HeldUnit]]:
        key = (axes.dp * axes.cp, axes.edp, axes.dense_copies, axes.expert_copies)
        if key not in self._units:
            module = replace(self.module, axes=axes, strategy=strategy)
            if self._weights is None:
                self._weights = unit_weights(module, self.plan)
                self._by_muon = muon_of(module, self.plan).parameters
            units = held_units(module, self.plan, self._by_muon, weights=self._weights)
            self._units[key] = list(self._by_brick(units))
        return self._units[key]

    def _by_brick(self, units: Sequence[HeldUnit]) -> Iterator[tuple[int, HeldUnit]]:
        for unit in units:
            if unit.name == declaration.EMBEDDING:
                yield FIRST, unit
                if self.examples.run.model.tied or self.examples.layout.mtp:
                    yield self.count, unit
            elif unit.name.startswith("stack.blocks."):
                yield int(unit.name.split(".")[2]) + 1, unit
            else:
                yield self.count - 1, unit


class _Work:
    """The seconds of a piece of work, and the kernels that the host starts for it."""

    def __init__(self, work: Work, meter: ClusterMeter) -> None:
        self.forward, self.backward, self.wgrad = (0.0, 0), (0.0, 0), (0.0, 0)
        self.regions: dict[str, tuple[float, int]] = {}
        """Those of forward, by the region that replays them."""
        for piece in work.forward:
            added = meter.piece(piece, "forward")[1], piece.launches
            self.forward = _sum(self.forward, added)
            self.regions[piece.region] = _sum(self.regions.get(piece.region, (0.0, 0)), added)
        for piece in work.backward:
            self.backward = _sum(self.backward, (meter.piece(piece, "backward")[1], piece.launches))
        for piece in work.wgrad:
            self.wgrad = _sum(self.wgrad, (meter.piece(piece, "wgrad")[1], piece.launches))

    def replayed(self, names: frozenset[str]) -> tuple[float, int]:
        """What runs again if these regions are recomputed."""
        if "block" in names:
            return self.forward
        total = (0.0, 0)
        for name in names & self.regions.keys():
            total = _sum(total, self.regions[name])
        return total


def _sum(first: tuple[float, int], second: tuple[float, int]) -> tuple[float, int]:
    return first[0] + second[0], first[1] + second[1]


def _kinds(phase: Phase, known: Mapping[str, _Work]) -> list[str]:
    """The kinds of phases that a phase runs, as the work of its part is given."""
    if phase.kind == "block":
        return [kind for kind in ("mix", "dispatch", "experts", "combine", "post") if kind in known]
    kinds = ("combine", "post") if phase.kind == "combine" and phase.joins else (phase.kind,)
    return [kind for kind in kinds if kind in known]


def _columns(phase: Phase) -> tuple[int, int, int]:
    """Where the forward, the backward and the replay of a phase count."""
    if phase.stream is Stream.COMMUNICATION:
        return AT.exchange_forward, AT.exchange_backward, AT.exchange_replay
    return AT.forward, AT.backward, AT.replay


def _plan(
    run: Run, layout: Layout, units: tuple[Unit, ...], phases: Sequence[Phases], sizes: MeshSizes, alone: bool
) -> Plan:
    """What the model of a rank that holds a whole layout is built from. Its schedule has phases, but no ops."""
    # Ranks of one stage: as few as the axes allow, but several if the run has several.
    model_ranks, experts = sizes.tp * sizes.cp, sizes.ep * sizes.etp
    world = model_ranks if model_ranks % experts == 0 else model_ranks * experts
    world = world if alone else 2 * world
    mesh = Mesh(tp=sizes.tp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp, dispatcher=run.mesh.dispatcher)
    axes = axis_sizes(mesh, world)
    train = replace(run.train, micro_batches=1, batch_samples=axes.dp, recompute=())
    schedule = Schedule(
        name="bricks", micro_batches=1, holder=(0,) * len(layout.segments), backward=True, live_bound=(1,),
        ops=((),), phases=tuple(phases),
    )  # fmt: skip
    return Plan(
        run=replace(run, mesh=mesh, train=train), world=world, axes=axes, grid=modules.grid_of(mesh, world),
        layout=layout, stages=(Stage(rank=0, segments=layout.segments),), units=units, schedule=schedule,
        micro_batch_samples=axes.dp, step_tokens=axes.dp * run.data.sequence_tokens,
    )  # fmt: skip


def kinds_of(run: Run, layout: Layout) -> list[int]:
    """The brick of each block: blocks that have the same work, memory and weights have the same."""
    form = form_of(run.model, run.train.dtype)
    phases = [chain.phases for chain in declaration.chains(layout, form)]
    plan = _plan(run, layout, declaration.units(layout, form), phases, MeshSizes(1, 1, 1, 1, 1), alone=True)
    model, workload = model_of(plan, first_rank(plan, 0), "cuda"), workload_of(plan, "cuda")
    works, costs = model.works(workload), model.costs(workload)
    weights: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("stack.blocks."):
            _, _, number, own = name.split(".", 3)
            weights.setdefault(f"blocks.{number}", []).append((own, tuple(parameter.shape)))
    known: list[tuple[object, ...]] = []
    found = []
    for block in layout.blocks:
        part = f"blocks.{block.index}"
        facts = (works[part], costs[part], weights.get(part, []), [layer.kind for layer in block.layers])
        if facts not in known:
            known.append(facts)
        found.append(known.index(facts) + 1)
    return found


def meter_on(bricks: Bricks, base: ClusterMeter, grid: Grid) -> ClusterMeter:
    """The meter of a mesh with this grid. All meters share the pieces that they have looked up."""
    return replace(base, plan=replace(bricks.plan, grid=grid))
