"""One step: micro-batches forward and backward, one look at the gradient, one update. And evaluation.

The tokens that count are known over all ranks before the first forward, so every loss is scaled by them before
its backward and all reductions are plain sums.

Shapes: M micro-batches of the step, K counts of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from braid.collectives import ALONE, Group, Groups, highest, summed
from braid.config import Run
from braid.data import Loader
from braid.engine import fsdp2
from braid.engine.executor import Turn, execute
from braid.engine.node import Function, Watch
from braid.engine.sharding import execute_sharded
from braid.errors import DataError
from braid.model import nodes
from braid.model.context import Context, MicroBatch, Whole
from braid.model.language import LanguageModel, Losses, PartOfStep
from braid.model.mtp import targets
from braid.nn.moe.balance import Load
from braid.nn.recompute import Hold, Replays
from braid.nn.weight_sink import Mains, WeightSink, hand_sink
from braid.optim import gradients
from braid.parallel.sharding import before_backward, release
from braid.plan import span_of
from braid.schedule import Op, Phase, evaluation
from braid.train.added import parameters_of_phases
from braid.train.driving import driving
from braid.train.feed import micro_batch
from braid.train.loads import Loads, figures, update_selection_biases
from braid.train.ranks import gather_json, together
from braid.train.state import State


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step, over all ranks."""

    metrics: dict[str, float]
    """`loss`, the mean cross-entropy of the tokens that count, in nats (0 where none does), and others."""
    tokens: int
    """Tokens that counted."""
    grad_norm: float
    """Before clipping."""
    not_finite: tuple[str, ...] = ()
    """What was not finite: then the weights were left alone."""
    stop: bool = False
    """Whether any rank was asked to stop."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a step is made of, over all ranks."""

    tokens: int
    """Tokens that count in the loss."""
    mtp_tokens: list[int]
    """Tokens that count in each MTP depth."""
    wholes: list[Whole]
    """Every micro-batch over all its ranks."""
    parts: list[PartOfStep]
    """How much of the step each micro-batch is."""


def train_step(state: State, run: Run, loader: Loader, rate: float, *, stop: bool = False) -> StepResult:
    """Do step `state.step + 1`. Where loss or gradients are not finite, the weights stay as they were. `stop`
    is whether this rank was asked to."""
    groups = state.model.groups
    batches = micro_batches(run, loader, state.step + 1, state.samples, groups.dp)
    counts = count(state.model, batches)
    parts, loads = backward(state, run, batches, counts)
    asked, metrics = _over_ranks(parts, stop, groups)
    state.step += 1
    state.samples += run.train.batch_samples
    state.tokens += run.train.batch_samples * run.data.sequence_tokens
    found = state.optimizer.gradients()
    gradients.sum_copies_(found, [each for each in state.copies if each.group is not groups.ends])
    repeated = frozenset(name for name in found if not state.kept[name].first)
    norm = float(gradients.total_norm(found, state.copies, repeated, groups.world))
    spoiled = _not_finite(metrics["loss"], norm, found, groups.world)
    if spoiled:
        state.optimizer.forget()
        state.skipped_in_a_row += 1
    else:
        gradients.clip_(found, norm, run.optim.clip)
        state.optimizer.update(rate)
        update_selection_biases(state.model, loads)
        state.skipped_in_a_row = 0
    metrics |= metrics_of(loads, groups.pp)
    return StepResult(
        metrics=metrics, tokens=counts.tokens, grad_norm=norm, not_finite=tuple(spoiled), stop=asked
    )


