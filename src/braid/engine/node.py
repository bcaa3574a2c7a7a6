"""Nodes: one micro-batch on its way through the phases of a segment, each with a graph of its own.

A node is given tensors without a past, runs its phase, and keeps of it what a backward needs: where its graph
ends (`GradientEdge`), not the tensors themselves. Its backward is one `torch.autograd.backward` over all it
wrote and cost; what comes out at the other end waits for the node that wrote it. So between two nodes there is
nothing but declared tensors and their gradients, and what no graph has saved is free once its last reader ran.

Why this is bitwise what one backward over the whole segment gives: autograd runs a graph from its newest
function to its oldest. Nodes go backward from the last to the first, so every sum of gradients, whether over
the readers of a tensor or over the uses of a parameter, has the same terms in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from braid.engine.streams import Issued, Streams
from braid.schedule import Op, Phase, Schedule, Stream, Turn
from braid.schedule.phases import IN, OUT, named, readers, shared_by

Function = Callable[[Mapping[str, Tensor]], tuple[Mapping[str, Tensor], Tensor | None]]
"""From the tensors that a phase reads to those that it writes, and to what it adds to the loss."""


class StepWork:
    """What the phases of a schedule mean to whoever has them run. An evaluation needs no more than
    `function`."""

    streams: Streams

    def function(self, turn: Turn, phase: Phase) -> Function:
        raise NotImplementedError

    def after_forward(self, turn: Turn) -> None:
        """All phases of a segment have run forward."""

    def after_turn(self, turn: Turn) -> None:
        """Nothing more of a micro-batch is to run in a segment."""

    def parameter(self, name: str) -> nn.Parameter:
        """One that a phase declares as shared."""
        raise NotImplementedError

    def weights_of(self, phase: Phase) -> Sequence[Tensor]:
        """Those that a phase of the communication stream uses."""
        return ()

    def delaying(self, turn: Turn, phase: Phase) -> AbstractContextManager[Any]:
        """What surrounds a backward that leaves its weight gradients behind."""
        raise NotImplementedError

    def weights(self, turn: Turn, phase: Phase, bucket: str) -> None:
        """Add the weight gradients that a backward left behind in a bucket."""
        raise NotImplementedError

    def replay(self, turn: Turn, phase: Phase, hold: Callable[[Tensor], None]) -> None:
        """Make again what a forward has not kept. `hold` is told of what other replays made."""
        raise NotImplementedError

    def sum_copies(self, op: Op) -> None:
        """Sum the gradients of a weight that several stages hold."""
        raise NotImplementedError


class ForeignGraphError(RuntimeError):
    """A node has reached into the graph of another one: a mistake in braid."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Looks at nodes while they run: what went where, and whose graph is whose."""

    issued: list[Issued] = field(default_factory=list)
    """Every node, in the order of issue."""
    owners: dict[Node, str] = field(default_factory=dict)
    """The node to which each function of a graph belongs that has not run backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tensor between two nodes, or the terms of its gradient, with the node that made it."""

    name: str
    tensors: list[Tensor]
    """There once the event was waited for. A gradient has a term for every use by the node."""
    kept: _Kept | None = None
    """What the node that wrote it has kept; None for a gradient, and for what came from outside."""
    op: Op | None = None
    """None for what came from outside of the segment."""
    stream: Stream = Stream.COMPUTE
    event: Any = None

    @property
    def tensor(self) -> Tensor:
        (only,) = self.tensors
        return only

    @property
    def differentiable(self) -> bool:
        return self.kept is None or self.name in self.kept.edges


class _Entry(torch.autograd.Function):
    """Where a tensor enters the graph of a node; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor], tensor: Tensor) -> Tensor:
        ctx.box = box
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.box.append(grads[0])
        return None, None, None


@dataclass(kw_only=True)
class _Kept:
    """What a node's forward leaves for its backward: no tensor."""

    edges: dict[str, GradientEdge] = field(default_factory=dict)
    """Where the graph of each tensor ends that it wrote."""
    cost: tuple[GradientEdge, Tensor] | None = None
    """Where the graph of its cost ends, and a one."""
    boxes: dict[str, list[Tensor]] = field(default_factory=dict)
    """Where the gradient of each tensor arrives that it read."""
    functions: set[Node] = field(default_factory=set)
    """Its graph, where somebody wants to know."""


@dataclass(kw_only=True)
class _Shared:
    """The gradient of a parameter that several nodes use, until the last of them has run backward."""

    parameter: nn.Parameter
    users: int
    gradient: Tensor | None = None


