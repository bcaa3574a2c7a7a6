"""The CUDA graphs of training steps: forward and backward of micro-batches, replayed without the host.

A section of the step (`schedule/sections.py`) is captured when it comes for the second time, on inputs that
stay in their place (`model/static_batch.py`), and replayed from then on. What sections leave for later ones,
and for the optimizer, is copied to buffers of the run: gradients, metrics, and counts of routed tokens. The
first section of a step overwrites them and the others add to them, in the order and with the roundings of a
step without graphs, so that its results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from braid.config import Run
from braid.console import warn
from braid.engine.executor import execute_section
from braid.engine.graphs import (
    Addresses,
    CudaRecorder,
    Graph,
    GraphCache,
    Place,
    Recorder,
    parameters_and_buffers,
)
from braid.engine.streams import Streams
from braid.errors import GraphError
from braid.model.context import Context, MicroBatch
from braid.model.language import LossScale
from braid.model.static_batch import BatchForm, BatchForms, StaticBatch
from braid.pattern import Layer
from braid.planning.graphs import MOST_GRAPHS, captures
from braid.schedule.sections import Section, sections_of
from braid.train.counts import Counts
from braid.train.expert_load import ExpertLoad
from braid.train.state import State
from braid.train.step_work import LanguageStep

Key = tuple[int, bool, tuple[BatchForm, ...]]
"""The form of a section, whether it is the first of a step, and the forms of its micro-batches."""


class StepGraphs:
    """The graphs of a run, and the memory that they share."""

    def __init__(self, state: State, recorder: Recorder, most: int = MOST_GRAPHS) -> None:
        self.state, self.recorder, self.cache = state, recorder, GraphCache(most)
        self.sections = sections_of(state.plan.schedule, 0)
        numbers: dict[object, int] = {}
        self.form_of = {each.start: numbers.setdefault(each.form, len(numbers)) for each in self.sections}
        self.batch_forms = BatchForms(state.model)
        self.inputs: dict[tuple[int, BatchForm], StaticBatch] = {}
        """By place in a section, and form."""
        self.carried = Carried()
        self.grads = {name: torch.zeros_like(main) for name, main in state.optimizer.main.items()}
        """The main gradients of steps, by parameter."""
        self.with_grad: frozenset[str] = frozenset()
        """Parameters that get a gradient."""
        self.replayed = 0
        """Sections that ran from a graph, and `eager` those that did not."""
        self.eager = 0
        self._told_full = False

    def of_step(
        self, run: Run, work: LanguageStep, batches: Sequence[MicroBatch], counts: Counts
    ) -> SectionRun:
        return SectionRun(self, run, work, batches, counts)

    def new_main(self, parameter: Tensor) -> Tensor:
        """The memory of a parameter's main gradient."""
        return self.grads[self._main_of[parameter]]

    @cached_property
    def _main_of(self) -> Mapping[Tensor, str]:
        return {parameter: name for name, parameter, _ in self.state.optimizer.pairs()}

    def tell_full(self) -> None:
        if not self._told_full:
            self._told_full = True
            warn(
                f"{self.cache.most} CUDA graphs are held, the most of a run: micro-batches of other forms run "
                "without a graph, with the same results"
            )

    def places(self, inputs: Sequence[StaticBatch]) -> Iterator[Place]:
        """Everything that a graph reads or writes and does not allocate."""
        yield from parameters_and_buffers(self.state.model)
        for name in self.grads:
            yield f"the gradient of {name}", self.grads, name
        for batch in inputs:
            yield from ((f"{name} of a micro-batch", batch.memory, name) for name in batch.memory)


def open_graphs(state: State) -> StepGraphs | None:
    """The graphs of a run; None if it has none to capture."""
    if not captures(state.plan, state.device.type):
        return None
    return StepGraphs(state, CudaRecorder(state.device))


class Carried:
    """Metrics and expert counts of a step so far, in buffers of the run."""

    def __init__(self) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.loads: tuple[dict[Layer, Tensor], ...] = ({}, {}, {})

    def learn(self, work: LanguageStep) -> None:
        """Make buffers like what a section without a graph has left."""
        for own, found in self._pairs(work):
            for key, value in found.items():
                own.setdefault(key, torch.empty_like(value))

    def load(self, work: LanguageStep) -> None:
        """Copy what is not in the buffers yet."""
        for own, found in self._pairs(work):
            for key, value in found.items():
                if key not in own:
                    raise GraphError(
                        f"{key} came up after the capture of CUDA graphs: set train.graphs to none"
                    )
                if own[key] is not value:
                    own[key].copy_(value)

    def give(self, work: LanguageStep) -> None:
        """Have a step go on from the buffers."""
        work.metrics = dict(self.metrics)
        counts, kept, raw = (dict(each) for each in self.loads)
        work.loads = ExpertLoad(counts_E=counts, kept_E=kept, raw_counts_E=raw)

    def _pairs(self, work: LanguageStep) -> Iterator[tuple[dict[Any, Tensor], Mapping[Any, Tensor]]]:
        loads = work.loads
        yield self.metrics, work.metrics
        yield from zip(self.loads, (loads.counts_E, loads.kept_E, loads.raw_counts_E), strict=True)


