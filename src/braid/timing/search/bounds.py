"""Bounds of candidates, and the closed form that ranks them: sums over bricks in place of op lists.

    memory >= weights, optimizer, gathered weights, gradients, and what live micro-batches keep
    time   >= the turns of the pipeline, with weights at hand and exchanges hidden as far as they can be;
              all collectives of weights one after another; what the host takes; then the optimizer

The closed form adds waits for weights, and exchanges that a pair does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from braid.choices import Recompute, Strategy
from braid.pattern import Layout
from braid.planning.divisibility import AxisSizes
from braid.planning.modules import grid_of
from braid.timing.links import Span
from braid.timing.meter import ClusterMeter
from braid.timing.search.bricks import AT, FIRST, Array, Bricks, Split, Weights, meter_on
from braid.timing.search.choices import Choice, MeshSizes, Shape, Space
from braid.timing.search.pipeline import Segments, counted, holder_of, replay, turns

KEPT_GATHERED = 2
"""A segment of at most so many blocks may keep its weights from one turn to the next."""
GROWTH = 0.99
"""The share of the growth of short steps by which a long one grows at least."""
PAIR_LOSS = 0.1
"""The share of the exchanges of a pair that is exposed, in the closed form."""


Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which bricks the segments and ranks of a pipeline have."""

    holder: tuple[int, ...]
    """The rank of each segment."""
    segments: Array
    """How often each segment has each brick."""
    ranks: Array
    """The same of ranks; a rank with both ends of a model has no copy of the embedding."""
    trailing: tuple[int, ...]
    """The last brick of each segment."""
    blocks: tuple[tuple[int, ...], ...]
    """The bricks of each segment, in order."""
    first: Indices
    """The first segment of each rank."""
    late: Array
    """How often each brick is one whose weights are not gathered before the first micro-batch reaches its
    segment: all but the first of a segment, and but the first segment, which begins the step."""


Row = tuple[Shape, int]
"""A shape and a number of micro-batches."""
Bounded = tuple[float, Row]
"""A lower bound of the time of a row's candidates, and the row."""


class Alive(NamedTuple):
    """What may be alive in a pipeline at most, in as many cases as there are: when a backward begins."""

    counts: Array
    """Micro-batches of each segment."""
    rank: Indices
    segment: Indices
    """The segment whose backward begins."""


class Pipelines:
    """The cuts and orders of all pipelines of a run, for all meshes."""

    def __init__(self, space: Space, kinds: Sequence[int]) -> None:
        """`kinds` has the brick of each block."""
        self.space, self.kinds, self.count = space, kinds, max(kinds) + 2
        self._cuts: dict[tuple[int, int, bool], Cut] = {}
        self._alive: dict[tuple[int, Shape, int], Alive] = {}

    def cut(self, pp: int, shape: Shape) -> Cut:
        key = (pp, shape.segments, shape.dual)
        if key not in self._cuts:
            layout = self.space.cut(pp, shape)
            assert layout is not None
            self._cuts[key] = self._made(layout, holder_of(pp, shape), pp)
        return self._cuts[key]

    def _made(self, layout: Layout, holder: tuple[int, ...], pp: int) -> Cut:
        last = self.count - 1
        blocks = tuple(
            tuple(self.kinds[int(block.index)] for block in segment.blocks) for segment in layout.segments
        )
        segments = np.zeros((len(blocks), self.count + 1))
        for number, own in enumerate(blocks):
            for brick in own:
                segments[number, brick] += 1
        segments[0, FIRST] += 1
        segments[-1, last] += 1
        ranks = np.zeros((pp, self.count + 1))
        for number, rank in enumerate(holder):
            ranks[rank] += segments[number]
        if holder[0] != holder[-1]:
            ranks[holder[-1], last + 1] = 1
        trailing = [own[-1] if own else FIRST for own in blocks]
        trailing[-1] = last
        late = segments[1:].sum(axis=0)
        for own in blocks[1:]:
            late[own[0] if own else last] -= 1
        return Cut(
            holder=holder, segments=segments, ranks=ranks, trailing=tuple(trailing), blocks=blocks,
            first=np.array([holder.index(rank) for rank in range(pp)]), late=late,
        )  # fmt: skip

    def alive(self, pp: int, shape: Shape, micro_batches: int) -> Alive:
        key = (pp, shape, counted(micro_batches, pp))
        if key not in self._alive:
            order = turns(*key)
            found = [(rank, each) for rank, own_live in enumerate(order.live) for each in own_live]
            counts = np.zeros((len(found), len(order.holder)))
            for number, (_, each) in enumerate(found):
                for segment, count in each.counts.items():
                    counts[number, segment] = count
            ranks = np.array([rank for rank, _ in found])
            self._alive[key] = Alive(counts, ranks, np.array([each.segment for _, each in found]))
        return self._alive[key]