class SegmentRun:
    """One micro-batch in one segment."""

    def __init__(self, turn: Turn, schedule: Schedule, work: StepWork, *, watch: Watch | None = None) -> None:
        """Under a watch, a node that reaches into another one's graph is refused."""
        self.turn, self.work, self.streams = turn, work, work.streams
        phases, delayed = schedule.phases[turn[1]], schedule.delayed
        self.phases = {phase.name: phase for phase in phases}
        self.watch = watch
        self._made: dict[str, Made] = {}
        read_by = readers(phases)
        self._readers = {name: len(found) for name, found in read_by.items()}
        """How many nodes have yet to read each tensor."""
        self._in_readers = read_by.get(IN, ())
        self._gradients: dict[str, list[Made]] = {}
        self._kept: dict[str, _Kept] = {}
        self._users = dict(shared_by(phases)) if schedule.backward else {}
        self._shared: dict[str, _Shared] = {}
        self._replayed: dict[str, Made] = {}
        """Tensors that replays have made again: who made them, and where."""
        self._to_forward = set(self.phases)
        self._to_backward = set(self.phases) if schedule.backward else set[str]()
        self._named, self._delayed = named(phases), delayed
        self._to_weigh = {bucket for phase in phases for bucket in phase.buckets if delayed}
        """Buckets with weight gradients that nobody has added."""
        self._anchors: dict[Stream, Tensor] = {}
        """What graphs begin with: one for each stream, as autograd joins its stream to that of the backward."""

    # ------------------------------------------------------------------------------------ outside

    def give(self, tensor: Tensor) -> None:
        """What the segment before this one wrote."""
        self._made[IN] = Made(name=IN, tensors=[tensor])

    def give_gradient(self, gradient: Tensor) -> None:
        """Of what this segment wrote."""
        self._gradients[OUT] = [Made(name=OUT, tensors=[gradient])]

    def take(self) -> Tensor | None:
        """What this segment wrote, once it did."""
        return self._for_outside(self._made.pop(OUT)) if OUT in self._made else None

    def take_gradient(self) -> Tensor | None:
        """Of what this segment was given, once all its readers have run backward."""
        if IN not in self._gradients or not self._to_backward.isdisjoint(self._in_readers):
            return None
        return _sum([self._for_outside(made) for made in self._gradients.pop(IN)])

    def _for_outside(self, made: Made) -> Tensor:
        """Messages go from the stream that computes."""
        if made.stream is not Stream.COMPUTE:
            self.streams.wait(Stream.COMPUTE, made.event)
            self.streams.hold(made.tensor, Stream.COMPUTE)
        return made.tensor

    @property
    def forward_done(self) -> bool:
        return not self._to_forward

    @property
    def backward_begun(self) -> bool:
        return len(self._to_backward) < len(self.phases)

    @property
    def done(self) -> bool:
        return not self._to_forward and not self._to_backward and not self._to_weigh

    # ------------------------------------------------------------------------------------- forward

    def forward(self, op: Op) -> None:
        phase = self._phase(op)
        self._to_forward.remove(phase.name)
        given = {name: self._read(name) for name in phase.reads}
        kept = self._kept[phase.name] = _Kept()
        function = self.work.function(self.turn, phase)
        for name in phase.shared:
            if name in self._users and name not in self._shared:
                users = len(self._users[name])
                self._shared[name] = _Shared(parameter=self.work.parameter(name), users=users)
        self._begin(op, phase.stream, given.items())
        results: dict[str, list[Tensor]] = {name: [] for name in phase.writes}

        def job() -> None:
            entered = {name: self._enter(name, made, kept, phase.stream) for name, made in given.items()}
            given.clear()
            written, cost = function(entered)
            assert written.keys() == results.keys(), f"{phase.name} wrote {list(written)}"
            if cost is not None:
                kept.cost = get_gradient_edge(cost), torch.ones_like(cost)
            for name, tensor in written.items():
                if tensor.requires_grad:
                    kept.edges[name] = get_gradient_edge(tensor)
                results[name].append(tensor.detach())
            if self.watch is not None:
                self._claim(phase, kept, self.watch.owners)

        event = self._issue(phase, job)
        for name, tensors in results.items():
            made = Made(name=name, tensors=tensors, kept=kept, op=op, stream=phase.stream, event=event)
            self._made[name] = made

    def _read(self, name: str) -> Made:
        """A tensor; gone once its last reader has it."""
        self._readers[name] -= 1
        return self._made[name] if self._readers[name] else self._made.pop(name)

    def _enter(self, name: str, made: Made, kept: _Kept, stream: Stream) -> Tensor:
        if not made.differentiable or not self._to_backward:
            return made.tensor
        if stream not in self._anchors:
            self._anchors[stream] = made.tensor.new_empty(0, requires_grad=True)
        entered: Tensor = _Entry.apply(self._anchors[stream], kept.boxes.setdefault(name, []), made.tensor)
        return entered

    # ------------------------------------------------------------------------------------ backward

    def backward(self, op: Op) -> None:
        phase = self._phase(op)
        self._to_backward.remove(phase.name)
        kept = self._kept.pop(phase.name)
        arrived = [made for name in phase.writes for made in self._gradients.pop(name, ())]
        self._begin(op, phase.stream, [(f"grad:{made.name}", made) for made in arrived])

        def job() -> None:
            edges, gradients = [], []
            for name in phase.writes:
                terms = [tensor for made in arrived if made.name == name for tensor in made.tensors]
                if terms and name in kept.edges:
                    edges.append(kept.edges[name])
                    gradients.append(_sum(terms))
                del terms
            if kept.cost is not None:
                edges.append(kept.cost[0])
                gradients.append(kept.cost[1])
            arrived.clear()
            self._run_backward(phase, edges, gradients)
            if self.watch is not None:
                for function in kept.functions:
                    del self.watch.owners[function]

        event = self._issue(phase, job)
        for name, box in kept.boxes.items():
            made = Made(name=name, tensors=box, op=op, stream=phase.stream, event=event)
            self._gradients.setdefault(name, []).append(made)

    def _run_backward(self, phase: Phase, edges: list[GradientEdge], gradients: list[Tensor]) -> None:
        """One backward. A shared parameter shows it the gradient of this micro-batch alone, which is added to
        that of the others as a whole: as autograd does it for a graph in one piece."""
        shared = [self._shared[name] for name in phase.shared if name in self._shared]
        others = [each.parameter.grad for each in shared]
        for each in shared:
            each.parameter.grad = each.gradient
        delays = self._delayed and phase.buckets
        with self.work.delaying(self.turn, phase) if delays else nullcontext():
            if edges:  # none, where nothing up to here learns
                run_backward(edges, gradients)
        for each, other in zip(shared, others, strict=True):
            each.gradient, each.parameter.grad = each.parameter.grad, other
            each.users -= 1
            if not each.users and each.gradient is not None:
                each.parameter.grad = each.gradient if other is None else other.add_(each.gradient)
                each.gradient = None

    def weights(self, op: Op) -> None:
        phase, bucket = self._phase(op), op.phase
        assert bucket is not None
        assert bucket in self._to_weigh, f"{op} has run before, or there is no such bucket"
        assert phase.name not in self._to_backward, f"{op} comes before its backward"
        self._to_weigh.remove(bucket)
        self._begin(op, phase.stream, ())

        def job() -> None:
            self.work.weights(self.turn, phase, bucket)

        self._issue(phase, job)

    def replay(self, op: Op) -> None:
        phase = self._phase(op)
        assert phase.name in self._to_backward
        again = [(f"again:{name}", self._replayed[name]) for name in phase.reads if name in self._replayed]
        self._begin(op, phase.stream, again)
        hold = partial(self.streams.hold, stream=phase.stream)
        event = self._issue(phase, lambda: self.work.replay(self.turn, phase, hold))
        for name in phase.writes:
            self._replayed[name] = Made(name=name, tensors=[], op=op, stream=phase.stream, event=event)

    # --------------------------------------------------------------------------------------- parts

    def _phase(self, op: Op) -> Phase:
        assert op.phase is not None
        return self._named[op.phase]

    def _begin(self, op: Op, stream: Stream, uses: Iterable[tuple[str, Made]]) -> None:
        """Wait for what comes from the other stream, hold it, and write down both."""
        foreign = [(name, made) for name, made in uses if made.stream is not stream]
        waits: dict[Op, Any] = {made.op: made.event for _, made in foreign if made.op is not None}
        for event in waits.values():
            self.streams.wait(stream, event)
        for _, made in foreign:
            if made.op is None:  # it was there before this segment began
                self.streams.wait(stream, self.streams.mark(made.stream))
            for tensor in made.tensors:
                self.streams.hold(tensor, stream)
        if stream is Stream.COMMUNICATION:
            self._use_weights(op)
        if self.watch is not None:
            holds = tuple(name for name, _ in foreign)
            self.watch.issued.append(Issued(op=op, stream=stream, waits=tuple(waits), holds=holds))

    def _issue(self, phase: Phase, job: Callable[[], None]) -> Any:
        """Whatever comes next may release weights."""
        event = self.streams.issue(phase.stream, job)
        if phase.stream is Stream.COMMUNICATION and self.work.weights_of(phase):
            self.streams.settle(event)
        return event

    def _use_weights(self, op: Op) -> None:
        """Weights come and go on the stream that computes: one that is used on the other has to be there."""
        used = self.work.weights_of(self._phase(op))
        if used:
            self.streams.wait(Stream.COMMUNICATION, self.streams.mark(Stream.COMPUTE))
        for weight in used:
            self.streams.hold(weight, Stream.COMMUNICATION)

    def _claim(self, phase: Phase, kept: _Kept, owners: dict[Node, str]) -> None:
        """Walk the graph of a node, from where it ends: all of it must be its own."""
        owner = f"{phase.name} of micro-batch {self.turn[0]}"
        waiting = [edge.node for edge in kept.edges.values()] + ([kept.cost[0].node] if kept.cost else [])
        while waiting:
            function = waiting.pop()
            if function is None or function.name() == "torch::autograd::AccumulateGrad":
                continue
            other = owners.setdefault(function, owner)
            if other != owner:
                raise ForeignGraphError(f"{owner} has reached into the graph of {other}, by {function.name()}")
            if function not in kept.functions:
                kept.functions.add(function)
                waiting += [edge for edge, _ in function.next_functions if edge is not None]


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without what it checks first: on a host that is in a hurry, that takes as long
    as the backward of a small node. The gradients are known to have the shapes of what they belong to."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """In the order in which the readers ran backward."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