def count(model: LanguageModel, batches: Sequence[MicroBatch]) -> Counts:
    """Count the step's micro-batches, and refuse ids that the model does not know: the same on every rank."""
    groups = model.groups
    problem: DataError | None = None
    try:
        for batch in batches:
            model.check(batch)
    except DataError as error:
        problem = error
    depths = range(len(model.layout.mtp))
    rows = [
        [
            int(problem is not None),
            len(batch.documents_BT),
            int((batch.documents_BT >= 0).sum()),
            int((batch.documents_BT >= 0).any(1).sum()),
            int(batch.loss_mask_BT.sum()),
            *(int(targets(batch, depth).loss_mask_BT.sum()) for depth in depths),
        ]
        for batch in batches
    ]
    counts_MK = summed(torch.tensor(rows, device=model.device), groups.dp).tolist()
    if any(row[0] for row in counts_MK):
        with together(groups.world):
            if problem is not None:
                raise problem
    _, _, valid, filled, *counted = ([row[k] for row in counts_MK] for k in range(len(rows[0])))
    return Counts(
        tokens=sum(counted[0]),
        mtp_tokens=[sum(depth) for depth in counted[1:]],
        wholes=[Whole(tokens=row[2], rows=row[1]) for row in counts_MK],
        parts=[
            PartOfStep(tokens=t / max(1, sum(valid)), rows=r / max(1, sum(filled)))
            for t, r in zip(valid, filled, strict=True)
        ],
    )


def backward(
    state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts, watch: Watch | None = None
) -> tuple[dict[str, Tensor], Loads]:
    """Leave the gradient of the whole step in the optimizer; tell this rank's part of its figures, and the
    load of its experts over all ranks. Nodes may be watched while they run."""
    groups, wires = state.model.groups, state.wires(len(batches[0].sample_B), run)
    rank, driven = groups.pp.rank, driving(state.model, state.schedule, run)
    if driven is not None:
        step: _Step = _DrivenStep(state, run, batches, counts)
        who = (driven.driver, driven.uses)
        state.log = execute_sharded(driven.schedule, rank, step, wires, *who, watch)
    else:
        step = (_NodeStep if state.schedule.phases else _Step)(state, run, batches, counts)
        state.log = execute(state.schedule, rank, step, wires, watch)
    step.end()
    return step.metrics, step.loads.over(groups.slab)


DEVIATION = "hyper_deviation"
"""The figure that is no sum, but the most of all layers, micro-batches and ranks."""


