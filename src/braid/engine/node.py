"""Autograd nodes: runs one micro-batch through the phases of a segment, each phase with its own autograd graph.

A node is one phase for one micro-batch in one direction. Its inputs are detached. Its forward keeps only the
`GradientEdge`s of its outputs and of its loss term, not the tensors, so any tensor that autograd has not saved
is freed after its last reader. Its backward is a single `torch.autograd.backward` from those edges; the
resulting input gradients wait for the backward of the node that wrote the tensor. Only declared tensors and
their gradients pass between nodes.

The gradients are bitwise those of one backward over the whole segment. Autograd runs a graph from the newest
function to the oldest, and nodes run backward from last to first, so every gradient sum, whether over the
readers of a tensor or over the uses of a parameter, adds the same terms in the same order.
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

from braid.engine.streams import IssuedNode, Streams
from braid.schedule import Op, Phase, Schedule, Stream, Turn
from braid.schedule.phases import IN, OUT, named, readers, shared_by

PhaseFn = Callable[[Mapping[str, Tensor]], tuple[Mapping[str, Tensor], Tensor | None]]
"""The forward of a phase: from the tensors it reads to those it writes, and to its term of the loss, if any."""


class StepWork:
    """What the ops of a schedule compute. An evaluation implements `function` only."""

    streams: Streams

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        raise NotImplementedError

    def after_forward(self, turn: Turn) -> None:
        """Called when all phases of a segment have run forward."""

    def after_turn(self, turn: Turn) -> None:
        """Called when a micro-batch has no ops left in a segment."""

    def parameter(self, turn: Turn, name: str) -> nn.Parameter:
        """A parameter that a phase declares as shared."""
        raise NotImplementedError

    def weights_of(self, turn: Turn, phase: Phase) -> Sequence[Tensor]:
        """The weights that a phase uses on the communication stream."""
        return ()

    def delay_wgrad(self, turn: Turn, phase: Phase) -> AbstractContextManager[Any]:
        """A context in which backward stores its weight gradient GEMMs instead of running them."""
        raise NotImplementedError

    def run_wgrad(self, turn: Turn, phase: Phase, bucket: str) -> None:
        """Run the delayed weight gradient GEMMs of a bucket."""
        raise NotImplementedError

    def replay(self, turn: Turn, phase: Phase, hold: Callable[[Tensor], None]) -> None:
        """Recompute what the forward of a phase has not saved. Call `hold` on each input that another phase has
        recomputed: it may come from the other stream."""
        raise NotImplementedError

    def copy_block(self, op: Op) -> None:
        """Run an `OFFLOAD`, `FREE` or `RELOAD`."""
        raise NotImplementedError

    def await_block(self, turn: Turn, phase: Phase) -> None:
        """Make a phase wait for what has been reloaded of its block, if that was offloaded."""
        raise NotImplementedError

    def sum_copies(self, op: Op) -> None:
        """All-reduce the gradient of a weight that several stages hold."""
        raise NotImplementedError


class ForeignGraphError(RuntimeError):
    """The graph of a node reaches into that of another node. A bug in braid."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Records the execution of nodes for tests, and checks that their graphs are disjoint."""

    issued: list[IssuedNode] = field(default_factory=list)
    """All nodes in issue order."""
    owners: dict[Node, str] = field(default_factory=dict)
    """The node that owns each autograd function, until its backward has run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTensor:
    """A tensor that passes between nodes, or the terms of its gradient, and the node that produced it."""

    name: str
    tensors: list[Tensor]
    """Filled once `event` has completed. A gradient has one term per use by the producing node."""
    graph: _Graph | None = None
    """The graph of the producing node; None for a gradient and for a segment input."""
    op: Op | None = None
    """The producer; None for a segment input."""
    stream: Stream = Stream.COMPUTE
    event: Any = None

    @property
    def tensor(self) -> Tensor:
        (only,) = self.tensors
        return only

    @property
    def differentiable(self) -> bool:
        return self.graph is None or self.name in self.graph.edges


class _CaptureGrad(torch.autograd.Function):
    """Detaches an input of a node, and collects its gradient in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, terms: list[Tensor], tensor: Tensor) -> Tensor:
        ctx.terms = terms
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.terms.append(grads[0])
        return None, None, None


