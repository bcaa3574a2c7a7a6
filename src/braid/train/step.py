"""The training step (forward and backward of all micro-batches, gradient clipping, update), and evaluation.

The number of loss tokens of the whole step is all-reduced before the first forward. Every loss is divided by it
before its backward, so all reductions of losses and gradients are plain sums, and the result does not depend on
how samples are split into micro-batches and ranks.

Shapes: M micro-batches of the step, K counts of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from braid.config import Run
from braid.data import Loader
from braid.distributed.collectives import ALONE, Group, all_reduce_max_no_grad, all_reduce_no_grad
from braid.engine.executor import execute
from braid.engine.node import PhaseFn, StepWork, Watch
from braid.errors import DataError
from braid.kernels.host import AsyncHostCopy
from braid.launch.process import all_gather_json, fail_together
from braid.model import nodes
from braid.model.context import Context, MicroBatch, MicroBatchTotals
from braid.model.language import Losses, StepFraction
from braid.model.mtp import targets
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.moe.balance import Load, load
from braid.nn.recompute import Hold, Replays
from braid.optim import gradients
from braid.planning.plan import span_of
from braid.schedule import Op, Phase, Turn
from braid.train.expert_load import ExpertLoad, load_metrics, update_selection_biases
from braid.train.state import JobState, State


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step, over all ranks."""

    metrics: dict[str, float]
    """`loss`, the mean cross-entropy over loss tokens in nats (0 if there are none), and further metrics."""
    tokens: int
    """Tokens that count in the loss."""
    grad_norm: float
    """Before clipping."""
    not_finite: tuple[str, ...] = ()
    """The loss or parameters that were not finite; if any, the step was skipped."""
    stop: bool = False
    """Whether any rank received a stop signal."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step that was issued and may still run on the device.

    Shapes: P parameters.
    """

    state: JobState
    tokens: int
    parameters: tuple[str, ...]
    metrics: tuple[str, ...]
    """Names of `numbers` after the first."""
    numbers: AsyncHostCopy
    """The gradient norm and the metrics, over all ranks."""
    squares_P: AsyncHostCopy
    """Squared gradient norms of this rank's parameters, to tell which are not finite."""
    loads: tuple[AsyncHostCopy, ...]
    """Tokens routed to each expert of every MoE layer, and those within its capacity."""

    def result(self) -> StepResult:
        """Wait for the step. Call it once for every step, in order, on all ranks."""
        norm, *values = self.numbers.wait().tolist()
        metrics = dict(zip(self.metrics, values, strict=True))
        stop = metrics.pop(STOP) > 0
        not_finite: tuple[str, ...] = ()
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            not_finite = self._not_finite(metrics["loss"], self.state.job)
        self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if not_finite else 0
        mine = [list(load(*pair.wait())) for pair in self.loads]
        stages = _tell(self.state, mine, [])
        metrics |= load_metrics([Load(*layer) for stage in stages for layer in stage])
        return StepResult(metrics=metrics, tokens=self.tokens, grad_norm=norm, not_finite=not_finite, stop=stop)

    def _not_finite(self, loss: float, job: Group) -> tuple[str, ...]:
        """Names of what is not finite, on any rank."""
        finite_P = self.squares_P.wait().isfinite().tolist()
        mine = [name for name, finite in zip(self.parameters, finite_P, strict=True) if not finite]
        names = dict.fromkeys(name for names in all_gather_json(mine, job) for name in names)
        return (*(() if math.isfinite(loss) else ("loss",)), *names) or ("grad_norm",)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Token counts of a step, over all ranks."""

    tokens: int
    """Tokens that count in the loss."""
    mtp_tokens: list[int]
    """Tokens that count in each MTP depth."""
    totals: list[MicroBatchTotals]
    """Size of every micro-batch, over all ranks that share it."""
    fractions: list[StepFraction]
    """Each micro-batch's fraction of the step."""