class _Step:
    """One step's work, as the ops of its schedule ask for it."""

    def __init__(self, state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts) -> None:
        self.state, self.run, self.model = state, run, state.model
        self.batches, self.counts = batches, counts
        self.contexts: dict[int, Context] = {}
        self.metrics: dict[str, Tensor] = {}
        self.loads = Loads()
        names = run.train.recompute
        self.replays = Replays(names, planned=bool(state.schedule.phases)) if names else None
        self.model.recompute(self.replays, span_of(run, self.model.layout))
        alone = self.model.groups.world.size == 1
        mains: Mains = state.optimizer.mains() if alone else fsdp2.Accumulated(self.model)
        self.sink = WeightSink(mains) if mains or state.schedule.delayed else None
        hand_sink(self.model, self.sink)
        once = run.mesh.shard in ("none", "optimizer")
        self.late = [each for each in self.model.reused() if once and isinstance(each, FSDPModule)]
        """Units that FSDP2 would reduce twice in the last backward: first what others have left."""
        self.modules: dict[int, list[nn.Module]] = {}
        for unit in self.model.units():
            segment = unit.segment if self.model.groups.pp.size > 1 else 0
            self.modules.setdefault(segment, []).append(unit.module)

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        micro_batch, segment = turn
        context = self._context(micro_batch)
        context.earlier_E = self.loads.favourites_E
        y, losses = self.model.run(segments_of(self.model, segment), x, context)
        self._note(micro_batch, losses)
        cost = losses.share(*self._counted(losses), self.counts.parts[micro_batch])
        return y, cost if cost.requires_grad else None

    def _context(self, micro_batch: int) -> Context:
        if micro_batch not in self.contexts:
            whole = self.counts.wholes[micro_batch]
            context = self.model.prepare(self.batches[micro_batch], whole=whole)
            context.deviations = None if self.model.shape.hyper is None else {}
            self.contexts[micro_batch] = context
        return self.contexts[micro_batch]

    def _counted(self, losses: Losses) -> tuple[int, Sequence[int]]:
        return self.counts.tokens, self.counts.mtp_tokens if losses.mtp else ()

    def _note(self, micro_batch: int, losses: Losses) -> None:
        """Losses and loads of a segment, which the step adds up."""
        self.loads = self.loads.plus(losses.balances)
        self._tell(losses.metrics(*self._counted(losses), self.counts.parts[micro_batch]))

    def _tell(self, figures: Mapping[str, Tensor]) -> None:
        for name, figure in figures.items():
            # The head's losses are the same on all tp ranks: one of them tells.
            told = figure if name.startswith("aux_") or self.model.groups.tp.rank == 0 else 0 * figure
            self.metrics[name] = self.metrics[name] + told if name in self.metrics else told

    def before_backward(self, turn: Turn) -> None:
        modules, last = self.modules.get(turn[1], []), self._is_last(turn[0])
        at_once = [module for module in modules if module not in self.late]
        before_backward(self.model, self.late, self.run.mesh.shard, last=False, done=self._is_done(turn))
        before_backward(self.model, at_once, self.run.mesh.shard, last=last, done=self._is_done(turn))

    def _is_last(self, micro_batch: int) -> bool:
        return micro_batch == len(self.batches) - 1

    def _is_done(self, turn: Turn) -> bool:
        """Whether this is the last backward of the step on this rank."""
        return self._is_last(turn[0]) and turn[1] == min(self.modules, default=turn[1])

    def after_backward(self, turn: Turn) -> None:
        if self._is_last(turn[0]):
            self._reduce_late(turn[1])
        # What ranks reduce may still be on its way, until the step's last backward has waited for all of it.
        if self.model.groups.world.size == 1 or self._is_done(turn):
            if self.late:
                assert isinstance(self.model, FSDPModule)
                fsdp2.settle(self.model)
            self.state.optimizer.gather()
        self._forget(turn)

    def _reduce_late(self, segment: int) -> None:
        for module in self.modules.get(segment, []):
            if module in self.late:
                assert isinstance(module, FSDPModule)
                fsdp2.flush(module, reduce=True)
                module.reshard()

    def _forget(self, turn: Turn) -> None:
        """Drop what is known of a micro-batch, once it has left this rank."""
        micro_batch, segment = turn
        if segment == (0 if self.model.groups.pp.size == 1 else self.model.segments[0]):
            for found in (self.contexts.pop(micro_batch).deviations or {}).values():
                self.metrics[DEVIATION] = torch.maximum(self.metrics.get(DEVIATION, found), found)

    def sum_copies(self, op: Op) -> None:
        """Of what the first and the last stage hold; copies within a stage are summed when the step is done."""
        ends = [each for each in self.state.copies if each.group is self.model.groups.ends]
        gradients.sum_copies_(self.state.optimizer.gradients(), ends)

    def end(self) -> None:
        """All ops have run."""
        self.model.recompute(None)
        hand_sink(self.model, None)
        if self.sink is not None:
            self.sink.finish()
        if self.replays is not None:
            self.replays.finish()