@dataclass(kw_only=True)
class _Graph:
    """What the forward of a node keeps for its backward. It holds no activations."""

    edges: dict[str, GradientEdge] = field(default_factory=dict)
    """The gradient edge of each output."""
    cost: tuple[GradientEdge, Tensor] | None = None
    """The gradient edge of its loss term, and that term's gradient, a one."""
    input_grads: dict[str, list[Tensor]] = field(default_factory=dict)
    """Receives the gradient terms of each input."""
    functions: set[Node] = field(default_factory=set)
    """All autograd functions of the graph, under a `Watch`."""


@dataclass(kw_only=True)
class _SharedGrad:
    """The gradient of a parameter that several nodes use, until the last of them has run backward."""

    parameter: nn.Parameter
    users: int
    gradient: Tensor | None = None


class SegmentRun:
    """One micro-batch in one segment."""

    def __init__(self, turn: Turn, schedule: Schedule, work: StepWork, *, watch: Watch | None = None) -> None:
        """With a `watch`, a node whose graph reaches into another node's raises."""
        self.turn, self.work, self.streams = turn, work, work.streams
        phases, delayed = schedule.phases[turn[1]], schedule.delayed
        self.phases = {phase.name: phase for phase in phases}
        self.watch = watch
        self._tensors: dict[str, NodeTensor] = {}
        read_by = readers(phases)
        self._readers_left = {name: len(names) for name, names in read_by.items()}
        """How many nodes have yet to read each tensor."""
        self._read_by = read_by
        self._gradients: dict[str, list[NodeTensor]] = {}
        self._graphs: dict[str, _Graph] = {}
        self._users = dict(shared_by(phases)) if schedule.backward else {}
        self._shared: dict[str, _SharedGrad] = {}
        self._recomputed: dict[str, NodeTensor] = {}
        """Recomputed tensors: only their producers and events, the tensors are in the `StepWork`."""
        self._pending_forward = set(self.phases)
        self._pending_backward = {phase.name for phase in phases if schedule.backward and phase.backward}
        self._backwards = len(self._pending_backward)
        before = schedule.graph.previous(turn[1])
        self._input_has_grad = before is None or schedule.has_backward(before)
        self._named, self._delayed = named(phases), delayed
        self._offloads = any(schedule.offloaded)
        self._pending_wgrad = {bucket for phase in phases for bucket in phase.buckets if delayed}
        """Buckets whose weight gradients have not been computed."""
        self._anchors: dict[Stream, Tensor] = {}
        """A leaf per stream that makes `_CaptureGrad` part of a graph. Autograd synchronises the stream of a
        leaf with that of the backward, hence one for each stream."""

    # ------------------------------------------------------------------------- inputs and outputs

    def set_input(self, tensor: Tensor) -> None:
        self.give(IN, tensor, has_grad=self._input_has_grad)

    def give(self, name: str, tensor: Tensor, *, has_grad: bool) -> None:
        """A tensor that a phase reads and none of the segment writes: its input, or the rows of an edge."""
        # With a graph that has no edge to it, a tensor gets no gradient.
        graph = None if has_grad else _Graph()
        self._tensors[name] = NodeTensor(name=name, tensors=[tensor], graph=graph)

    def set_output_grad(self, gradient: Tensor) -> None:
        self._gradients[OUT] = [NodeTensor(name=OUT, tensors=[gradient])]

    def take_output(self) -> Tensor | None:
        """The output of the segment; None until it is there."""
        return self._on_compute_stream(self._tensors.pop(OUT)) if OUT in self._tensors else None

    def take_input_grad(self, name: str = IN) -> Tensor | None:
        """The gradient of a tensor that was given; None until all its readers have run backward."""
        if name not in self._gradients or not self._pending_backward.isdisjoint(self._read_by.get(name, ())):
            return None
        return _sum([self._on_compute_stream(term) for term in self._gradients.pop(name)])

    def _on_compute_stream(self, tensor: NodeTensor) -> Tensor:
        """Pipeline messages are sent from the compute stream."""
        if tensor.stream is not Stream.COMPUTE:
            self.streams.wait(Stream.COMPUTE, tensor.event)
            self.streams.record_stream(tensor.tensor, Stream.COMPUTE)
        return tensor.tensor

    @property
    def forward_done(self) -> bool:
        return not self._pending_forward

    @property
    def backward_begun(self) -> bool:
        return len(self._pending_backward) < self._backwards

    @property
    def done(self) -> bool:
        return not self._pending_forward and not self._pending_backward and not self._pending_wgrad

    # ------------------------------------------------------------------------------------- forward

    def forward(self, op: Op) -> None:
        phase = self._phase(op)
        self._pending_forward.remove(phase.name)
        inputs = {name: self._read(name) for name in phase.reads}
        graph = self._graphs[phase.name] = _Graph()
        function = self.work.function(self.turn, phase)
        for name in phase.shared:
            if name in self._users and name not in self._shared:
                users = len(self._users[name])
                self._shared[name] = _SharedGrad(parameter=self.work.parameter(self.turn, name), users=users)
        self._wait_for_inputs(op, phase.stream, inputs.items())
        outputs: dict[str, list[Tensor]] = {name: [] for name in phase.writes}

        def job() -> None:
            detached = {name: self._detach(name, x, graph, phase.stream) for name, x in inputs.items()}
            inputs.clear()  # the last references of inputs that have no other reader
            with nullcontext() if phase.backward else torch.no_grad():
                written, cost = function(detached)
            assert written.keys() == outputs.keys(), (
                f"phase {phase.name} wrote {list(written)}, but declares {list(outputs)}"
            )
            if cost is not None:
                graph.cost = get_gradient_edge(cost), torch.ones_like(cost)
            for name, tensor in written.items():
                if tensor.requires_grad:
                    graph.edges[name] = get_gradient_edge(tensor)
                outputs[name].append(tensor.detach())
            if self.watch is not None:
                self._check_ownership(phase, graph, self.watch.owners)

        event = self._issue(phase, job)
        for name, tensors in outputs.items():
            self._tensors[name] = NodeTensor(
                name=name, tensors=tensors, graph=graph, op=op, stream=phase.stream, event=event
            )

    def _read(self, name: str) -> NodeTensor:
        """A tensor; its last reader removes it."""
        self._readers_left[name] -= 1
        return self._tensors[name] if self._readers_left[name] else self._tensors.pop(name)

    def _detach(self, name: str, x: NodeTensor, graph: _Graph, stream: Stream) -> Tensor:
        if not x.differentiable or not self._pending_backward:
            return x.tensor
        if stream not in self._anchors:
            self._anchors[stream] = x.tensor.new_empty(0, requires_grad=True)
        terms = graph.input_grads.setdefault(name, [])
        detached: Tensor = _CaptureGrad.apply(self._anchors[stream], terms, x.tensor)
        return detached

    # ------------------------------------------------------------------------------------ backward

    def backward(self, op: Op) -> None:
        phase = self._phase(op)
        self._pending_backward.remove(phase.name)
        if self._offloads:
            self.work.await_block(self.turn, phase)
        graph = self._graphs.pop(phase.name)
        output_grads = [grad for name in phase.writes for grad in self._gradients.pop(name, ())]
        self._wait_for_inputs(op, phase.stream, [(f"grad:{grad.name}", grad) for grad in output_grads])

        def job() -> None:
            edges, gradients = [], []
            for name in phase.writes:
                terms = [tensor for grad in output_grads if grad.name == name for tensor in grad.tensors]
                if terms and name in graph.edges:
                    edges.append(graph.edges[name])
                    gradients.append(_sum(terms))
                del terms
            if graph.cost is not None:
                edges.append(graph.cost[0])
                gradients.append(graph.cost[1])
            output_grads.clear()
            self._run_backward(phase, edges, gradients)
            if self.watch is not None:
                for function in graph.functions:
                    del self.watch.owners[function]

        event = self._issue(phase, job)
        for name, terms in graph.input_grads.items():
            grad = NodeTensor(name=name, tensors=terms, op=op, stream=phase.stream, event=event)
            self._gradients.setdefault(name, []).append(grad)

    def _run_backward(self, phase: Phase, edges: list[GradientEdge], gradients: list[Tensor]) -> None:
        """Run autograd. For a shared parameter `.grad` is replaced by the gradient of this micro-batch, and
        added to that of earlier ones after its last user: the order in which autograd adds in a single
        graph."""
        shared = [self._shared[name] for name in phase.shared if name in self._shared]
        earlier = [each.parameter.grad for each in shared]
        for each in shared:
            each.parameter.grad = each.gradient
        delays = self._delayed and phase.buckets
        with self.work.delay_wgrad(self.turn, phase) if delays else nullcontext():
            if edges:  # none if nothing up to this phase requires a gradient
                _autograd_backward(edges, gradients)
        for each, other in zip(shared, earlier, strict=True):
            each.gradient, each.parameter.grad = each.parameter.grad, other
            each.users -= 1
            if not each.users and each.gradient is not None:
                each.parameter.grad = each.gradient if other is None else other.add_(each.gradient)
                each.gradient = None

    def wgrad(self, op: Op) -> None:
        phase, bucket = self._phase(op), op.phase
        assert bucket is not None
        assert bucket in self._pending_wgrad, f"{op} has run before, or there is no such bucket"
        assert phase.name not in self._pending_backward, f"{op} comes before its backward"
        self._pending_wgrad.remove(bucket)
        self._wait_for_inputs(op, phase.stream, ())

        def job() -> None:
            self.work.run_wgrad(self.turn, phase, bucket)

        self._issue(phase, job)

    def recompute(self, op: Op) -> None:
        phase = self._phase(op)
        assert phase.name in self._pending_backward, f"{op} comes after its backward"
        if self._offloads:
            self.work.await_block(self.turn, phase)
        inputs = [(f"again:{name}", self._recomputed[name]) for name in phase.reads if name in self._recomputed]
        self._wait_for_inputs(op, phase.stream, inputs)
        hold = partial(self.streams.record_stream, stream=phase.stream)
        event = self._issue(phase, lambda: self.work.replay(self.turn, phase, hold))
        for name in phase.writes:
            self._recomputed[name] = NodeTensor(name=name, tensors=[], op=op, stream=phase.stream, event=event)

    # ------------------------------------------------------------------------------------- streams

    def _phase(self, op: Op) -> Phase:
        assert op.phase is not None
        return self._named[op.phase]

    def _wait_for_inputs(self, op: Op, stream: Stream, inputs: Iterable[tuple[str, NodeTensor]]) -> None:
        """Make the stream wait for inputs from the other stream, and keep their memory alive until it has used
        them."""
        foreign = [(name, x) for name, x in inputs if x.stream is not stream]
        waits: dict[Op, Any] = {x.op: x.event for _, x in foreign if x.op is not None}
        for event in waits.values():
            self.streams.wait(stream, event)
        for _, x in foreign:
            if x.op is None:  # a segment input: it has no event of its own
                self.streams.wait(stream, self.streams.record_event(x.stream))
            for tensor in x.tensors:
                self.streams.record_stream(tensor, stream)
        if stream is Stream.COMMUNICATION:
            # Weights are gathered and freed on the compute stream.
            weights = self.work.weights_of(self.turn, self._phase(op))
            if weights:
                self.streams.wait(Stream.COMMUNICATION, self.streams.record_event(Stream.COMPUTE))
            for weight in weights:
                self.streams.record_stream(weight, Stream.COMMUNICATION)
        if self.watch is not None:
            holds = tuple(name for name, _ in foreign)
            self.watch.issued.append(IssuedNode(op=op, stream=stream, waits=tuple(waits), holds=holds))

    def _issue(self, phase: Phase, job: Callable[[], None]) -> Any:
        event = self.streams.issue(phase.stream, job)
        if phase.stream is Stream.COMMUNICATION and self.work.weights_of(self.turn, phase):
            self.streams.finish_using_weights(event)  # the next op may be a RESHARD
        return event

    def _check_ownership(self, phase: Phase, graph: _Graph, owners: dict[Node, str]) -> None:
        """Walk the graph of a node from its edges, and check that no other node owns any function in it."""
        owner = f"{phase.name} of micro-batch {self.turn[0]}"
        stack = [edge.node for edge in graph.edges.values()] + ([graph.cost[0].node] if graph.cost else [])
        while stack:
            function = stack.pop()
            # Nodes share parameters, and so their AccumulateGrad functions.
            if function is None or function.name() == "torch::autograd::AccumulateGrad":
                continue
            other = owners.setdefault(function, owner)
            if other != owner:
                raise ForeignGraphError(f"{owner} has reached into the graph of {other}, by {function.name()}")
            if function not in graph.functions:
                graph.functions.add(function)
                stack += [edge for edge, _ in function.next_functions if edge is not None]


def _autograd_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its argument checks, which take the host as long as the backward of a
    small node. Each gradient is known to have the shape of its edge."""
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
