"""Bounds of candidates, and the closed form that ranks them: sums over bricks in place of op lists.

    memory >= weights, optimizer, gathered weights, gradients, and what live micro-batches keep
    time   >= the turns of the pipeline, with weights at hand and exchanges hidden as far as they can be;
              all collectives of weights one after another; what the host takes; then the optimizer

The closed form adds waits for weights, and exchanges that a pair does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from braid.choices import Recompute, Strategy
from braid.model.declaration import Form
from braid.pattern import Layout
from braid.planning.divisibility import AxisSizes
from braid.planning.modules import grid_of
from braid.timing.meter import ClusterMeter
from braid.timing.search.bricks import AT, FIRST, Array, Bricks, Times, Weights, meter_on
from braid.timing.search.choices import Choice, MeshSizes, Shape, Space
from braid.timing.search.pipeline import Segments, Turns, counted, replay, turns

KEPT_GATHERED = 2
"""A segment of at most so many blocks may keep its weights from one turn to the next."""
GROWTH = 0.99
"""The share of the growth of short steps by which a long one grows at least."""
PAIR_LOSS = 0.1
"""The share of the exchanges of a pair that is exposed, in the closed form."""


Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Which bricks the segments and ranks of a pipeline have."""

    order: Turns
    segments: Array
    """How often each segment has each brick."""
    ranks: Array
    """The same of ranks; a rank with both ends of a model has no copy of the embedding."""
    trailing: tuple[int, ...]
    """The last brick of each segment."""
    blocks: tuple[tuple[int, ...], ...]
    """The bricks of each segment, in order."""
    alive: Array
    """What may be alive at most: micro-batches of each segment, in as many rows as there are cases."""
    alive_rank: Indices
    """The rank of each case."""
    alive_segment: Indices
    """The segment whose backward begins."""
    first: Indices
    """The first segment of each rank."""


class Pipelines:
    """The stages of all pipelines of a run, for all meshes."""

    def __init__(self, space: Space, kinds: Sequence[int]) -> None:
        """`kinds` has the brick of each block."""
        self.space, self.kinds, self.count = space, kinds, max(kinds) + 2
        self._known: dict[tuple[int, Shape, int], Stages] = {}

    def stages(self, pp: int, shape: Shape, micro_batches: int) -> Stages:
        key = (pp, shape, counted(micro_batches, pp))
        if key not in self._known:
            layout = self.space.cut(pp, shape)
            assert layout is not None
            self._known[key] = self._made(pp, layout, turns(*key))
        return self._known[key]

    def _made(self, pp: int, layout: Layout, order: Turns) -> Stages:
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
        for number, rank in enumerate(order.holder):
            ranks[rank] += segments[number]
        if order.holder[0] != order.holder[-1]:
            ranks[order.holder[-1], last + 1] = 1
        trailing = [own[-1] if own else FIRST for own in blocks]
        trailing[-1] = last
        found = [(rank, each) for rank, own_live in enumerate(order.live) for each in own_live]
        alive = np.zeros((len(found), len(blocks)))
        for number, (_, each) in enumerate(found):
            for segment, count in each.counts.items():
                alive[number, segment] = count
        return Stages(
            order=order, segments=segments, ranks=ranks, trailing=tuple(trailing), blocks=blocks, alive=alive,
            alive_rank=np.array([rank for rank, _ in found]),
            alive_segment=np.array([each.segment for _, each in found]),
            first=np.array([order.holder.index(rank) for rank in range(pp)]),
        )  # fmt: skip