class _NodeStep(_Step):
    """One step's work, phase by phase."""

    def __init__(self, state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts) -> None:
        super().__init__(state, run, batches, counts)
        self.streams = state.streams
        self.pieces: dict[Turn, list[Losses]] = {}
        """What the phases of a segment have cost so far."""
        self.backwards: set[Turn] = set()
        """Those that have begun and are not done."""

    @cached_property
    def added(self) -> Mapping[str, Sequence[str]]:
        phases = [phase for segment in self.state.schedule.phases for phase in segment]
        return parameters_of_phases(self.model, phases, self.run)

    def function(self, turn: Turn, phase: Phase) -> Function:
        micro_batch, _ = turn
        context = self._context(micro_batch)
        self.pieces.setdefault(turn, [])
        # Another micro-batch may be under way: of a layer, it has been there before or comes later.
        context.earlier_E = self.loads.favourites_E
        if phase.kind == "experts" and micro_batch + 1 < len(self.batches):
            self._context(micro_batch + 1)  # on its way to the device before anybody waits for it

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Tensor | None]:
            with nullcontext() if self.replays is None else self.replays.node((*turn, phase.name)):
                written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is None:
                return written, None
            tokens = (self.counts.mtp_tokens[phase.depth],) if losses.mtp and phase.depth is not None else ()
            cost = losses.share(self.counts.tokens, tokens, self.counts.parts[micro_batch])
            self.pieces[turn].append(nodes.without_graph(losses))
            self.loads = self.loads.plus(losses.balances)
            return written, cost if cost.requires_grad else None

        return run

    def after_forward(self, turn: Turn) -> None:
        losses = nodes.whole(self.model, self.pieces.pop(turn))
        self._tell(losses.metrics(*self._counted(losses), self.counts.parts[turn[0]]))

    def before_backward(self, turn: Turn) -> None:
        self.backwards.add(turn)
        super().before_backward(turn)

    def adding(self, turn: Turn, phase: Phase) -> None:
        """The gradients of two micro-batches are never summed in the dtype of the model."""
        if len(self.backwards) > 1 and self.model.groups.world.size == 1:
            self.state.optimizer.gather(self.added[phase.name])

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def weights_of(self, phase: Phase) -> Sequence[Tensor]:
        return nodes.weights_that_join(self.model, phase)

    def delaying(self, turn: Turn, phase: Phase) -> AbstractContextManager[None]:
        assert self.sink is not None
        return self.sink.node((*turn, phase.name), tuple(map(_of_layer, phase.drawers)))

    def weights(self, turn: Turn, phase: Phase, drawer: str) -> None:
        assert self.sink is not None
        self.sink.drain((*turn, phase.name), _of_layer(drawer))

    def after_backward(self, turn: Turn) -> None:
        # With other ranks, gradients are whole at the end: those of weights may come after the last backward.
        self.backwards.discard(turn)
        if self.model.groups.world.size == 1:
            self.state.optimizer.gather()
        self._forget(turn)

    def sum_copies(self, op: Op) -> None:
        self.state.optimizer.gather()
        super().sum_copies(op)

    def replay(self, turn: Turn, phase: Phase, hold: Hold) -> None:
        assert self.replays is not None
        self.replays.replay((*turn, phase.name), hold)

    def end(self) -> None:
        super().end()
        self.state.optimizer.gather()


class _DrivenStep(_NodeStep):
    """One step's work, phase by phase, where ops gather weights and reduce gradients: they can be read when all
    of them have run."""

    def before_backward(self, turn: Turn) -> None:
        pass


def _of_layer(drawer: str) -> str:
    """A drawer of a phase, as its layer calls it."""
    return drawer.rpartition(".")[2]


def segments_of(model: LanguageModel, segment: int) -> Sequence[int]:
    """The segments of the layout that a segment of the schedule stands for: without a pipeline, all of them."""
    return model.segments if model.groups.pp.size == 1 else (segment,)


def _over_ranks(metrics: Mapping[str, Tensor], stop: bool, groups: Groups) -> tuple[bool, dict[str, float]]:
    """Figures summed over ranks, and whether any rank was asked to stop."""
    names = sorted({name for stage in gather_json(sorted(metrics), groups.pp) for name in stage})
    nothing = torch.zeros((), dtype=torch.float64, device=next(iter(metrics.values())).device)
    parts = {name: metrics[name].double() if name in metrics else nothing for name in names}
    most = parts.pop(DEVIATION, None)
    stopped, *sums = summed(torch.stack([nothing + stop, *parts.values()]), groups.world).tolist()
    told = dict(zip(parts, sums, strict=True))
    return stopped > 0, told if most is None else told | {DEVIATION: float(highest(most, groups.world))}


