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

import torch
from torch import Tensor, nn

from braid.config import Run
from braid.data import Loader
from braid.distributed.collectives import ALONE, Group, Groups, all_reduce_max_no_grad, all_reduce_no_grad
from braid.engine.executor import execute
from braid.engine.node import Function, StepWork, Watch
from braid.errors import DataError
from braid.launch.process import gather_json, together
from braid.model import nodes
from braid.model.context import Context, MicroBatch, Whole
from braid.model.language import LanguageModel, Losses, PartOfStep
from braid.model.mtp import targets
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.moe.balance import Load
from braid.nn.recompute import Hold, Replays
from braid.optim import gradients
from braid.planning.plan import span_of
from braid.schedule import Op, Phase, Turn
from braid.train.data_pipeline import micro_batch
from braid.train.expert_load import ExpertLoad, figures, update_selection_biases
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
    counts_MK = all_reduce_no_grad(torch.tensor(rows, device=model.device), groups.dp).tolist()
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
) -> tuple[dict[str, Tensor], ExpertLoad]:
    """Leave the gradient of the whole step in the optimizer; tell this rank's part of its figures, and the
    load of its experts over all ranks. Nodes may be watched while they run."""
    step = _Step(state, run, batches, counts)
    links = state.links(len(batches[0].sample_B), run)
    state.log = execute(state.program, step, state.keeper, links, watch)
    step.end()
    return step.metrics, step.loads.over(state.model.groups.slab)


DEVIATION = "hyper_deviation"
"""The figure that is no sum, but the most of all layers, micro-batches and ranks."""


class _Step(StepWork):
    """One step's work, phase by phase."""

    def __init__(self, state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts) -> None:
        self.state, self.run, self.model, self.streams = state, run, state.model, state.streams
        self.batches, self.counts = batches, counts
        self.contexts: dict[int, Context] = {}
        self.metrics: dict[str, Tensor] = {}
        self.loads = ExpertLoad()
        self.pieces: dict[Turn, list[Losses]] = {}
        """What the phases of a segment have cost so far."""
        names = run.train.recompute
        self.replays = Replays(names, planned=True) if names else None
        self.model.recompute(self.replays, span_of(run, self.model.layout))
        mains = state.keeper.mains
        self.wgrad_store = DelayedWgrad(mains) if mains or state.plan.schedule.delayed else None
        set_wgrad_store(self.model, self.wgrad_store)

    # ------------------------------------------------------------------------------------- forward

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
            tokens = self.counts.mtp_tokens if losses.mtp else []
            if phase.depth is not None:
                tokens = tokens[phase.depth : phase.depth + 1]
            cost = losses.share(self.counts.tokens, tokens, self.counts.parts[micro_batch])
            self.pieces[turn].append(nodes.without_graph(losses))
            self.loads = self.loads.plus(losses.balances)
            return written, cost if cost.requires_grad else None

        return run

    def _context(self, micro_batch: int) -> Context:
        if micro_batch not in self.contexts:
            whole = self.counts.wholes[micro_batch]
            context = self.model.prepare(self.batches[micro_batch], whole=whole)
            context.deviations = None if self.model.shape.hyper is None else {}
            self.contexts[micro_batch] = context
        return self.contexts[micro_batch]

    def after_forward(self, turn: Turn) -> None:
        losses = nodes.whole(self.model, self.pieces.pop(turn))
        tokens = self.counts.mtp_tokens if losses.mtp else ()
        for name, figure in losses.metrics(self.counts.tokens, tokens, self.counts.parts[turn[0]]).items():
            # The head's losses are the same on all tp ranks: one of them tells.
            told = figure if name.startswith("aux_") or self.model.groups.tp.rank == 0 else 0 * figure
            self.metrics[name] = self.metrics[name] + told if name in self.metrics else told

    # ------------------------------------------------------------------------------------ backward

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def weights_of(self, phase: Phase) -> Sequence[Tensor]:
        return nodes.weights_that_join(self.model, phase)

    def delaying(self, turn: Turn, phase: Phase) -> AbstractContextManager[None]:
        assert self.wgrad_store is not None
        return self.wgrad_store.node((*turn, phase.name), tuple(map(_of_layer, phase.buckets)))

    def weights(self, turn: Turn, phase: Phase, bucket: str) -> None:
        assert self.wgrad_store is not None
        self.wgrad_store.drain((*turn, phase.name), _of_layer(bucket))

    def replay(self, turn: Turn, phase: Phase, hold: Hold) -> None:
        assert self.replays is not None
        self.replays.replay((*turn, phase.name), hold)

    def after_turn(self, turn: Turn) -> None:
        """Drop what is known of a micro-batch, once it has left this rank."""
        micro_batch, segment = turn
        if segment == self.model.segments[0]:
            for found in (self.contexts.pop(micro_batch).deviations or {}).values():
                self.metrics[DEVIATION] = torch.maximum(self.metrics.get(DEVIATION, found), found)

    def sum_copies(self, op: Op) -> None:
        """Of what the first and the last stage hold; copies within a stage are summed when the step is done."""
        self.state.optimizer.gather()
        ends = [each for each in self.state.copies if each.group is self.model.groups.ends]
        gradients.sum_copies_(self.state.optimizer.gradients(), ends)

    def end(self) -> None:
        """All ops have run."""
        self.model.recompute(None)
        set_wgrad_store(self.model, None)
        if self.wgrad_store is not None:
            self.wgrad_store.finish()
        if self.replays is not None:
            self.replays.finish()
        self.state.optimizer.gather()


