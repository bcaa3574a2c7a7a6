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
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np

from braid.choices import Recompute, Strategy, recomputed
from braid.config import Mesh, Run
from braid.model import declaration
from braid.model.declaration import Form, form_of
from braid.nn.cost import Cost, Workload
from braid.nn.work import Work
from braid.pattern import Layout, Stage, cut_into
from braid.planning import modules
from braid.planning.divisibility import AxisSizes, axis_sizes
from braid.planning.estimate.rank import HeldModule, first_rank, model_of, workload_of
from braid.planning.estimate.weights import HeldUnit, held_units, part_of, unit_calls
from braid.planning.plan import Plan
from braid.schedule import Phase, Schedule, Stream
from braid.schedule.graph import LANGUAGE
from braid.timing.links import Span, span
from braid.timing.meter import ClusterMeter
from braid.timing.search.choices import MeshSizes
from braid.topology import Grid

FIRST = 0
"""The number of the brick before the blocks; those of blocks follow, then the last, then a copy of the
embedding that it may need."""

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


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
class Times:
    """The time of every brick of a mesh, for one micro-batch."""

    table: Array
    """Bricks by the columns of `Seconds`."""
    message: float
    """Seconds of a message between two stages."""


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


class Bricks:
    """The bricks of a run with one (tp, cp, ep, etp)."""

    def __init__(
        self,
        run: Run,
        layout: Layout,
        kinds: Sequence[int],
        sizes: MeshSizes,
        *,
        alone: bool,
        load: float = 1.0,
    ) -> None:
        """`kinds` has the brick of each block; `alone` says that one process holds everything, `load` how many
        times its share the slowest rank of the experts has."""
        self.run, self.alone, self.load, self.count = run, alone, load, max(kinds) + 2
        examples = {kinds.index(kind): kind for kind in dict.fromkeys(kinds)}
        singles = {*examples, 0, len(kinds) - 1}
        lengths = [
            (single, len(list(same))) for single, same in groupby(range(len(kinds)), singles.__contains__)
        ]
        pieces = [size for single, count in lengths for size in ([1] * count if single else [count])]
        self.layout = cut_into(layout, pieces)
        held = [
            segment
            for segment, each in enumerate(self.layout.segments)
            if len(each.blocks) == 1 and int(each.blocks[0].index) in singles
        ]
        self.plan = _plan(run, self.layout, held, sizes, alone=alone)
        self.brick_of = {f"blocks.{block}": kind for block, kind in examples.items()}
        self.model = model_of(self.plan, first_rank(self.plan, 0), "cuda")
        names = (name for name, _ in self.model.named_parameters())
        self.module = HeldModule(
            name=LANGUAGE, stage=0, segments=tuple(held), layout=self.layout, model=self.model,
            axes=self.plan.axes, strategy="all", workload=workload_of(self.plan, "cuda"),
            trained=frozenset(names),
        )  # fmt: skip
        self.last_part = f"mtp.{len(layout.mtp) - 1}" if layout.mtp else "head"
        self._form = form_of(run.model, run.train.dtype)
        self._work: dict[int, dict[str, dict[str, _Work]]] = {}
        self._calls: dict[
            tuple[int, tuple[Recompute, ...], tuple[Span, ...]], dict[tuple[str, str, str], float]
        ] = {}
        self._costs: dict[tuple[int, tuple[Recompute, ...], bool], dict[str, Cost]] = {}
        self._usage: dict[tuple[int, tuple[Recompute, ...], bool], Usage] = {}
        self._least: dict[tuple[int, Form, bool], Array] = {}
        self._phases: dict[Form, list[tuple[int, Phase]]] = {}
        self._units: dict[tuple[int, ...], list[tuple[int, HeldUnit]]] = {}

    # -------------------------------------------------------------------------------------- seconds

    def times(
        self, rows: int, recompute: tuple[Recompute, ...], form: Form, delayed: bool, meter: ClusterMeter
    ) -> Times:
        """The times of all bricks; `form` says how blocks are split into phases."""
        calls = self._calls_of(rows, recompute, meter)
        table = self._table(rows, recompute, form, delayed, meter, calls)
        return Times(table=table, message=self._message(rows, meter))

    def least_times(self, rows: int, form: Form, delayed: bool, meter: ClusterMeter) -> Array:
        """The times of all bricks without collectives and recomputation: the same for all meshes."""
        key = (rows, form, delayed)
        if key not in self._least:
            self._least[key] = self._table(rows, (), form, delayed, meter, {})
        return self._least[key]

    def _table(
        self,
        rows: int,
        recompute: tuple[Recompute, ...],
        form: Form,
        delayed: bool,
        meter: ClusterMeter,
        calls: Mapping[tuple[str, str, str], float],
    ) -> Array:
        table, names = np.zeros((self.count + 1, len(AT))), recomputed(recompute)
        work = self._seconds_of(rows, meter)
        for brick, phase in self.phases(form):
            own, row = part_of(phase), table[brick]
            inner = own if phase.depth is None or phase.block is None else f"{own}.blocks.{phase.block}"
            kinds = _kinds(phase, work[inner])
            other = phase.stream is Stream.COMMUNICATION
            forward = AT.exchange_forward if other else AT.forward
            backward = AT.exchange_backward if other else AT.backward
            replay = AT.exchange_replay if other else AT.replay
            later = delayed and bool(phase.buckets)
            wgrad = AT.wgrad if later and not other else backward
            again = phase.replayed_units(names) is not None
            row[AT.ops] += 2 + later + again
            for kind in kinds:
                each = work[inner][kind]
                row[forward] += each.forward[0] + calls.get((own, kind, "forward"), 0.0)
                row[backward] += each.backward[0] + calls.get((own, kind, "backward"), 0.0)
                row[wgrad] += each.wgrad[0]
                row[AT.launches] += each.forward[1] + each.backward[1] + each.wgrad[1]
                if again:
                    seconds, launches = each.replayed(names)
                    row[replay] += seconds + calls.get((own, kind, "recompute"), 0.0)
                    row[AT.launches] += launches
        return table

    def form(self, *, fine: bool, posts: bool) -> Form:
        """How blocks are split into phases."""
        return replace(self._form, fine=fine, posts=posts, late_weights=fine and self.run.mesh.late_weights)

    def phases(self, form: Form) -> list[tuple[int, Phase]]:
        """The phases of all bricks."""
        if form not in self._phases:
            chains = declaration.chains(self.layout, form)
            found = []
            for segment in self.module.segments:
                for phase in chains[segment].phases:
                    brick = self._brick(phase)
                    if brick is not None:
                        found.append((brick, phase))
            self._phases[form] = found
        return self._phases[form]

    def _brick(self, phase: Phase) -> int | None:
        """The brick of a phase; None for that of a block which another one stands for."""
        if phase.depth is not None or phase.kind in ("final_norm", "head"):
            return self.count - 1
        if phase.block is None:
            return FIRST
        return self.brick_of.get(f"blocks.{phase.block}")

    def _message(self, rows: int, meter: ClusterMeter) -> float:
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
            self._work[rows] = {
                part: {kind: _Work(work, meter) for kind, work in kinds.items()}
                for part, kinds in works.items()
            }
        return self._work[rows]

    def costs(self, rows: int, recompute: tuple[Recompute, ...], fine: bool) -> dict[str, Cost]:
        key = (rows, recompute, fine)
        if key not in self._costs:
            workload = replace(self._workload(rows), recompute=recomputed(recompute), fine=fine)
            self._costs[key] = self.model.costs(workload)
        return self._costs[key]

    def _calls_of(
        self, rows: int, recompute: tuple[Recompute, ...], meter: ClusterMeter
    ) -> dict[tuple[str, str, str], float]:
        """Seconds of the collectives of each part, by kind of phase and direction. Meshes share them if their
        groups lie on nodes alike."""
        calls = [
            (part, call) for part, cost in self.costs(rows, recompute, False).items() for call in cost.calls
        ]
        families = dict.fromkeys(call.family for _, call in calls)
        spans = tuple(span(meter.plan.grid, family, meter.cluster.domain) for family in families)
        key = (rows, recompute, spans)
        if key not in self._calls:
            found: dict[tuple[str, str, str], float] = defaultdict(float)
            for part, call in calls:
                found[part, call.phase, call.direction] += call.times * meter.call(call, LANGUAGE)
            self._calls[key] = dict(found)
        return self._calls[key]

    # --------------------------------------------------------------------------------------- memory

    def usage(self, rows: int, recompute: tuple[Recompute, ...], fine: bool) -> Usage:
        """What a micro-batch keeps."""
        key = (rows, recompute, fine)
        if key not in self._usage:
            kept, passing, by_part = (np.zeros(self.count + 1) for _ in range(3))
            costs = self.costs(*key)
            for part, cost in costs.items():
                brick = self._brick_of_part(part)
                if brick is not None:
                    kept[brick] += cost.kept
                    passing[brick], by_part[brick] = cost.passing, cost.kept
            shared = costs["positions"].kept
            self._usage[key] = Usage(kept=kept, passing=passing, kept_by_part=by_part, shared=shared)
        return self._usage[key]

    def _brick_of_part(self, part: str) -> int | None:
        if part == "embedding":
            return FIRST
        if part == "head" or part.startswith("mtp."):
            return self.count - 1
        return self.brick_of.get(part)

    def weights(self, axes: AxisSizes, strategy: Strategy, meter: ClusterMeter) -> Weights:
        """The weights of all bricks on a mesh with these axes."""
        table = np.zeros((10, self.count + 1))
        for brick, unit in self._units_of(axes, strategy):
            main, narrow = max(unit.stored, 4), unit.stored < 4
            copies = 3 if self.alone and narrow else 2
            extra = unit.stored if self.alone and narrow else 0
            seconds = dict.fromkeys(("all_gather", "reduce"), 0.0)
            for call in () if self.alone else unit_calls(unit):
                seconds["all_gather" if call.op == "all_gather" else "reduce"] += call.times * meter.call(
                    call, LANGUAGE
                )
            row = table[:, brick]
            row += (
                unit.kept_bytes + copies * unit.kept_learned * main,
                0 if self.alone else unit.gathered_bytes,
                0,
                unit.kept_learned * (main if self.alone else unit.stored),
                unit.gathered_learned * unit.stored,
                seconds["all_gather"],
                seconds["reduce"],
                unit.kept_learned * (8 * main + extra),
                0,
                0,
            )
            if not self.alone:
                row[2] = max(row[2], unit.gathered_bytes)
            if not self.alone and (brick != self.count - 1 or unit.part == self.last_part):
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
            self._units[key] = list(self._by_brick(held_units(module, self.plan)))
        return self._units[key]

    def _by_brick(self, units: Sequence[HeldUnit]) -> Iterator[tuple[int, HeldUnit]]:
        for unit in units:
            if unit.name == declaration.EMBEDDING:
                yield FIRST, unit
                if self.run.model.tied or self.layout.mtp:
                    yield self.count, unit
            elif unit.name.startswith("stack.blocks."):
                brick = self.brick_of.get("blocks." + unit.name.split(".")[2])
                if brick is not None:
                    yield brick, unit
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