def micro_batches(run: Run, loader: Loader, step: int, first: int, dp: Group = ALONE) -> list[MicroBatch]:
    """This rank's rows of the micro-batches of a step, from sample `first` on. A micro-batch has fixed global
    samples, whatever the ranks; data-parallel ranks share it in equal parts."""
    samples = run.train.batch_samples // run.train.micro_batches
    each = samples // dp.size
    starts = range(first + dp.rank * each, first + run.train.batch_samples, samples)
    return [
        micro_batch(loader, range(start, start + each), step=step, seed=run.train.seed, training=True)
        for start in starts
    ]


def metrics_of(loads: Loads, pp: Group) -> dict[str, float]:
    """Figures of the load of all layers, whichever stage has them."""
    stages = gather_json([list(layer) for layer in loads.layers()], pp)
    return figures([Load(*layer) for stage in stages for layer in stage])


def _not_finite(loss: float, norm: float, found: Mapping[str, Tensor], world: Group) -> list[str]:
    """What is not finite, on any rank."""
    if math.isfinite(loss) and math.isfinite(norm):
        return []
    everywhere = gather_json(gradients.not_finite(found), world)
    names = dict.fromkeys(name for names in everywhere for name in names)
    return [*(["loss"] if not math.isfinite(loss) else []), *names] or ["grad_norm"]


@torch.no_grad()
def evaluate(state: State, run: Run, loader: Loader) -> float:
    """Mean cross-entropy over the first `eval_samples` samples, in nats per token."""
    groups = state.model.groups
    samples = min(run.train.eval_samples, loader.samples_per_epoch)
    each = run.train.batch_samples // run.train.micro_batches // groups.dp.size
    starts = range(groups.dp.rank * each, samples + groups.dp.rank * each, each * groups.dp.size)
    work = _Evaluation(state.model, [_counted(run, loader, start, each, samples) for start in starts])
    with together(groups.world):
        for batch in work.batches:
            state.model.check(batch)
    schedule = evaluation(state.schedule.holder, len(work.batches))
    execute(schedule, groups.pp.rank, work, state.wires(each, run))
    release(state.model)
    total, tokens = summed(work.totals, groups.world).tolist()
    return float(total / max(1, tokens))


def _counted(run: Run, loader: Loader, start: int, each: int, samples: int) -> MicroBatch:
    """Samples from `start` on. All ranks compute in step: past the end stands a sample that does not count."""
    chosen = range(start, start + each)
    rows = [min(sample, samples - 1) for sample in chosen]
    batch = micro_batch(loader, rows, step=0, seed=run.train.seed, training=False)
    counts_B1 = torch.tensor([sample < samples for sample in chosen])[:, None]
    return replace(batch, loss_mask_BT=batch.loss_mask_BT & counts_B1)


class _Evaluation:
    """Forwards alone; what is left are sums."""

    def __init__(self, model: LanguageModel, batches: Sequence[MicroBatch]) -> None:
        self.model, self.batches = model, batches
        self.contexts: dict[int, Context] = {}
        self.totals = torch.zeros(2, dtype=torch.float64, device=model.device)
        """Loss sum and token count of what this rank tells."""

    def forward(self, turn: Turn, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        micro_batch, segment = turn
        context = self.contexts.get(micro_batch)
        if context is None:
            context = self.contexts[micro_batch] = self.model.prepare(self.batches[micro_batch])
        y, losses = self.model.run(segments_of(self.model, segment), x, context)
        if self.model.groups.tp.rank == 0:  # the head's losses are the same on all tp ranks
            self.totals += torch.stack([losses.loss_sum.double(), losses.token_count.double()])
        if segments_of(self.model, segment)[-1] == self.model.segments[-1]:
            del self.contexts[micro_batch]
        return y, None

    def before_backward(self, turn: Turn) -> None:
        raise NotImplementedError("an evaluation has no backward")

    after_backward = before_backward

    def sum_copies(self, op: Op) -> None:
        raise NotImplementedError("an evaluation has no gradients")