class _Held(NamedTuple):
    """The weights of the ranks of a pipeline: bytes of each rank, and seconds of its collectives."""

    steady: Array
    sharded_gradients: Array
    whole_gradients: Array
    gathered: Array
    entering: Array
    """The part of it that is the embedding's."""
    largest: Array
    gather: Array
    reduce: Array
    again: Array
    """By segment: seconds to gather its weights once more than they are kept for the next turn."""
    whole: Array
    """By segment: seconds to gather its weights."""
    update: float
    """Seconds of the optimizer."""


class MeshBounds:
    """Bounds of all candidates of one mesh. Those of one shape and number of micro-batches are arrays over
    levels of recomputation and sharding strategies, which cost little more than one of them."""

    def __init__(
        self, pipelines: Pipelines, sizes: MeshSizes, axes: AxisSizes, bricks: Bricks, base: ClusterMeter
    ) -> None:
        self.pipelines, self.sizes, self.axes, self.bricks = pipelines, sizes, axes, bricks
        space = self.space = pipelines.space
        self.counts, self.shapes = space.micro_batches(axes), space.shapes(sizes)
        self.recomputes, self.shards = space.recomputes_of(sizes), space.shards(axes)
        mesh = replace(space.run.mesh, **sizes._asdict(), overlap=False)
        self.meter = meter_on(bricks, base, grid_of(mesh, space.world))
        self._weights: dict[bool, Weights] = {}
        self._held_weights: dict[tuple[Strategy, int, bool], _Held] = {}
        self._tables: dict[tuple[int, bool, bool, tuple[Recompute, ...]], Array] = {}
        self._spans: dict[str, Span] = {}
        self._messages: dict[int, float] = {}
        self._replays: dict[tuple[Shape, int, tuple[Recompute, ...]], float] = {}

    @property
    def each(self) -> int:
        """Candidates with the same shape and micro-batches."""
        return len(self.recomputes) * len(self.shards)

    # --------------------------------------------------------------------------------------- memory

    def least_weights(self) -> float:
        """Bytes that no candidate of the mesh goes below: what the fullest rank holds, sharded throughout."""
        own = self.weights("all")
        total = own.steady + own.sharded_gradients
        return min((float((self.cut(shape).ranks @ total).max()) for shape in self.shapes), default=0.0)

    def memory(self, choice: Choice) -> float:
        """A lower bound of the peak in bytes."""
        found = self.memories(choice.shape, choice.micro_batches, choice.recompute, [choice.shard])
        return float(found[0])

    def memories(
        self,
        shape: Shape,
        micro_batches: int,
        recompute: tuple[Recompute, ...],
        shards: Sequence[Strategy],
    ) -> Array:
        """The same by sharding strategy."""
        cut, alive = self.cut(shape), self.pipelines.alive(self.sizes.pp, shape, micro_batches)
        usage = self.bricks.usage(self.rows(micro_batches), recompute, shape.fine)
        kept = cut.segments @ usage.kept
        running = alive.counts @ kept + usage.shared * alive.counts.max(axis=1)
        above: dict[bool, Array] = {}
        found = np.empty(len(shards))
        for place, shard in enumerate(shards):
            held = self._held(shard, shape)
            whole = shard in ("none", "optimizer") and micro_batches > 1
            if whole not in above:
                own = self.weights(shard)
                extra = usage.passing + (own.reducing_whole if whole else own.reducing)
                # At the begin of a backward all is alive; when a brick is at its peak, what follows it is not.
                inside = ((cut.segments > 0) * (usage.kept_by_part + extra)).max(axis=1) - kept
                above[whole] = np.maximum(extra[list(cut.trailing)], inside)
            resident = self._resident(held, shape, micro_batches, shard)
            peak = (resident[alive.rank] + running + above[whole][alive.segment]).max()
            found[place] = max(peak, (held.steady + held.sharded_gradients).max())
        return found

    def _resident(self, held: _Held, shape: Shape, micro_batches: int, shard: Strategy) -> Array:
        """Weights, optimizer, gradients of earlier micro-batches and gathered weights of each rank. Gathered at
        the same time are all, but for an embedding whose last forward may come before a later segment of its
        rank is first used."""
        resident = held.steady
        if micro_batches > 1:
            unsharded = shard in ("none", "optimizer") and not self.bricks.alone
            resident = resident + (held.whole_gradients if unsharded else held.sharded_gradients)
        if shard == "all":
            return resident + held.largest
        apart = shape.dual or shape.segments > 1
        every = micro_batches > (2 * self.sizes.pp if apart else 1)
        return resident + held.gathered - (0.0 if every else held.entering)

    # ----------------------------------------------------------------------------------------- time

    def least_work(self, shape: Shape) -> Array:
        """As `least_times` without any collective."""
        split, delayed = self._split(shape), self._delayed(shape)
        tables = [self.bricks.work_table(self.rows(count), split, delayed, self.meter) for count in self.counts]
        return self._least(shape, np.array(self.counts), np.stack(tables))

    def work_by_row(self) -> tuple[Bounded, ...]:
        """`least_work` of all rows of the mesh, the least first."""
        return tuple(
            sorted(
                (seconds, (shape, count))
                for shape in self.shapes
                for count, seconds in zip(self.counts, self.least_work(shape).tolist(), strict=True)
            )
        )

    def least_times(self, shape: Shape, counts: Sequence[int]) -> Array:
        """Seconds that no candidate goes below, whatever it recomputes and shards, by number of micro-batches:
        until the first micro-batch reaches a rank, the rank's work, and after it the backwards before that
        rank."""
        tables = [self.table(shape, count, ()) for count in counts]
        return self._least(shape, np.array(counts), np.stack(tables))

    def time_by_row(self, rows: Sequence[Row]) -> tuple[Bounded, ...]:
        """`least_times` of some rows, the least first."""
        by_shape: dict[Shape, list[int]] = {}
        for shape, count in rows:
            by_shape.setdefault(shape, []).append(count)
        return tuple(
            sorted(
                (seconds, (shape, count))
                for shape, counts in by_shape.items()
                for count, seconds in zip(counts, self.least_times(shape, counts).tolist(), strict=True)
            )
        )

    def _least(self, shape: Shape, micro_batches: Indices, tables: Array) -> Array:
        """By table, each with its number of micro-batches."""
        cut = self.cut(shape)
        segments, ranks = cut.segments.T, cut.ranks.T
        busy = tables[..., [AT.forward, AT.backward, AT.wgrad, AT.replay]].sum(axis=-1)
        exchange = tables[..., [AT.exchange_forward, AT.exchange_backward, AT.exchange_replay]].sum(axis=-1)
        once = tables[..., AT.forward] + tables[..., AT.exchange_forward]
        if not shape.fine:
            once = once + tables[..., AT.backward]
        chain = once @ segments
        head = (np.cumsum(chain, axis=-1) - chain)[..., cut.first]
        most = np.maximum(busy @ ranks, exchange @ ranks)
        pp = self.sizes.pp
        growth = np.array([1.0 if counted(int(each), pp) == each else GROWTH for each in micro_batches])
        return (head + (growth * micro_batches)[:, None] * most).max(axis=-1)

    def quick_times(self, shape: Shape, micro_batches: int) -> Array:
        """Lower bounds of the step in seconds, by recomputation and sharding strategy, without the turns of the
        pipeline, and without collectives that a recomputation repeats."""
        without = self.table(shape, micro_batches, ())
        replays = [self._replay_table(shape, micro_batches, names) for names in self.recomputes]
        tables = without + np.stack(replays)
        least = self._least(shape, np.full(len(tables), micro_batches), tables)
        streams = np.array([self._weights_stream(shape, micro_batches, shard) for shard in self.shards])
        updates = np.array([self._held(shard, shape).update for shard in self.shards])
        hosts = self._hosts(shape, micro_batches, self.recomputes, tables)
        return np.maximum(np.maximum(least[:, None], streams) + updates, hosts[:, None])

    def time(self, choice: Choice) -> float:
        """A lower bound of the step in seconds."""
        seconds = max(self._replayed(choice), self._weights_stream(*choice[1:3], choice.shard))
        table = self.table(choice.shape, choice.micro_batches, choice.recompute)
        host = self._host(choice, table)
        return max(seconds + self._held(choice.shard, choice.shape).update, host)

    def _replayed(self, choice: Choice) -> float:
        key = (choice.shape, choice.micro_batches, choice.recompute)
        if key not in self._replays:
            table = self.table(*key)
            self._replays[key] = self._extended(table, choice, self._segments(table, choice))
        return self._replays[key]

    def _extended(self, table: Array, choice: Choice, segments: Segments) -> float:
        """The time of all micro-batches: that of those that are replayed and, if there are more, the growth by
        each. `predict` takes the growth of two short steps, which may be less than a rank's work."""
        pp, shape, whole = self.sizes.pp, choice.shape, choice.micro_batches
        count = counted(whole, pp)
        seconds = replay(turns(pp, shape, count), segments)
        if count == whole:
            return seconds
        ranks = self.cut(shape).ranks
        busy = table[:, [AT.forward, AT.backward, AT.wgrad, AT.replay]].sum(axis=1)
        exchange = table[:, [AT.exchange_forward, AT.exchange_backward, AT.exchange_replay]].sum(axis=1)
        work = float(np.maximum(ranks @ busy, ranks @ exchange).max())
        fewer = replay(turns(pp, shape, count - pp), segments)
        return seconds + GROWTH * (whole - count) * min(work, (seconds - fewer) / pp)

    def _weights_stream(self, shape: Shape, micro_batches: int, shard: Strategy) -> float:
        """All collectives of weights, one after another."""
        held = self._held(shard, shape)
        every = micro_batches if shard in ("gradients", "all") else 1
        seconds = held.gather + every * held.reduce
        if shard == "all":
            more = np.maximum(micro_batches * 2 * held.again - held.whole, 0.0)
            seconds = seconds + np.bincount(self.cut(shape).holder, more, self.sizes.pp)
        return float(seconds.max())

    def _hosts(
        self, shape: Shape, micro_batches: int, recomputes: Sequence[tuple[Recompute, ...]], tables: Array
    ) -> Array:
        """What the host takes for a step, by table."""
        ranks, known = self.cut(shape).ranks.T, self.meter.calibration
        inner = np.array([not self.bricks.alone or bool(names) or shape.fine for names in recomputes])
        ops = np.rint(micro_batches * inner[:, None] * (tables[..., AT.ops] @ ranks))
        launches = np.rint(micro_batches * (tables[..., AT.launches] @ ranks))
        seconds = known.step_seconds + ops * known.op_seconds + launches * known.launch_seconds
        found: Array = seconds.max(axis=-1)
        return found

    def _host(self, choice: Choice, table: Array) -> float:
        return float(self._hosts(choice.shape, choice.micro_batches, [choice.recompute], table[None])[0])

    # ---------------------------------------------------------------------------------- closed form

    def estimate(self, choice: Choice) -> float:
        """The closed form: about how long a step takes."""
        cut, own = self.cut(choice.shape), self.weights(choice.shard)
        table = self.table(choice.shape, choice.micro_batches, choice.recompute)
        forward, backward = table[:, AT.forward], table[:, [AT.backward, AT.replay]].sum(axis=1)
        loss = PAIR_LOSS * choice.shape.overlap
        paired = loss * (table[:, AT.exchange_forward] + table[:, AT.exchange_backward])
        each = choice.shard in ("gradients", "all")
        gather = own.gather if choice.shard == "all" else 0.0 * own.gather
        waits_f = np.maximum(gather - forward - table[:, AT.exchange_forward], 0.0)
        waits_b = np.maximum(gather + each * own.reduce - backward - table[:, AT.exchange_backward], 0.0)
        slower = table.copy()
        slower[:, AT.forward] += waits_f
        slower[:, AT.backward] += waits_b + paired
        seconds = self._extended(slower, choice, self._segments(slower, choice))
        first = np.maximum(own.gather - forward, 0.0) if choice.shard != "all" else waits_f
        last = np.maximum(own.reduce - backward, 0.0)
        ends = float(cut.segments[0] @ first) + float((cut.ranks @ last)[0])
        if choice.shape.dual and choice.shard != "all":
            # The first micro-batch waits for weights on its way: they are gathered a block ahead, no more.
            # With several segments per rank in a row, gathers hide in what ranks wait for one another.
            behind = np.maximum(own.gather - forward - table[:, AT.exchange_forward], 0.0)
            ends += float(cut.late @ behind)
        busy = max(seconds + ends, self._weights_stream(*choice[1:3], choice.shard))
        host = self._host(choice, table)
        return max(busy + self._held(choice.shard, choice.shape).update, host)

    # ---------------------------------------------------------------------------------------- parts

    def rows(self, micro_batches: int) -> int:
        """Rows of a rank in a micro-batch."""
        return self.space.run.train.batch_samples // (micro_batches * self.axes.dp)

    def cut(self, shape: Shape) -> Cut:
        return self.pipelines.cut(self.sizes.pp, shape)

    def table(self, shape: Shape, micro_batches: int, recompute: tuple[Recompute, ...]) -> Array:
        """The times of all bricks for one micro-batch."""
        delayed = self._delayed(shape)
        key = (micro_batches, shape.fine, delayed, recompute)
        if key not in self._tables:
            rows, split = self.rows(micro_batches), self._split(shape)
            table = self.bricks.work_table(rows, split, delayed, self.meter)
            table = table + self.bricks.call_table(rows, split, recompute, self.meter, self._spans)
            self._tables[key] = table + self._replay_table(shape, micro_batches, recompute)
        return self._tables[key]

    def _replay_table(self, shape: Shape, micro_batches: int, recompute: tuple[Recompute, ...]) -> Array:
        return self.bricks.replay_table(self.rows(micro_batches), self._split(shape), recompute, self.meter)

    def _delayed(self, shape: Shape) -> bool:
        """Whether weight gradients wait."""
        return shape.dual or (shape.overlap and self.space.run.mesh.delay_weights)

    def _split(self, shape: Shape) -> Split:
        return Split(fine=shape.fine, posts=self.sizes.pp == 1)

    def weights(self, shard: Strategy) -> Weights:
        """Those of the bricks: the same for all strategies that shard anything."""
        copied = shard == "none"
        if copied not in self._weights:
            axes, replicas = self.axes, self.space.run.mesh.replicate
            dense, expert = (axes.dp * axes.cp, axes.edp) if copied else (replicas, replicas)
            axes = replace(axes, dense_copies=dense, expert_copies=expert)
            self._weights[copied] = self.bricks.weights(axes, shard, self.meter)
        return self._weights[copied]

    def _held(self, shard: Strategy, shape: Shape) -> _Held:
        key = (shard, shape.segments, shape.dual)
        if key not in self._held_weights:
            self._held_weights[key] = self._made_held(self.weights(shard), self.cut(shape))
        return self._held_weights[key]

    def _made_held(self, own: Weights, cut: Cut) -> _Held:
        ranks, again, whole = cut.ranks, np.zeros(len(cut.blocks)), np.zeros(len(cut.blocks))
        for segment, blocks in enumerate(cut.blocks):
            if len(blocks) > KEPT_GATHERED:
                each = [own.gather[brick] for brick in blocks]
                again[segment], whole[segment] = sum(each) - max(each), sum(each)
        return _Held(
            steady=ranks @ own.steady,
            sharded_gradients=ranks @ own.sharded_gradients,
            whole_gradients=ranks @ own.whole_gradients,
            gathered=ranks @ own.gathered,
            entering=ranks[:, FIRST] * own.gathered[FIRST],
            largest=((ranks > 0) * own.largest).max(axis=1),
            gather=ranks @ own.gather,
            reduce=ranks @ own.reduce,
            again=again,
            whole=whole,
            update=float((ranks @ own.updated).max()) / self.meter.optimizer,
        )

    def _message(self, micro_batches: int) -> float:
        rows = self.rows(micro_batches)
        if rows not in self._messages:
            self._messages[rows] = self.bricks.message(rows, self.meter)
        return self._messages[rows]

    def _segments(self, table: Array, choice: Choice) -> Segments:
        cut, fine = self.cut(choice.shape), choice.shape.fine
        exchange = table[:, AT.exchange_forward] + table[:, AT.exchange_backward] + table[:, AT.exchange_replay]
        columns = cut.segments @ table
        replays, exchanges = columns[:, AT.replay], columns[:, AT.exchange_replay]
        # Of segments in phases all replays may come early, of others those of the last block.
        early = replays if fine else table[list(cut.trailing), AT.replay]
        apart = 0.0 * exchanges if fine else exchanges
        return Segments(
            forward=columns[:, AT.forward].tolist(),
            backward=(columns[:, AT.backward] + replays - early).tolist(),
            wgrad=columns[:, AT.wgrad].tolist(),
            exchange_forward=columns[:, AT.exchange_forward].tolist(),
            exchange_backward=(columns[:, AT.exchange_backward] + apart).tolist(),
            replay=early.tolist(),
            trailing=[float(exchange[brick]) for brick in cut.trailing],
            message=self._message(choice.micro_batches),
        )
