"""The pipeline executor: runs the op list of one pipeline rank in order, and logs when each op ran.

The order is the schedule's; the executor makes no scheduling decisions. Tensors cross the boundary between
segments detached: the receiving segment reads a leaf, and its gradient is handed back once the segment's
backward has run (`node.py` does the same between the phases of a segment). Ops on sharded weights (UNSHARD,
REDUCE_GRAD ...) go to `Weights`, compute ops to `StepWork`, messages to the point-to-point communicators of
`PipelineLinks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from braid.distributed.collectives import Group
from braid.engine.node import SegmentRun, StepWork, Watch
from braid.engine.progress import Progress
from braid.engine.weights import Weights
from braid.schedule import Act, Channel, Op, OpSpan, Schedule, Turn, channel_of
from braid.schedule.lifetime import Use, uses_of
from braid.schedule.views import stream_of

SENDING = "outstanding sends"
"""The activity reported while a rank that has run all its ops waits for its sends."""


@dataclass(frozen=True, kw_only=True)
class PipelineLinks:
    """Point-to-point communication with the neighbouring pipeline stages, and progress reporting."""

    channels: Mapping[Channel, Group]
    """A two-rank communicator per channel, ranks ascending. Empty without a pipeline."""
    message: Callable[[], Tensor]
    """Allocates a receive buffer."""
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


def execute(
    program: Program, work: StepWork, weights: Weights, links: PipelineLinks, watch: Watch | None = None
) -> tuple[OpSpan, ...]:
    """Run one step and return when each op ran, by `time.perf_counter`. A step that raises leaves no gathered
    weights and no gradients behind."""
    weights.begin()
    try:
        # By default autograd runs CUDA backwards in a thread per device. A step calls backward once per node,
        # and handing each over to that thread costs the host more than many nodes take.
        with torch.autograd.set_multithreading_enabled(False):
            return _Execution(program, work, weights, links, watch).run()
    except BaseException:
        weights.abort()
        raise


class _Execution:
    """The state of one execution of a program."""

    def __init__(
        self, program: Program, work: StepWork, weights: Weights, links: PipelineLinks, watch: Watch | None
    ) -> None:
        self.program, self.schedule = program, program.schedule
        self.work, self.weights, self.links, self.watch = work, weights, links, watch
        self.inputs: dict[Turn, Tensor] = {}
        """The input of each segment that has not started."""
        self.gradients: dict[Turn, Tensor] = {}
        """The output gradient of each segment whose backward has not started."""
        self.outgoing: list[tuple[dist.Work, Tensor]] = []
        """Sends that may be in flight. Holding the tensor keeps its buffer from being reused."""
        self.segment_runs: dict[Turn, SegmentRun] = {}

    def run(self) -> tuple[OpSpan, ...]:
        log, progress = [], self.links.progress
        progress.attach(self.work.streams, self.program.stream)
        for op, use in self.program.ops:
            progress.enter(op)
            start = time.perf_counter()
            self._run(op, use)
            log.append(OpSpan(op=op, start=start, end=time.perf_counter()))
            progress.leave(op)
        progress.enter(SENDING)
        for send, _ in self.outgoing:
            send.wait()
        self.work.streams.join()
        unused = [*self.inputs, *self.gradients, *self.segment_runs]
        assert not unused, f"the schedule ended with unused tensors or unfinished segments: {unused}"
        progress.detach()
        progress.enter("after the last op")
        return tuple(log)

    def _run(self, op: Op, use: Use) -> None:
        if op.act.shards:
            self.weights.run(op)
        elif op.act is Act.SUM_COPIES:
            self.work.sum_copies(op)
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
                    self.inputs[_next(turn)] = y
                if segment_run.forward_done:
                    self.work.after_forward(turn)
            case Act.B:
                if not segment_run.backward_begun and turn in self.gradients:
                    segment_run.set_output_grad(self.gradients.pop(turn))
                segment_run.backward(op)
                if (gradient := segment_run.take_input_grad()) is not None:
                    self.gradients[_previous(turn)] = gradient
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
        self.segment_runs[turn] = segment_run
        return segment_run

    # ------------------------------------------------------------------------------------- messages

    def _transfer(self, turn: Turn, op: Op) -> None:
        match op.act:
            case Act.SEND_F:
                self._send(op, self.inputs.pop(_next(turn)))
            case Act.SEND_B:
                self._send(op, self.gradients.pop(_previous(turn)))
            case Act.RECV_F:
                self.inputs[turn] = self._receive(op)
            case _:
                self.gradients[turn] = self._receive(op)

    def _send(self, op: Op, message: Tensor) -> None:
        group = self.links.channels[channel_of(self.program.rank, op)]
        message = message.contiguous()
        send = dist.isend(message, group=group.handle, group_dst=1 - group.rank)
        assert send is not None
        self.outgoing = [(work, buffer) for work, buffer in self.outgoing if not work.is_completed()]
        self.outgoing.append((send, message))

    def _receive(self, op: Op) -> Tensor:
        group = self.links.channels[channel_of(self.program.rank, op)]
        message = self.links.message()
        dist.recv(message, group=group.handle, group_src=1 - group.rank)
        return message


def _next(turn: Turn) -> Turn:
    return turn[0], turn[1] + 1


def _previous(turn: Turn) -> Turn:
    return turn[0], turn[1] - 1