def train_step(state: JobState, run: Run, loader: Loader, rate: float, *, stop: bool = False) -> StepResult:
    """Run step `state.step + 1` at learning rate `rate` and wait for its result."""
    return begin_step(state, run, loader, rate, stop=stop).result()


def begin_step(state: JobState, run: Run, loader: Loader, rate: float, *, stop: bool = False) -> PendingStep:
    """Issue step `state.step + 1` at learning rate `rate`. If the loss or the gradient norm is not finite, the
    update is skipped; the device decides that, so the host need not wait for it. `stop` says whether this rank
    received a stop signal."""
    if not isinstance(state, State):
        return _attend_step(state, run, stop)
    groups = state.model.groups
    batches = micro_batches(run, loader, state.step + 1, state.samples, groups.dp)
    counts = count(state, batches)
    parts, loads = backward(state, run, batches, counts)
    metrics = _reduce_metrics(state, parts, stop)
    _advance(state, run)
    grads = state.optimizer.gradients()
    # Copies shared by the first and last pipeline stage (embeddings) were summed by an op of the schedule.
    gradients.sum_copies_(grads, [each for each in state.copies if each.group is not groups.ends])
    repeated = frozenset(name for name in grads if not state.kept[name].first)
    kernels = state.optimizer.kernels
    squares_P = kernels.squares(list(grads.values())).to(state.device)  # of none, they would be on the host
    norm = gradients.total_norm(grads, state.copies, repeated, state.job, squares_P=squares_P, kernels=kernels)
    finite = metrics["loss"].isfinite() & norm.isfinite()
    state.optimizer.update(rate, scale=gradients.clip_scale(norm, run.optim.clip), skip=~finite)
    update_selection_biases(state.model, loads, apply=finite, frozen=state.frozen_buffers)
    return PendingStep(
        state=state,
        tokens=counts.tokens,
        parameters=tuple(grads),
        metrics=tuple(metrics),
        numbers=AsyncHostCopy(torch.stack([norm, *metrics.values()])),
        squares_P=AsyncHostCopy(squares_P),
        loads=tuple(AsyncHostCopy(counts_2E) for counts_2E in loads.pairs()),
    )


def _attend_step(state: JobState, run: Run, stop: bool) -> PendingStep:
    """The part of a rank outside the model's grid in a step: the job's collectives, in the order of
    `begin_step`."""
    depths = len(state.plan.layout.mtp)
    counts = _sum_counts(state, torch.zeros(run.train.micro_batches, COUNTS + depths, dtype=torch.int64))
    state.progress.skip(max(len(ops) for ops in state.plan.schedule.ops))
    metrics = _reduce_metrics(state, {}, stop)
    _advance(state, run)
    norm = gradients.total_norm({}, world=state.job, squares_P=torch.zeros(0, device=state.device).double())
    return PendingStep(
        state=state,
        tokens=counts.tokens,
        parameters=(),
        metrics=tuple(metrics),
        numbers=AsyncHostCopy(torch.stack([norm, *metrics.values()])),
        squares_P=AsyncHostCopy(torch.zeros(0)),
        loads=(),
    )


def _advance(state: JobState, run: Run) -> None:
    state.step += 1
    state.samples += run.train.batch_samples
    state.tokens += run.train.batch_samples * run.data.sequence_tokens


def _tell(state: JobState, mine: Any, nothing: Any) -> list[Any]:
    """What each pipeline stage has to say, for every rank of the job: `mine`, on all ranks of a stage alike."""
    if isinstance(state, State) and state.everyone_trains:
        return all_gather_json(mine, state.model.groups.pp)
    speaks = isinstance(state, State) and state.model.groups.slab.rank == 0
    return all_gather_json(mine if speaks else nothing, state.job)


COUNTS = 5
"""Counts of a micro-batch, besides one for each MTP depth."""


def count(state: State, batches: Sequence[MicroBatch]) -> Counts:
    """Count the tokens of the step's micro-batches over all ranks. Token ids outside the vocabulary are an
    error, raised on every rank."""
    model = state.model
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
    return _sum_counts(state, torch.tensor(rows), problem)


