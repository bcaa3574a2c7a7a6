"""The interpreter of schedules: one op after the other, and a log of what it ran.

Between segments a tensor crosses as data: it is detached where a segment reads it, and its gradient is handed
back when that segment's backward is done. So the graph of a segment is its own, and is gone after its backward.
Where a schedule goes into phases, the same holds between them: `node` has what happens there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from braid.collectives import Group
from braid.engine.node import NodeWork, Passage, Turn, Watch
from braid.engine.progress import Progress
from braid.schedule import Act, Channel, Op, Schedule, Span, channel_of
from braid.schedule.views import stream_of

__all__ = ["SENDING", "Turn", "Wires", "Work", "execute"]

SENDING = "messages on their way"
"""What a rank waits for once its ops have run."""


class Work(Protocol):
    """What the ops of a schedule mean to whoever has them run."""

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Run a segment on what the one before it returned, None for the first. Returns what the next one
        reads, None after the last; and what this one adds to the loss, None where that is nothing."""
        ...

    def before_backward(self, turn: Turn) -> None: ...

    def after_backward(self, turn: Turn) -> None: ...

    def sum_copies(self, op: Op) -> None:
        """Sum the gradients of a weight that several stages hold."""
        ...


class _Held(NamedTuple):
    """What a forward leaves for its backward."""

    x: Tensor | None
    y: Tensor | None
    cost: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Wires:
    """How a rank reaches its neighbours in the pipeline, and whoever watches it."""

    channels: Mapping[Channel, Group]
    """A communicator of two for every channel, the sender first. Empty without a pipeline."""
    message: Callable[[], Tensor]
    """Memory for one message."""
    progress: Progress = field(default_factory=Progress)
    """Where the rank says what it is doing."""


def execute(
    schedule: Schedule, rank: int, work: Work, wires: Wires, watch: Watch | None = None
) -> tuple[Span, ...]:
    """Run the ops of a pipeline rank, and return what ran when, in seconds of this process's clock. `work` is
    a `NodeWork` as well where the schedule goes into phases."""
    return Executor(schedule, rank, work, wires, watch).run()


class Executor:
    """The state of one run of one list."""

    def __init__(
        self, schedule: Schedule, rank: int, work: Work, wires: Wires, watch: Watch | None = None
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self.work, self.wires, self.watch = work, wires, watch
        self.inputs: dict[Turn, Tensor] = {}
        """What a forward is going to read."""
        self.gradients: dict[Turn, Tensor] = {}
        """What a backward is going to begin with."""
        self.held: dict[Turn, _Held] = {}
        self.outgoing: list[tuple[dist.Work, Tensor]] = []
        """Messages that may still be on their way, with their memory."""
        self.passages: dict[Turn, Passage] = {}

    def run(self) -> tuple[Span, ...]:
        # To wake another thread for the backward of every node takes the host longer than many of them.
        with torch.autograd.set_multithreading_enabled(False):
            return self._run_all()

    def _run_all(self) -> tuple[Span, ...]:
        log, progress = [], self.wires.progress
        progress.follow(
            cast(NodeWork, self.work).streams if self.schedule.phases else None, stream_of(self.schedule)
        )
        for op in self.schedule.ops[self.rank]:
            progress.enter(op)
            start = time.perf_counter()
            self._run(op)
            log.append(Span(op=op, start=start, end=time.perf_counter()))
            progress.leave(op)
        progress.enter(SENDING)
        for sending, _ in self.outgoing:
            sending.wait()
        if self.schedule.phases:
            cast(NodeWork, self.work).streams.join()
        left = [*self.inputs, *self.gradients, *self.held, *self.passages]
        assert not left, f"a schedule uses everything that it makes: {left}"
        progress.unfollow()
        progress.enter("what follows the ops")
        return tuple(log)

    def _run(self, op: Op) -> None:
        if op.act is Act.SUM_COPIES:
            self.work.sum_copies(op)
            return
        assert op.micro_batch is not None
        assert op.segment is not None
        turn = (op.micro_batch, op.segment)
        match op.act:
            case Act.F | Act.B | Act.W | Act.RECOMPUTE if op.phase is not None:
                self._run_node(turn, op)
            case Act.F:
                self._forward(turn)
            case Act.B:
                self._backward(turn)
            case Act.SEND_F:
                self._send(op, self.inputs.pop(_next(turn)))
            case Act.SEND_B:
                self._send(op, self.gradients.pop(_before(turn)))
            case Act.RECV_F:
                self.inputs[turn] = self._receive(op)
            case Act.RECV_B:
                self.gradients[turn] = self._receive(op)

    # ------------------------------------------------------------------------------------ computing

    def _forward(self, turn: Turn) -> None:
        x = self.inputs.pop(turn, None)
        if x is not None and self.schedule.backward:
            x = x.detach().requires_grad_()
        y, cost = self.work.forward(turn, x)
        if y is not None:
            self.inputs[_next(turn)] = y.detach()
        if self.schedule.backward:
            self.held[turn] = _Held(x, y, cost)

    def _backward(self, turn: Turn) -> None:
        x, y, cost = self.held.pop(turn)
        self.work.before_backward(turn)
        roots: list[tuple[Tensor, Tensor | None]] = []
        if y is not None:
            roots.append((y, self.gradients.pop(turn)))
        if cost is not None:
            roots.append((cost, None))
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        if x is not None:
            assert x.grad is not None
            self.gradients[_before(turn)] = x.grad
        self.work.after_backward(turn)

    # ----------------------------------------------------------------------------------------- nodes

    def _run_node(self, turn: Turn, op: Op) -> None:
        passage = self.passages.get(turn) or self._begin(turn)
        match op.act:
            case Act.F:
                passage.forward(op)
                if (y := passage.take()) is not None:
                    self.inputs[_next(turn)] = y
                if passage.forward_done:
                    passage.work.after_forward(turn)
            case Act.B:
                if not passage.backward_begun:
                    self.work.before_backward(turn)
                    if turn in self.gradients:
                        passage.give_gradient(self.gradients.pop(turn))
                passage.backward(op)
                if (gradient := passage.take_gradient()) is not None:
                    self.gradients[_before(turn)] = gradient
            case Act.RECOMPUTE:
                passage.replay(op)
            case _:
                passage.weights(op)
        if passage.done:
            del self.passages[turn]
            self.work.after_backward(turn)

    def _begin(self, turn: Turn) -> Passage:
        work, phases = cast(NodeWork, self.work), self.schedule.phases[turn[1]]
        passage = Passage(turn, phases, work, delayed=self.schedule.delayed, watch=self.watch)
        if turn in self.inputs:
            passage.give(self.inputs.pop(turn))
        self.passages[turn] = passage
        return passage

    # ------------------------------------------------------------------------------------- messages

    def _send(self, op: Op, message: Tensor) -> None:
        group = self.wires.channels[channel_of(self.rank, op)]
        message = message.contiguous()
        sending = dist.isend(message, group=group.handle, group_dst=1 - group.rank)
        assert sending is not None
        self.outgoing = [(each, kept) for each, kept in self.outgoing if not each.is_completed()]
        self.outgoing.append((sending, message))

    def _receive(self, op: Op) -> Tensor:
        group = self.wires.channels[channel_of(self.rank, op)]
        message = self.wires.message()
        dist.recv(message, group=group.handle, group_src=1 - group.rank)
        return message


def _next(turn: Turn) -> Turn:
    return turn[0], turn[1] + 1


def _before(turn: Turn) -> Turn:
    return turn[0], turn[1] - 1