class SectionRun:
    """Runs the sections of one step."""

    def __init__(
        self, graphs: StepGraphs, run: Run, work: LanguageStep, batches: Sequence[MicroBatch], counts: Counts
    ) -> None:
        self.graphs, self.run_settings, self.work = graphs, run, work
        self.batches, self.counts = batches, counts
        self.sections = graphs.sections
        self.mains = graphs.state.optimizer.main

    def run(self, section: Section, eagerly: Callable[[], None]) -> None:
        graphs = self.graphs
        forms = tuple(
            graphs.batch_forms.of(self.batches[each], self.counts.totals[each])
            for each in section.micro_batches
        )
        tiles = max(each.tiles for each in forms)  # of all alike, for fewer graphs
        forms = tuple(replace(each, tiles=tiles) for each in forms)
        key: Key = (graphs.form_of[section.start], section.first, forms)
        inputs = [self._input(*each) for each in zip(section.micro_batches, forms, strict=True)]
        graph = graphs.cache.get(key, partial(self._record, section, inputs))
        if graph is None:
            graphs.eager += 1
            if graphs.cache.full:
                graphs.tell_full()
            eagerly()
            graphs.carried.learn(self.work)
            return
        graphs.replayed += 1
        self._enter(section, inputs)
        graph.replay()
        self._leave()

    def _input(self, micro_batch: int, form: BatchForm) -> StaticBatch:
        """The memory of a micro-batch in its section."""
        graphs = self.graphs
        place = next(each for each in self.sections if micro_batch in each.micro_batches)
        key = (place.micro_batches.index(micro_batch), form)
        if key not in graphs.inputs:
            scale = self.work.host_scale(micro_batch)
            masks = graphs.batch_forms.masks
            graphs.inputs[key] = StaticBatch(graphs.state.model, masks, form, self.batches[micro_batch], scale)
        return graphs.inputs[key]

    def _record(self, section: Section, inputs: Sequence[StaticBatch]) -> Graph:
        graphs = self.graphs
        self._enter(section, inputs)
        try:
            function = partial(self._function, section, tuple(inputs))
            replay = graphs.recorder.record(function)
        finally:
            self.work.attach()
        return Graph(Addresses(graphs.places(inputs)), replay)

    def _function(self, section: Section, inputs: Sequence[StaticBatch], streams: Streams) -> None:
        """What a graph records: the ops of a section, between buffers."""
        graphs = self.graphs
        for name, main in self.mains.items():
            main.grad = None if section.first or name not in graphs.with_grad else graphs.grads[name]
        step = GraphStep(graphs, self.run_settings, section, inputs, self.counts, streams)
        if not section.first:
            graphs.carried.give(step)
        execute_section(graphs.state.program, section, step, graphs.state.keeper)
        step.end()
        found = set[str]()
        with torch.no_grad():
            for name, main in self.mains.items():
                if main.grad is not None:
                    found.add(name)
                    if main.grad is not graphs.grads[name]:
                        graphs.grads[name].copy_(main.grad)
                        main.grad = graphs.grads[name]
            graphs.carried.load(step)
        graphs.with_grad |= found

    @torch.no_grad()
    def _enter(self, section: Section, inputs: Sequence[StaticBatch]) -> None:
        """Copy to the buffers what a section reads."""
        graphs = self.graphs
        for micro_batch, static in zip(section.micro_batches, inputs, strict=True):
            static.load(self.batches[micro_batch], self.work.host_scale(micro_batch))
        if section.first:
            return
        graphs.carried.load(self.work)
        for name, main in self.mains.items():
            if main.grad is not None and main.grad is not graphs.grads[name]:
                graphs.grads[name].copy_(main.grad)
                main.grad = graphs.grads[name]
                graphs.with_grad |= {name}

    def _leave(self) -> None:
        """Hand what a graph has left in the buffers to the step."""
        graphs = self.graphs
        for name in graphs.with_grad:
            self.mains[name].grad = graphs.grads[name]
        graphs.carried.give(self.work)


class GraphStep(LanguageStep):
    """The work of a section on inputs that stay in their place."""

    def __init__(
        self,
        graphs: StepGraphs,
        run: Run,
        section: Section,
        inputs: Sequence[StaticBatch],
        counts: Counts,
        streams: Streams,
    ) -> None:
        self.inputs = dict(zip(section.micro_batches, inputs, strict=True))
        self.static_scales = {number: each.scale() for number, each in self.inputs.items()}
        self.new_main = graphs.new_main
        super().__init__(graphs.state, run, [each.batch for each in inputs], counts, streams)
        self.micro_batches = max(section.micro_batches) + 1
        """The last one of the section has no other after it."""

    def prepare(self, micro_batch: int) -> Context:
        return self.inputs[micro_batch].context(self.counts.totals[micro_batch])

    def device_scales(self) -> list[LossScale]:
        return []

    def scale(self, micro_batch: int) -> LossScale:
        return self.static_scales[micro_batch]
