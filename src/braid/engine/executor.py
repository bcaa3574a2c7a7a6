"""The pipeline executor: runs the op list of one pipeline rank in order, and logs when each op ran.

The order is the schedule's; the executor makes no scheduling decisions. Tensors cross the boundary between
segments detached: the receiving segment reads a leaf, and its gradient is handed back once the segment's
backward has run (`node.py` does the same between the phases of a segment). Ops on sharded weights (UNSHARD,
REDUCE_GRAD ...) go to `Weights`, compute ops to `StepWork`, messages to the point-to-point communicators of
`PipelineLinks`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from braid.distributed.collectives import Group
from braid.engine.edges import EdgeLinks
from braid.engine.graphs import Sections
from braid.engine.node import SegmentRun, StepWork, Watch
from braid.engine.progress import Progress
from braid.engine.weights import Weights
from braid.schedule import Act, Channel, Op, OpSpan, Schedule, Turn
from braid.schedule.lifetime import Use, uses_of
from braid.schedule.sections import Section
from braid.schedule.views import stream_of

AfterOp = Callable[[Op], None]

SENDING = "outstanding sends"
"""The activity reported while a rank that has run all its ops waits for its sends."""


@dataclass(frozen=True, kw_only=True)
class PipelineLinks:
    """Point-to-point communication with neighbouring stages and other modules, and progress reporting."""

    channels: Mapping[Channel, Group]
    """A two-rank communicator per pipe (`Schedule.pipe_of`), ranks ascending. Empty without a pipeline."""
    message: Callable[[Turn], Tensor]
    """Allocates a buffer for the input of a turn, or for the gradient of its output."""
    edges: EdgeLinks | None = None
    """Rows that pass between modules; None for a language model alone."""
    progress: Progress = field(default_factory=Progress)
    """Read by the watchdog."""


class Program:
    """The op list of one pipeline rank with the units that each op uses: resolved once, executed every step."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        assert schedule.weights != "unplaced", "lower the schedule before executing it"
        self.schedule, self.rank = schedule, rank
        uses = uses_of(schedule)
        self.ops: tuple[tuple[Op, Use], ...] = tuple((op, uses(op)) for op in schedule.ops[rank])
        self.stream = stream_of(schedule)
        self.away = frozenset(
            (op.micro_batch, op.segment, op.phase) for op, _ in self.ops if op.act is Act.OFFLOAD
        )
        """The blocks that wait on the host, by micro-batch and segment."""


def execute(
    program: Program,
    work: StepWork,
    weights: Weights,
    links: PipelineLinks,
    watch: Watch | None = None,
    after_op: AfterOp | None = None,
    graphs: Sections | None = None,
) -> tuple[OpSpan, ...]:
    """Run one step and return when each op ran, by `time.perf_counter`. `after_op` is called after each. A step
    that raises leaves no gathered weights and no gradients behind. `graphs` may run sections of the list from
    their CUDA graphs: their ops then have the times of the whole section."""
    weights.begin()
    try:
        # By default autograd runs CUDA backwards in a thread per device. A step calls backward once per node,
        # and handing each over to that thread costs the host more than many nodes take.
        with torch.autograd.set_multithreading_enabled(False):
            return _Execution(program, work, weights, links, watch, after_op).run(graphs)
    except BaseException:
        weights.abort()
        raise


def execute_section(program: Program, section: Section, work: StepWork, weights: Weights) -> None:
    """Issue the ops of a section to the streams of the work, for a CUDA graph."""
    links = PipelineLinks(channels={}, message=_no_message)
    execution = _Execution(program, work, weights, links, None, None)
    execution.run_ops(section.start, section.stop)
    execution.finish()


def _no_message(turn: Turn) -> Tensor:
    raise AssertionError(f"a section receives nothing, but {turn} has")