def _sum_counts(state: JobState, mine_MK: Tensor, problem: DataError | None = None) -> Counts:
    """The counts over all ranks, from those of each rank's own rows. Collective over the job."""
    # On the host: a device tensor would wait for the step before. The error flag rides along with the counts,
    # so that checking ids costs no collective of its own.
    if isinstance(state, State) and state.everyone_trains:
        table_MK = all_reduce_no_grad(mine_MK, state.model.groups.dp)
    else:
        # Ranks outside the grid need the counts too. One rank of each data-parallel lane fills in its rows.
        fills = isinstance(state, State) and state.model.groups.tp_cp.rank == state.model.groups.pp.rank == 0
        table_MK = all_reduce_no_grad(mine_MK if fills else torch.zeros_like(mine_MK), state.job)
    counts_MK = table_MK.tolist()
    if any(row[0] for row in counts_MK):
        with fail_together(state.job):
            if problem is not None:
                raise problem
    _, _, valid, filled, *counted = ([row[k] for row in counts_MK] for k in range(mine_MK.shape[1]))
    return Counts(
        tokens=sum(counted[0]),
        mtp_tokens=[sum(depth) for depth in counted[1:]],
        totals=[MicroBatchTotals(tokens=row[2], rows=row[1]) for row in counts_MK],
        fractions=[
            StepFraction(tokens=t / max(1, sum(valid)), rows=r / max(1, sum(filled)))
            for t, r in zip(valid, filled, strict=True)
        ],
    )


def backward(
    state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts, watch: Watch | None = None
) -> tuple[dict[str, Tensor], ExpertLoad]:
    """Run the schedule of the step, which leaves the gradients in the optimizer. Returns this rank's share of
    the metrics, and the expert load over all ranks. `watch` observes nodes as they run."""
    step = _Step(state, run, batches, counts)
    links = state.links(len(batches[0].sample_B), run)
    state.log = execute(state.program, step, state.keeper, links, watch)
    step.end()
    return step.metrics, step.loads.all_reduce(state.model.groups.slab)


DEVIATION = "hyper_deviation"
"""The only metric that is a maximum over layers, micro-batches and ranks; all others are sums."""
STOP = "stop"
"""How many ranks received a stop signal; travels with the metrics."""