def _of_layer(bucket: str) -> str:
    """A bucket of a phase, as its layer calls it."""
    return bucket.rpartition(".")[2]


def _over_ranks(metrics: Mapping[str, Tensor], stop: bool, groups: Groups) -> tuple[bool, dict[str, float]]:
    """Figures summed over ranks, and whether any rank was asked to stop."""
    names = sorted({name for stage in gather_json(sorted(metrics), groups.pp) for name in stage})
    nothing = torch.zeros((), dtype=torch.float64, device=next(iter(metrics.values())).device)
    parts = {name: metrics[name].double() if name in metrics else nothing for name in names}
    most = parts.pop(DEVIATION, None)
    stopped, *sums = all_reduce_no_grad(torch.stack([nothing + stop, *parts.values()]), groups.world).tolist()
    told = dict(zip(parts, sums, strict=True))
    return stopped > 0, told if most is None else told | {
        DEVIATION: float(all_reduce_max_no_grad(most, groups.world))
    }


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


def metrics_of(loads: ExpertLoad, pp: Group) -> dict[str, float]:
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
    work = _Evaluation(state, [_counted(run, loader, start, each, samples) for start in starts])
    with together(groups.world):
        for batch in work.batches:
            state.model.check(batch)
    execute(state.evaluation(len(work.batches)), work, state.keeper, state.links(each, run))
    total, tokens = all_reduce_no_grad(work.totals, groups.world).tolist()
    return float(total / max(1, tokens))


def _counted(run: Run, loader: Loader, start: int, each: int, samples: int) -> MicroBatch:
    """Samples from `start` on. All ranks compute in step: past the end stands a sample that does not count."""
    chosen = range(start, start + each)
    rows = [min(sample, samples - 1) for sample in chosen]
    batch = micro_batch(loader, rows, step=0, seed=run.train.seed, training=False)
    counts_B1 = torch.tensor([sample < samples for sample in chosen])[:, None]
    return replace(batch, loss_mask_BT=batch.loss_mask_BT & counts_B1)


class _Evaluation(StepWork):
    """Forwards alone; what is left are sums."""

    def __init__(self, state: State, batches: Sequence[MicroBatch]) -> None:
        self.model, self.streams, self.batches = state.model, state.streams, batches
        self.contexts: dict[int, Context] = {}
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        """Loss sum and token count of what this rank tells."""

    def function(self, turn: Turn, phase: Phase) -> Function:
        micro_batch, _ = turn
        if micro_batch not in self.contexts:
            self.contexts[micro_batch] = self.model.prepare(self.batches[micro_batch])
        context = self.contexts[micro_batch]

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is not None and self.model.groups.tp.rank == 0:  # the same on all tp ranks
                self.totals += torch.stack([losses.loss_sum.double(), losses.token_count.double()])
            return written, None

        return run

    def after_turn(self, turn: Turn) -> None:
        micro_batch, segment = turn
        if segment == self.model.segments[-1]:
            del self.contexts[micro_batch]