def _plan(run: Run, layout: Layout, held: Sequence[int], sizes: MeshSizes, *, alone: bool) -> Plan:
    """What the model of a rank that holds these segments is built from. Its schedule has phases, but no ops."""
    # Ranks of one stage: as few as the axes allow, but several if the run has several.
    model_ranks, experts = sizes.tp * sizes.cp, sizes.ep * sizes.etp
    world = model_ranks if model_ranks % experts == 0 else model_ranks * experts
    world = world if alone else 2 * world
    mesh = Mesh(tp=sizes.tp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp, dispatcher=run.mesh.dispatcher)
    axes, form = axis_sizes(mesh, world), form_of(run.model, run.train.dtype)
    train = replace(run.train, micro_batches=1, batch_samples=axes.dp, recompute=())
    stage = Stage(rank=0, segments=tuple(layout.segments[segment] for segment in held))
    holder = tuple(0 if segment in held else 1 for segment in range(len(layout.segments)))
    schedule = Schedule(
        name="bricks", micro_batches=1, holder=holder, backward=True, live_bound=(1, 1), ops=((), ()),
        phases=tuple(chain.phases for chain in declaration.chains(layout, form)),
    )  # fmt: skip
    return Plan(
        run=replace(run, mesh=mesh, train=train), world=world, axes=axes, grid=modules.grid_of(mesh, world),
        layout=layout, stages=(stage,), units=declaration.units(layout, form), schedule=schedule,
        micro_batch_samples=axes.dp, step_tokens=axes.dp * run.data.sequence_tokens,
    )  # fmt: skip


def kinds_of(run: Run, layout: Layout) -> list[int]:
    """The brick of each block: blocks that have the same work, memory and weights have the same."""
    everything = MeshSizes(1, 1, 1, 1, 1)
    plan = _plan(run, layout, range(len(layout.segments)), everything, alone=True)
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
        form = (works[part], costs[part], weights.get(part, []), [layer.kind for layer in block.layers])
        if form not in known:
            known.append(form)
        found.append(known.index(form) + 1)
    return found


def meter_on(bricks: Bricks, base: ClusterMeter, grid: Grid) -> ClusterMeter:
    """The meter of a mesh with this grid. All meters share the pieces that they have looked up."""
    return ClusterMeter(replace(bricks.plan, grid=grid), base.cluster, base.calibration, known=base.known)