class _Step(StepWork):
    """What the executor calls for each op of a training step."""

    def __init__(self, state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts) -> None:
        self.state, self.run, self.model, self.streams = state, run, state.model, state.streams
        self.batches, self.counts = batches, counts
        self.contexts: dict[int, Context] = {}
        self.metrics: dict[str, Tensor] = {}
        self.loads = ExpertLoad()
        self.pieces: dict[Turn, list[Losses]] = {}
        """Losses of the phases of each segment that have run so far."""
        names = run.train.recompute
        self.replays = Replays(names, planned=True) if names else None
        self.model.recompute(self.replays, span_of(run, self.model.layout))
        backwards = [each for each in self.model.segments if state.plan.schedule.has_backward(each)]
        self.last_segment = min(backwards, default=max(self.model.segments))
        """Backwards come in reverse order; a segment without one is done after its forward."""
        mains = state.keeper.mains
        self.wgrad_store = DelayedWgrad(mains) if mains or state.plan.schedule.delayed else None
        set_wgrad_store(self.model, self.wgrad_store)

    # ------------------------------------------------------------------------------------- forward

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        micro_batch, _ = turn
        context = self._context(micro_batch)
        self.pieces.setdefault(turn, [])
        # Overlapped schedules interleave two micro-batches, but each layer sees them in order: these are the
        # counts of all earlier ones.
        context.earlier_E = self.loads.raw_counts_E
        if phase.kind == "experts" and micro_batch + 1 < len(self.batches):
            self._context(micro_batch + 1)  # prefetch: starts the copy to the device

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Tensor | None]:
            with nullcontext() if self.replays is None else self.replays.node((*turn, phase.name)):
                written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is None:
                return written, None
            tokens = self.counts.mtp_tokens if losses.mtp else []
            if phase.depth is not None:
                tokens = tokens[phase.depth : phase.depth + 1]
            cost = losses.share(self.counts.tokens, tokens, self.counts.fractions[micro_batch])
            self.pieces[turn].append(nodes.detach_losses(losses))
            self.loads = self.loads.plus(losses.balances)
            return written, cost if cost.requires_grad else None

        return run

    def _context(self, micro_batch: int) -> Context:
        if micro_batch not in self.contexts:
            totals = self.counts.totals[micro_batch]
            context = self.model.prepare(self.batches[micro_batch], totals=totals)
            context.deviations = None if self.model.shape.hyper is None else {}
            self.contexts[micro_batch] = context
        return self.contexts[micro_batch]

    def after_forward(self, turn: Turn) -> None:
        losses = nodes.merge_losses(self.model, self.pieces.pop(turn))
        tokens = self.counts.mtp_tokens if losses.mtp else ()
        for name, value in losses.metrics(self.counts.tokens, tokens, self.counts.fractions[turn[0]]).items():
            # All tp ranks compute the same head losses: only one of them may contribute to the sum over ranks.
            part = value if name.startswith("aux_") or self.model.groups.tp.rank == 0 else 0 * value
            self.metrics[name] = self.metrics[name] + part if name in self.metrics else part

    # ------------------------------------------------------------------------------------ backward

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def weights_of(self, phase: Phase) -> Sequence[Tensor]:
        return nodes.weights_after_combine(self.model, phase)

    def delay_wgrad(self, turn: Turn, phase: Phase) -> AbstractContextManager[None]:
        assert self.wgrad_store is not None
        buckets = tuple(_layer_bucket(bucket) for bucket in phase.buckets)
        return self.wgrad_store.node((*turn, phase.name), buckets)

    def run_wgrad(self, turn: Turn, phase: Phase, bucket: str) -> None:
        assert self.wgrad_store is not None
        self.wgrad_store.drain((*turn, phase.name), _layer_bucket(bucket))

    def replay(self, turn: Turn, phase: Phase, hold: Hold) -> None:
        assert self.replays is not None
        self.replays.replay((*turn, phase.name), hold)

    def after_turn(self, turn: Turn) -> None:
        """Free the context of a micro-batch after its last op on this rank."""
        micro_batch, segment = turn
        if segment == self.last_segment:
            for deviation in (self.contexts.pop(micro_batch).deviations or {}).values():
                self.metrics[DEVIATION] = torch.maximum(self.metrics.get(DEVIATION, deviation), deviation)

    def sum_copies(self, op: Op) -> None:
        """All-reduce gradients that the first and last stage share; `train_step` sums copies within a stage."""
        self.state.optimizer.accumulate_grads()
        ends = [each for each in self.state.copies if each.group is self.model.groups.ends]
        gradients.sum_copies_(self.state.optimizer.gradients(), ends)

    def end(self) -> None:
        """Clean up after the last op."""
        self.model.recompute(None)
        set_wgrad_store(self.model, None)
        if self.wgrad_store is not None:
            self.wgrad_store.finish()
        if self.replays is not None:
            self.replays.finish()
        self.state.optimizer.accumulate_grads()


def _layer_bucket(bucket: str) -> str:
    """The layer's own name for a wgrad bucket of a phase."""
    return bucket.rpartition(".")[2]


def _reduce_metrics(state: JobState, metrics: Mapping[str, Tensor], stop: bool) -> dict[str, Tensor]:
    """Metrics over all ranks as 0-D tensors, in one all-reduce, and `STOP`: how many ranks received a stop
    signal. Collective over the job."""
    names = sorted({name for stage in _tell(state, sorted(metrics), []) for name in stage})
    zero = torch.zeros((), dtype=torch.float64, device=state.device)
    parts = {name: metrics[name].double() if name in metrics else zero for name in names}
    deviation = parts.pop(DEVIATION, None)
    parts[STOP] = zero + stop
    sums = all_reduce_no_grad(torch.stack([*parts.values()]), state.job)
    reduced = dict(zip(parts, sums.unbind(), strict=True))
    if deviation is not None:
        reduced[DEVIATION] = all_reduce_max_no_grad(deviation, state.job)
    return reduced