class _Execution:
    """The state of one execution of a program."""

    def __init__(
        self,
        program: Program,
        work: StepWork,
        weights: Weights,
        links: PipelineLinks,
        watch: Watch | None,
        after_op: AfterOp | None,
    ) -> None:
        self.program, self.schedule = program, program.schedule
        self.work, self.weights, self.links = work, weights, links
        self.watch, self.after_op = watch, after_op
        self.inputs: dict[Turn, Tensor] = {}
        """The input of each segment that has not started."""
        self.gradients: dict[Turn, Tensor] = {}
        """The output gradient of each segment whose backward has not started."""
        self.rows: dict[tuple[int, str], Tensor] = {}
        """By micro-batch and edge: rows that have not been sent, or read."""
        self.row_gradients: dict[tuple[int, str], Tensor] = {}
        """The same, of the gradients of rows."""
        self.outgoing: list[tuple[dist.Work, Tensor]] = []
        """Sends that may be in flight. Holding the tensor keeps its buffer from being reused."""
        self.segment_runs: dict[Turn, SegmentRun] = {}
        self.log: list[OpSpan] = []

    def run(self, graphs: Sections | None) -> tuple[OpSpan, ...]:
        progress, place = self.links.progress, 0
        progress.attach(self.work.streams, self.program.stream)
        if graphs is not None:
            for section in graphs.sections:
                self.run_ops(place, section.start)
                self._run_section(section, graphs)
                place = section.stop
        self.run_ops(place, len(self.program.ops))
        progress.enter(SENDING)
        self.finish()
        progress.detach()
        progress.enter("after the last op")
        return tuple(self.log)

    def run_ops(self, start: int, stop: int) -> None:
        progress = self.links.progress
        for op, use in self.program.ops[start:stop]:
            progress.enter(op)
            begin = time.perf_counter()
            self._run(op, use)
            self.log.append(OpSpan(op=op, start=begin, end=time.perf_counter()))
            progress.leave(op)
            if self.after_op is not None:
                self.after_op(op)

    def _run_section(self, section: Section, graphs: Sections) -> None:
        """Through its graph, or one by one. The watchdog sees a section as its first op."""
        progress, ops = self.links.progress, [op for op, _ in self.program.ops[section.start : section.stop]]
        logged, begin = len(self.log), time.perf_counter()
        graphs.run(section, functools.partial(self.run_ops, section.start, section.stop))
        if len(self.log) == logged:
            progress.enter(ops[0])
            progress.leave(ops[0])
            progress.skip(len(ops) - 1)
            end = time.perf_counter()
            self.log += [OpSpan(op=op, start=begin, end=end) for op in ops]

    def finish(self) -> None:
        """Wait for messages and streams. Nothing may be left over."""
        for send, _ in self.outgoing:
            send.wait()
        if self.links.edges is not None:
            self.links.edges.finish()
        self.work.streams.join()
        unused = [*self.inputs, *self.gradients, *self.rows, *self.row_gradients, *self.segment_runs]
        assert not unused, f"the schedule ended with unused tensors or unfinished segments: {unused}"

    def _run(self, op: Op, use: Use) -> None:
        if op.act.shards:
            self.weights.run(op)
        elif op.act is Act.SUM_COPIES:
            self.work.sum_copies(op)
        elif op.act.copies:
            self.work.copy_block(op)
        else:
            assert op.micro_batch is not None
            assert op.segment is not None
            turn = (op.micro_batch, op.segment)
            if op.act.computes:
                if use:
                    self.weights.use(use, op.micro_batch)
                self._compute(turn, op)
            else:
                self._transfer(turn, op)

    # ------------------------------------------------------------------------------------ compute

    def _compute(self, turn: Turn, op: Op) -> None:
        segment_run = self.segment_runs.get(turn) or self._begin(turn)
        match op.act:
            case Act.F:
                segment_run.forward(op)
                if (y := segment_run.take_output()) is not None:
                    self._pass_on(turn, y)
                if segment_run.forward_done:
                    self.work.after_forward(turn)
            case Act.B:
                if not segment_run.backward_begun and (gradient := self._output_gradient(turn)) is not None:
                    segment_run.set_output_grad(gradient)
                segment_run.backward(op)
                self._pass_back(turn, segment_run)
            case Act.RECOMPUTE:
                segment_run.recompute(op)
            case _:
                segment_run.wgrad(op)
        if segment_run.done:
            del self.segment_runs[turn]
            self.work.after_turn(turn)

    def _begin(self, turn: Turn) -> SegmentRun:
        segment_run = SegmentRun(turn, self.schedule, self.work, watch=self.watch)
        if turn in self.inputs:
            segment_run.set_input(self.inputs.pop(turn))
        for edge in self.schedule.graph.inputs(turn[1]):
            has_grad = self.schedule.has_backward(edge.source)
            segment_run.give(edge.name, self.rows.pop((turn[0], edge.name)), has_grad=has_grad)
        self.segment_runs[turn] = segment_run
        return segment_run

    def _pass_on(self, turn: Turn, y: Tensor) -> None:
        """The output of a segment, to the next one of its module or to the edges that leave it."""
        micro_batch, segment = turn
        graph = self.schedule.graph
        if (following := graph.next(segment)) is not None:
            self.inputs[micro_batch, following] = y
        for edge in graph.outputs(segment):
            self.rows[micro_batch, edge.name] = y

    def _neighbour(self, turn: Turn, way: Callable[[int], int | None]) -> Turn:
        """The same micro-batch in the segment before or after it in its module."""
        segment = way(turn[1])
        assert segment is not None, f"segment {turn[1]} is at an end of its module"
        return turn[0], segment

    def _output_gradient(self, turn: Turn) -> Tensor | None:
        """From the next segment of its module, or the sum over the edges that leave it, in their order."""
        micro_batch, segment = turn
        if turn in self.gradients:
            return self.gradients.pop(turn)
        edges = self.schedule.graph.outputs(segment)
        terms = [self.row_gradients.pop((micro_batch, edge.name)) for edge in edges]
        return None if not terms else functools.reduce(torch.add, terms)

    def _pass_back(self, turn: Turn, segment_run: SegmentRun) -> None:
        """The gradients of a segment's inputs, once they are complete."""
        micro_batch, segment = turn
        graph = self.schedule.graph
        if (gradient := segment_run.take_input_grad()) is not None:
            self.gradients[self._neighbour(turn, graph.previous)] = gradient
        for edge in graph.inputs(segment):
            if (gradient := segment_run.take_input_grad(edge.name)) is not None:
                self.row_gradients[micro_batch, edge.name] = gradient

    # ------------------------------------------------------------------------------------- messages

    def _transfer(self, turn: Turn, op: Op) -> None:
        if op.edge is not None:
            self._transfer_rows(turn[0], op, op.edge)
            return
        match op.act:
            case Act.SEND_F:
                self._send(op, self.inputs.pop(self._neighbour(turn, self.schedule.graph.next)))
            case Act.SEND_B:
                self._send(op, self.gradients.pop(self._neighbour(turn, self.schedule.graph.previous)))
            case Act.RECV_F:
                self.inputs[turn] = self._receive(op, turn)
            case _:
                self.gradients[turn] = self._receive(op, turn)

    def _transfer_rows(self, micro_batch: int, op: Op, edge: str) -> None:
        """A message between modules. Rows that stay on this rank pass through it too."""
        links = self.links.edges
        assert links is not None, f"{op} without links between modules"
        match op.act:
            case Act.SEND_F:
                rows_NC, bound = self.rows.pop((micro_batch, edge)), self.schedule.send_bound(op)
                links.send("F", edge, micro_batch, rows_NC, bound)
            case Act.SEND_B:
                links.send("B", edge, micro_batch, self.row_gradients.pop((micro_batch, edge)), None)
            case Act.RECV_F:
                self.rows[micro_batch, edge] = links.receive("F", edge, micro_batch)
            case _:
                self.row_gradients[micro_batch, edge] = links.receive("B", edge, micro_batch)

    def _send(self, op: Op, message: Tensor) -> None:
        group = self.links.channels[self.schedule.pipe_of(op)]
        message = message.contiguous()
        send = dist.isend(message, group=group.handle, group_dst=1 - group.rank)
        assert send is not None
        self.outgoing = [(work, buffer) for work, buffer in self.outgoing if not work.is_completed()]
        self.outgoing.append((send, message))

    def _receive(self, op: Op, turn: Turn) -> Tensor:
        group = self.links.channels[self.schedule.pipe_of(op)]
        message = self.links.message(turn)
        dist.recv(message, group=group.handle, group_src=1 - group.rank)
        return message
