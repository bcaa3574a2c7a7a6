"""The executor: runs the list of ops that a plan has for a pipeline rank, one after the other, and logs them.

Nothing is decided here. Between phases, and between segments, a tensor crosses as data: it is detached where a
phase reads it, and its gradient is handed back when that phase's backward is done (`node` has what happens
within a segment). Ops about weights go to whoever keeps them (`weights`), all others to the `Work` of the step.
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

SENDING = "messages on their way"
"""What a rank waits for once its ops have run."""


@dataclass(frozen=True, kw_only=True)
class PipelineLinks:
    """How a rank reaches its neighbours in the pipeline, and whoever watches it."""

    channels: Mapping[Channel, Group]
    """A communicator of two for every channel, the sender first. Empty without a pipeline."""
    message: Callable[[], Tensor]
    """Memory for one message."""
    progress: Progress = field(default_factory=Progress)
    """Where the rank says what it is doing."""


class Program:
    """The list of one pipeline rank, with what each op does with units: worked out once, run every step."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        assert schedule.weights != "unplaced", "the schedule is not lowered"
        self.schedule, self.rank = schedule, rank
        uses = uses_of(schedule)
        self.ops: tuple[tuple[Op, Use], ...] = tuple((op, uses(op)) for op in schedule.ops[rank])
        self.stream = stream_of(schedule)


def execute(
    program: Program, work: StepWork, weights: Weights, links: PipelineLinks, watch: Watch | None = None
) -> tuple[OpSpan, ...]:
    """Run a program, and return what ran when, in seconds of this process's clock. A step that fails leaves
    nothing behind in the weights."""
    weights.begin()
    try:
        # To wake another thread for the backward of every node takes the host longer than many of them.
        with torch.autograd.set_multithreading_enabled(False):
            return _Execution(program, work, weights, links, watch).run()
    except BaseException:
        weights.abort()
        raise


class _Execution:
    """The state of one run of one list."""

    def __init__(
        self, program: Program, work: StepWork, weights: Weights, links: PipelineLinks, watch: Watch | None
    ) -> None:
        self.program, self.schedule = program, program.schedule
        self.work, self.weights, self.links, self.watch = work, weights, links, watch
        self.inputs: dict[Turn, Tensor] = {}
        """What a segment is going to read."""
        self.gradients: dict[Turn, Tensor] = {}
        """What the backward of a segment is going to begin with."""
        self.outgoing: list[tuple[dist.Work, Tensor]] = []
        """Messages that may still be on their way, with their memory."""
        self.segment_runs: dict[Turn, SegmentRun] = {}

    def run(self) -> tuple[OpSpan, ...]:
        log, progress = [], self.links.progress
        progress.follow(self.work.streams, self.program.stream)
        for op, use in self.program.ops:
            progress.enter(op)
            start = time.perf_counter()
            self._run(op, use)
            log.append(OpSpan(op=op, start=start, end=time.perf_counter()))
            progress.leave(op)
        progress.enter(SENDING)
        for sending, _ in self.outgoing:
            sending.wait()
        self.work.streams.join()
        left = [*self.inputs, *self.gradients, *self.segment_runs]
        assert not left, f"a schedule uses everything that it makes: {left}"
        progress.unfollow()
        progress.enter("what follows the ops")
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

    # ------------------------------------------------------------------------------------ computing

    def _compute(self, turn: Turn, op: Op) -> None:
        segment_run = self.segment_runs.get(turn) or self._begin(turn)
        match op.act:
            case Act.F:
                segment_run.forward(op)
                if (y := segment_run.take()) is not None:
                    self.inputs[_next(turn)] = y
                if segment_run.forward_done:
                    self.work.after_forward(turn)
            case Act.B:
                if not segment_run.backward_begun and turn in self.gradients:
                    segment_run.give_gradient(self.gradients.pop(turn))
                segment_run.backward(op)
                if (gradient := segment_run.take_gradient()) is not None:
                    self.gradients[_before(turn)] = gradient
            case Act.RECOMPUTE:
                segment_run.replay(op)
            case _:
                segment_run.weights(op)
        if segment_run.done:
            del self.segment_runs[turn]
            self.work.after_turn(turn)

    def _begin(self, turn: Turn) -> SegmentRun:
        segment_run = SegmentRun(turn, self.schedule, self.work, watch=self.watch)
        if turn in self.inputs:
            segment_run.give(self.inputs.pop(turn))
        self.segment_runs[turn] = segment_run
        return segment_run

    # ------------------------------------------------------------------------------------- messages

    def _transfer(self, turn: Turn, op: Op) -> None:
        match op.act:
            case Act.SEND_F:
                self._send(op, self.inputs.pop(_next(turn)))
            case Act.SEND_B:
                self._send(op, self.gradients.pop(_before(turn)))
            case Act.RECV_F:
                self.inputs[turn] = self._receive(op)
            case _:
                self.gradients[turn] = self._receive(op)

    def _send(self, op: Op, message: Tensor) -> None:
        group = self.links.channels[channel_of(self.program.rank, op)]
        message = message.contiguous()
        sending = dist.isend(message, group=group.handle, group_dst=1 - group.rank)
        assert sending is not None
        self.outgoing = [(each, kept) for each, kept in self.outgoing if not each.is_completed()]
        self.outgoing.append((sending, message))

    def _receive(self, op: Op) -> Tensor:
        group = self.links.channels[channel_of(self.program.rank, op)]
        message = self.links.message()
        dist.recv(message, group=group.handle, group_src=1 - group.rank)
        return message


def _next(turn: Turn) -> Turn:
    return turn[0], turn[1] + 1


def _before(turn: Turn) -> Turn:
    return turn[0], turn[1] - 1