def micro_batches(run: Run, loader: Loader, step: int, first: int, dp: Group = ALONE) -> list[MicroBatch]:
    """This rank's rows of the micro-batches of a step, from sample `first` on. Which global samples form a
    micro-batch does not depend on the topology; data-parallel ranks split it evenly."""
    samples = run.train.batch_samples // run.train.micro_batches
    each = samples // dp.size
    starts = range(first + dp.rank * each, first + run.train.batch_samples, samples)
    return [
        replace(loader.batch(range(start, start + each)), step=step, seed=run.train.seed) for start in starts
    ]


@torch.no_grad()
def evaluate(state: JobState, run: Run, loader: Loader) -> float:
    """Mean cross-entropy over the first `eval_samples` samples, in nats per token. Collective over the job."""
    mine = torch.zeros(2, dtype=torch.float64, device=state.device)
    if isinstance(state, State):
        mine = _evaluate(state, run, loader)
    else:
        with fail_together(state.job):
            pass
    total, tokens = all_reduce_no_grad(mine, state.job).tolist()
    return float(total / max(1, tokens))


def _evaluate(state: State, run: Run, loader: Loader) -> Tensor:
    """This rank's share of the sum of losses, and of the number of tokens that they are of."""
    groups = state.model.groups
    samples = min(run.train.eval_samples, loader.samples_per_epoch)
    each = run.train.batch_samples // run.train.micro_batches // groups.dp.size
    starts = range(groups.dp.rank * each, samples + groups.dp.rank * each, each * groups.dp.size)
    work = _Evaluation(state, [_evaluation_batch(run, loader, start, each, samples) for start in starts])
    with fail_together(state.job):
        for batch in work.batches:
            state.model.check(batch)
    execute(state.evaluation(len(work.batches)), work, state.keeper, state.links(each, run))
    return work.totals


def _evaluation_batch(run: Run, loader: Loader, start: int, each: int, samples: int) -> MicroBatch:
    """`each` samples from `start` on. All ranks need batches of the same shape for their collectives: beyond
    the last sample, it is repeated with its loss masked."""
    chosen = range(start, start + each)
    batch = loader.batch([min(sample, samples - 1) for sample in chosen])
    counts_B1 = torch.tensor([sample < samples for sample in chosen])[:, None]
    loss_mask_BT = batch.loss_mask_BT & counts_B1
    return replace(batch, loss_mask_BT=loss_mask_BT, step=0, seed=run.train.seed, training=False)


class _Evaluation(StepWork):
    """What the executor calls in an evaluation: forwards only, accumulating the loss."""

    def __init__(self, state: State, batches: Sequence[MicroBatch]) -> None:
        self.model, self.streams, self.batches = state.model, state.streams, batches
        self.contexts: dict[int, Context] = {}
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        """Loss sum and token count; zero on all but one of the tp ranks."""

    def function(self, turn: Turn, phase: Phase) -> PhaseFn:
        micro_batch, _ = turn
        if micro_batch not in self.contexts:
            self.contexts[micro_batch] = self.model.prepare(self.batches[micro_batch])
        context = self.contexts[micro_batch]

        def run(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], None]:
            written, losses = nodes.run(self.model, phase, context, tensors)
            if losses is not None and self.model.groups.tp.rank == 0:  # all tp ranks have the same losses
                self.totals += torch.stack([losses.loss_sum.double(), losses.token_count.double()])
            return written, None

        return run

    def after_turn(self, turn: Turn) -> None:
        micro_batch, segment = turn
        if segment == self.model.segments[-1]:
            del self.contexts[micro_batch]