class MeshBounds:
    """Bounds of all candidates of one mesh."""

    def __init__(
        self, pipelines: Pipelines, sizes: MeshSizes, axes: AxisSizes, bricks: Bricks, base: ClusterMeter
    ) -> None:
        self.pipelines, self.sizes, self.axes, self.bricks = pipelines, sizes, axes, bricks
        space = self.space = pipelines.space
        mesh = replace(space.run.mesh, **sizes._asdict(), overlap=False)
        self.meter = meter_on(bricks, base, grid_of(mesh, space.world))
        self._times: dict[tuple[int, tuple[Recompute, ...], bool, bool], Times] = {}
        self._weights: dict[Strategy, Weights] = {}
        self._replays: dict[tuple[Shape, int, tuple[Recompute, ...]], float] = {}

    # --------------------------------------------------------------------------------------- memory

    def least_weights(self) -> float:
        """Bytes that no candidate of the mesh goes below: what the fullest rank holds, sharded throughout."""
        own = self.weights("all")
        total = own.steady + own.sharded_gradients
        shapes = self.space.shapes(self.sizes)
        return min((float((self.stages(shape, 1).ranks @ total).max()) for shape in shapes), default=0.0)

    def memory(self, choice: Choice) -> float:
        """A lower bound of the peak in bytes."""
        stages = self.stages(choice.shape, choice.micro_batches)
        own = self.weights(choice.shard)
        several, unsharded = choice.micro_batches > 1, choice.shard in ("none", "optimizer")
        steady = stages.ranks @ own.steady
        gradients = own.whole_gradients if unsharded and not self.bricks.alone else own.sharded_gradients
        resident = steady + (stages.ranks @ gradients if several else 0.0)
        if choice.shard == "all":
            resident += ((stages.ranks > 0) * own.largest).max(axis=1)
        else:
            resident += stages.ranks @ self._gathered(own, choice)
        usage = self.bricks.usage(self.rows(choice.micro_batches), choice.recompute, choice.shape.fine)
        extra = usage.passing + (own.reducing_whole if unsharded and several else own.reducing)
        # At the begin of a backward all is alive; later, when a brick is at its peak, what follows it is not.
        kept = stages.segments @ usage.kept
        inside = ((stages.segments > 0) * (usage.kept_by_part + extra)).max(axis=1) - kept
        above = np.maximum(extra[list(stages.trailing)], inside)
        alive = stages.alive @ kept + usage.shared * stages.alive.max(axis=1) + above[stages.alive_segment]
        update = steady + stages.ranks @ own.sharded_gradients
        return float(max((resident[stages.alive_rank] + alive).max(), update.max()))

    def _gathered(self, own: Weights, choice: Choice) -> Array:
        """Weights that are gathered at the same time: all, but for an embedding whose last forward may come
        before a later segment of its rank is first used."""
        apart = choice.shape.dual or choice.shape.segments > 1
        if choice.micro_batches > (2 * self.sizes.pp if apart else 1):
            return own.gathered
        return own.gathered * (np.arange(len(own.gathered)) != FIRST)

    # ----------------------------------------------------------------------------------------- time

    def least_work(self, shape: Shape, micro_batches: int) -> float:
        """As `least_time`, without any collective."""
        delayed, form = self._delayed(shape), self._form_of(shape)
        table = self.bricks.least_times(self.rows(micro_batches), form, delayed, self.meter)
        return self._least(shape, micro_batches, table)

    def least_time(self, shape: Shape, micro_batches: int, recompute: tuple[Recompute, ...] = ()) -> float:
        """Seconds that no candidate goes below that recomputes at least this, whatever it shards: until the
        first micro-batch reaches a rank, the rank's work, and after it the backwards before that rank."""
        return self._least(shape, micro_batches, self.times(micro_batches, recompute, shape).table)

    def _least(self, shape: Shape, micro_batches: int, table: Array) -> float:
        stages = self.stages(shape, micro_batches)
        busy = table[:, [AT.forward, AT.backward, AT.wgrad, AT.replay]].sum(axis=1)
        exchange = table[:, [AT.exchange_forward, AT.exchange_backward, AT.exchange_replay]].sum(axis=1)
        chain = stages.segments @ (table[:, AT.forward] + table[:, AT.exchange_forward])
        if not shape.fine:
            chain += stages.segments @ table[:, AT.backward]
        head = (np.cumsum(chain) - chain)[stages.first]
        most = np.maximum(stages.ranks @ busy, stages.ranks @ exchange)
        growth = 1.0 if counted(micro_batches, self.sizes.pp) == micro_batches else GROWTH
        return float((head + growth * micro_batches * most).max())

    def time(self, choice: Choice) -> float:
        """A lower bound of the step in seconds."""
        stages, weights = self.stages(choice.shape, choice.micro_batches), self.weights(choice.shard)
        return max(self._replayed(choice) + self._update(stages, weights), self._host(choice))

    def _replayed(self, choice: Choice) -> float:
        key = (choice.shape, choice.micro_batches, choice.recompute)
        if key not in self._replays:
            stages = self.stages(choice.shape, choice.micro_batches)
            times = self.times(choice.micro_batches, choice.recompute, choice.shape)
            segments = self._segments(stages, times, fine=choice.shape.fine)
            self._replays[key] = self._extended(stages, times, choice, segments)
        return max(self._replays[key], self._weights_stream(choice))

    def _extended(self, stages: Stages, times: Times, choice: Choice, segments: Segments) -> float:
        """The time of all micro-batches: that of those that are replayed and, if there are more, the growth by
        each. `predict` takes the growth of two short steps, which may be less than a rank's work."""
        pp, count = self.sizes.pp, counted(choice.micro_batches, self.sizes.pp)
        seconds = replay(stages.order, segments)
        if count == choice.micro_batches:
            return seconds
        table = times.table
        busy = table[:, [AT.forward, AT.backward, AT.wgrad, AT.replay]].sum(axis=1)
        exchange = table[:, [AT.exchange_forward, AT.exchange_backward, AT.exchange_replay]].sum(axis=1)
        work = float(np.maximum(stages.ranks @ busy, stages.ranks @ exchange).max())
        fewer = replay(self.stages(choice.shape, count - pp).order, segments)
        return seconds + GROWTH * (choice.micro_batches - count) * min(work, (seconds - fewer) / pp)

    def _weights_stream(self, choice: Choice) -> float:
        """All collectives of weights, one after another."""
        own = self.weights(choice.shard)
        stages = self.stages(choice.shape, choice.micro_batches)
        every = choice.micro_batches if choice.shard in ("gradients", "all") else 1
        seconds = stages.ranks @ (own.gather + every * own.reduce)
        if choice.shard == "all":
            for segment, blocks in enumerate(stages.blocks):
                if len(blocks) > KEPT_GATHERED:
                    each = [own.gather[brick] for brick in blocks]
                    more = choice.micro_batches * 2 * (sum(each) - max(each)) - sum(each)
                    seconds[stages.order.holder[segment]] += max(more, 0.0)
        return float(seconds.max())

    def _update(self, stages: Stages, own: Weights) -> float:
        return float((stages.ranks @ own.updated).max()) / self.meter.optimizer

    def _host(self, choice: Choice) -> float:
        table = self.times(choice.micro_batches, choice.recompute, choice.shape).table
        stages = self.stages(choice.shape, choice.micro_batches)
        whole = self.bricks.alone and not choice.recompute and not choice.shape.fine
        ops = choice.micro_batches * (stages.ranks @ table[:, AT.ops]) * (not whole)
        launches = choice.micro_batches * (stages.ranks @ table[:, AT.launches])
        return max(self.meter.host(round(a), round(b)) for a, b in zip(ops, launches, strict=True))

    # ---------------------------------------------------------------------------------- closed form

    def estimate(self, choice: Choice) -> float:
        """The closed form: about how long a step takes."""
        stages, own = self.stages(choice.shape, choice.micro_batches), self.weights(choice.shard)
        times = self.times(choice.micro_batches, choice.recompute, choice.shape)
        table = times.table
        forward, backward = table[:, AT.forward], table[:, [AT.backward, AT.replay]].sum(axis=1)
        loss = PAIR_LOSS * choice.shape.overlap
        paired = loss * (table[:, AT.exchange_forward] + table[:, AT.exchange_backward])
        each = choice.shard in ("gradients", "all")
        gather = own.gather if choice.shard == "all" else 0.0 * own.gather
        waits_f = np.maximum(gather - forward - table[:, AT.exchange_forward], 0.0)
        waits_b = np.maximum(gather + each * own.reduce - backward - table[:, AT.exchange_backward], 0.0)
        slower = times.table.copy()
        slower[:, AT.forward] += waits_f
        slower[:, AT.backward] += waits_b + paired
        changed = Times(table=slower, message=times.message)
        segments = self._segments(stages, changed, fine=choice.shape.fine)
        seconds = self._extended(stages, changed, choice, segments)
        first = np.maximum(own.gather - forward, 0.0) if choice.shard != "all" else waits_f
        last = np.maximum(own.reduce - backward, 0.0)
        ends = float((stages.segments @ first).sum()) + float((stages.ranks @ last)[0])
        busy = max(seconds + ends, self._weights_stream(choice))
        return max(busy + self._update(stages, own), self._host(choice))

    # ---------------------------------------------------------------------------------------- parts

    def rows(self, micro_batches: int) -> int:
        """Rows of a rank in a micro-batch."""
        return self.space.run.train.batch_samples // (micro_batches * self.axes.dp)

    def times(self, micro_batches: int, recompute: tuple[Recompute, ...], shape: Shape) -> Times:
        delayed = self._delayed(shape)
        key = (micro_batches, recompute, shape.fine, delayed)
        if key not in self._times:
            form = self._form_of(shape)
            rows = self.rows(micro_batches)
            self._times[key] = self.bricks.times(rows, recompute, form, delayed, self.meter)
        return self._times[key]

    def _delayed(self, shape: Shape) -> bool:
        """Whether weight gradients wait."""
        return shape.dual or (shape.overlap and self.space.run.mesh.delay_weights)

    def _form_of(self, shape: Shape) -> Form:
        return self.bricks.form(fine=shape.fine, posts=self.sizes.pp == 1)

    def weights(self, shard: Strategy) -> Weights:
        if shard not in self._weights:
            axes = self.axes
            copies = self.space.run.mesh.replicate
            dense, expert = (axes.dp * axes.cp, axes.edp) if shard == "none" else (copies, copies)
            axes = replace(axes, dense_copies=dense, expert_copies=expert)
            self._weights[shard] = self.bricks.weights(axes, shard, self.meter)
        return self._weights[shard]

    def stages(self, shape: Shape, micro_batches: int) -> Stages:
        return self.pipelines.stages(self.sizes.pp, shape, micro_batches)

    def _segments(self, stages: Stages, times: Times, *, fine: bool) -> Segments:
        table = times.table
        exchange = table[:, AT.exchange_forward] + table[:, AT.exchange_backward] + table[:, AT.exchange_replay]
        columns = stages.segments @ table
        replays, exchanges = columns[:, AT.replay], columns[:, AT.exchange_replay]
        # Of segments in phases all replays may come early, of others those of the last block.
        early = replays if fine else table[list(stages.trailing), AT.replay]
        apart = 0.0 * exchanges if fine else exchanges
        return Segments(
            forward=columns[:, AT.forward].tolist(),
            backward=(columns[:, AT.backward] + replays - early).tolist(),
            wgrad=columns[:, AT.wgrad].tolist(),
            exchange_forward=columns[:, AT.exchange_forward].tolist(),
            exchange_backward=(columns[:, AT.exchange_backward] + apart).tolist(),
            replay=early.tolist(),
            trailing=[float(exchange[brick]) for brick in stages.trailing],
            message=times.message,
        )
