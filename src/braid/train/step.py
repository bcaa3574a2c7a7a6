"""The training step (forward and backward of all micro-batches, gradient clipping, update), and evaluation.

The number of loss tokens of the whole step is all-reduced before the first forward. Every loss is divided by it
before its backward, so all reductions of losses and gradients are plain sums, and the result does not depend on
how samples are split into micro-batches and ranks. Encoders train in the same step: the gradients of their rows
come back scaled, so theirs are plain sums too, and one norm over all modules clips them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from braid.config import Run
from braid.data import Loader
from braid.distributed.collectives import ALONE, Group, all_reduce_max_no_grad, all_reduce_no_grad
from braid.engine.executor import AfterOp, PipelineLinks, Program, execute
from braid.engine.graphs import Sections
from braid.engine.node import StepWork, Watch
from braid.errors import DataError
from braid.kernels.host import AsyncHostCopy
from braid.launch.process import all_gather_json, fail_together
from braid.model.context import MicroBatch
from braid.model.encoder import Items
from braid.model.multimodal import mask_placeholders
from braid.nn.moe.balance import Load, load
from braid.nn.precision import loss_shares
from braid.optim import gradients
from braid.optim.spike_record import MEASURES
from braid.optim.spikes import Judged
from braid.schedule import OpSpan, Turn
from braid.schedule.graph import LANGUAGE
from braid.train.copies import ComparedCopies
from braid.train.counts import Counts, await_counts, count, fail_to_count
from braid.train.expert_load import ExpertLoad, load_metrics, update_selection_biases
from braid.train.item_prefetch import ItemPrefetch
from braid.train.items import Tables, edge_links, item_metrics, prefetch_items, read_items
from braid.train.state import JobState, State
from braid.train.step_work import (
    DEVIATION,
    EncoderEvaluation,
    EncoderStep,
    EvaluationWork,
    LanguageEvaluation,
    LanguageStep,
    ModuleStep,
    ModulesWork,
)

COPIES = "copies"
"""How many copies of weights differ; travels with the metrics of steps that compare them."""

STOP = "stop"
"""How many ranks received a stop signal; travels with the metrics."""

SAVED = "saved"
"""On how many ranks the save under way has ended; travels with the metrics."""


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
    diverged: tuple[str, ...] = ()
    """Which ranks hold copies of weights that differ from those of others, and of which, in words."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Above these, the gradient norm and the loss are spikes."""
    skipped: bool = False
    """Whether the update was not applied."""
    stop: bool = False
    """Whether any rank received a stop signal."""
    saved: bool = False
    """Whether the save under way had ended on all ranks."""
    patches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Patches of every item that encoders read, by module."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]

    @property
    def spikes(self) -> dict[str, tuple[float, float]]:
        """What is above its limit, with both numbers."""
        values = {"grad_norm": self.grad_norm, "loss": self.loss}
        return {name: (values[name], limit) for name, limit in self.limits.items() if values[name] > limit}


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step that was issued and may still run on the device.

    Shapes: P parameters.
    """

    state: JobState
    step: int
    first: int
    """Its first sample."""
    tokens: int
    parameters: tuple[str, ...]
    metrics: tuple[str, ...]
    """Names of the last ones of `numbers`."""
    numbers: AsyncHostCopy
    """The gradient norm, what was judged by it, and the metrics, over all ranks."""
    squares_P: AsyncHostCopy
    """Squared gradient norms of this rank's parameters, to tell which are not finite."""
    items: Mapping[str, float]
    """Metrics of the items of modules."""
    patches: Mapping[str, tuple[int, ...]]
    """Patches of every item, by module."""
    copies: ComparedCopies | None = None
    """The comparison of copies with other ranks, in steps that have one."""
    loads: Mapping[str, tuple[AsyncHostCopy, ...]]
    """By module: tokens routed to each expert of every MoE layer, and those within its capacity."""

    def result(self) -> StepResult:
        """Wait for the step. Call it once for every step, in order, on all ranks."""
        norm, *judged = self.numbers.wait().tolist()
        limits, skipped, values = judged[: len(MEASURES)], judged[len(MEASURES)], judged[len(MEASURES) + 1 :]
        metrics = loss_shares(dict(zip(self.metrics, values, strict=True))) | dict(self.items)
        stop, diverged = metrics.pop(STOP) > 0, metrics.pop(COPIES, 0.0) > 0
        saved = metrics.pop(SAVED) == self.state.job.size
        not_finite: tuple[str, ...] = ()
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            not_finite = self._not_finite(metrics["loss"], self.state.job)
        self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if not_finite else 0
        mine = {name: [[name, *load(*pair.wait())] for pair in pairs] for name, pairs in self.loads.items()}
        told = _tell(self.state, mine)
        for module in dict.fromkeys(name for name, *_ in told):
            figures = load_metrics([Load(*layer) for name, *layer in told if name == module])
            prefix = "" if module == LANGUAGE else f"{module}."
            metrics |= {prefix + name: value for name, value in figures.items()}
        return StepResult(
            metrics=metrics,
            tokens=self.tokens,
            grad_norm=norm,
            not_finite=not_finite,
            diverged=self._divergences() if diverged else (),
            limits=dict(zip(MEASURES, limits, strict=True)),
            skipped=bool(not_finite) or skipped > 0,
            stop=stop,
            saved=saved,
            patches=self.patches,
        )

    def _divergences(self) -> tuple[str, ...]:
        """Those that any rank sees, each once."""
        mine = [] if self.copies is None else [str(each) for each in self.copies.divergences()]
        return tuple(dict.fromkeys(text for texts in all_gather_json(mine, self.state.job) for text in texts))

    def _not_finite(self, loss: float, job: Group) -> tuple[str, ...]:
        """Names of what is not finite, on any rank."""
        finite_P = self.squares_P.wait().isfinite().tolist()
        mine = [name for name, finite in zip(self.parameters, finite_P, strict=True) if not finite]
        names = dict.fromkeys(name for names in all_gather_json(mine, job) for name in names)
        return (*(() if math.isfinite(loss) else ("loss",)), *names) or ("grad_norm",)


def train_step(state: JobState, run: Run, loader: Loader, rate: float, *, stop: bool = False) -> StepResult:
    """Run step `state.step + 1` at learning rate `rate` and wait for its result."""
    return begin_step(state, run, loader, rate, stop=stop).result()


def begin_step(
    state: JobState,
    run: Run,
    loader: Loader,
    rate: float,
    *,
    stop: bool = False,
    saved: bool = False,
    prefetch: ItemPrefetch | None = None,
) -> PendingStep:
    """Issue step `state.step + 1` at learning rate `rate`. If the loss or the gradient norm is not finite, or
    a spike that is to be skipped, nothing is updated; the device decides that, so the host need not wait for
    it. `stop` says whether this rank received a stop signal, `saved` whether its save under way has ended.
    `prefetch` reads the items of the step after it meanwhile."""
    said = {STOP: stop, SAVED: saved}
    if not state.modules:
        return _attend_step(state, run, said)
    step, first = state.step + 1, state.samples
    inputs = read_step(state, run, loader, step, first, prefetch)
    counts = inputs.counts
    parts, loads = backward(state, run, inputs.batches, counts, items=inputs.items)
    copies = state.copies.compare() if _compares_copies(state, run) else None
    metrics = _reduce_metrics(state, run, parts, said, copies)
    _advance(state, run)
    state.progress.enter("the gradient norm")
    norm, squares_P, parameters = _gradient_norm(state)
    judged = _judge(state, run, norm, metrics)
    state.progress.enter("the optimizer")
    for name, module in state.modules.items():
        module.optimizer.update(rate, scale=gradients.clip_scale(norm, run.optim.clip), skip=~judged.apply)
        update_selection_biases(module.model, loads[name], apply=judged.apply, frozen=module.frozen_buffers)
    state.progress.enter("the result")
    return PendingStep(
        state=state,
        step=step,
        first=first,
        tokens=counts.tokens,
        parameters=parameters,
        metrics=tuple(metrics),
        numbers=AsyncHostCopy(torch.stack([norm, *judged.numbers, *metrics.values()])),
        squares_P=AsyncHostCopy(squares_P),
        items=item_metrics(state.plan, counts.tables),
        patches={
            name: tuple(each for table in tables for each in table.patches)
            for name, tables in counts.tables.items()
        },
        copies=copies,
        loads={name: tuple(map(AsyncHostCopy, load.pairs())) for name, load in loads.items()},
    )


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What a rank reads of a step."""

    batches: Sequence[MicroBatch]
    """Those of the language model, on its ranks."""
    counts: Counts
    items: Mapping[str, Sequence[Items]]
    """Those of this rank's encoders."""


def read_step(
    state: JobState, run: Run, loader: Loader, step: int, first: int, prefetch: ItemPrefetch | None = None
) -> StepInputs:
    """Read the samples of a step, from sample `first` on, and count them. Collective over the job."""
    batches: list[MicroBatch] = []
    if isinstance(state, State):
        try:
            batches = micro_batches(run, loader, step, first, state.model.groups.dp)
        except DataError as problem:
            counts = fail_to_count(state, run.train.micro_batches, problem)
        else:
            counts = count(state, batches, loader.items, first)
    else:
        counts = await_counts(state, run.train.micro_batches, first)
    items: dict[str, list[Items]] = {}
    if state.modules and state.plan.encoders:
        samples = _samples_of_step(state, run, first)
        items = read_items(state, counts.tables, loader.items, samples, step=step, prefetch=prefetch)
        if prefetch is not None and step < run.train.steps:
            after = _samples_of_step(state, run, first + run.train.batch_samples)
            prefetch_items(state, loader.items, after, prefetch)
    return StepInputs(batches=batches, counts=counts, items=items)


def _samples_of_step(state: JobState, run: Run, first: int) -> list[range]:
    """The global samples of each micro-batch of a step, from sample `first` on."""
    size = state.plan.micro_batch_samples
    return [range(start, start + size) for start in range(first, first + run.train.batch_samples, size)]


def _judge(state: JobState, run: Run, norm: Tensor, metrics: Mapping[str, Tensor]) -> Judged:
    """Whether the update is applied: on every rank alike, with or without modules."""
    train = run.train
    return state.spikes.judge(
        norm,
        metrics["loss"],
        policy=train.spikes,
        sigma=train.spike_sigma,
        most_skipped=train.max_skipped,
    )


def _gradient_norm(state: JobState) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The norm over all modules and ranks, the squared norms of this rank's gradients, and whose they are."""
    names: list[str] = []
    squares: list[Tensor] = []
    square = torch.zeros((), dtype=torch.float64, device=state.device)
    for module in state.modules.values():
        grads, kernels = module.optimizer.gradients(), module.optimizer.kernels
        # Copies shared by the first and last pipeline stage (embeddings) were summed by an op of the schedule.
        ends = module.model.groups.ends
        gradients.sum_copies_(grads, [each for each in module.copies if each.group is not ends])
        repeated = frozenset(name for name in grads if not module.kept[name].first)
        squares_P = kernels.squares(list(grads.values())).to(state.device)  # of none, they would be on the host
        square = square + gradients.own_square(
            grads, module.copies, repeated, squares_P=squares_P, kernels=kernels
        )
        names += [module.prefix + module.names[name] for name in grads]
        squares.append(squares_P)
    return gradients.total_norm(square, state.job), torch.cat(squares), tuple(names)


def _attend_step(state: JobState, run: Run, said: Mapping[str, bool]) -> PendingStep:
    """The part of a rank without modules in a step: the job's collectives, in the order of `begin_step`."""
    first = state.samples
    counts = await_counts(state, run.train.micro_batches, first)
    state.progress.skip(max(len(ops) for ops in state.plan.schedule.ops))
    metrics = _reduce_metrics(state, run, {}, said)
    _advance(state, run)
    state.progress.skip(2)  # the gradient norm and the optimizer
    state.progress.enter("the result")
    norm = gradients.total_norm(torch.zeros((), dtype=torch.float64, device=state.device), state.job)
    judged = _judge(state, run, norm, metrics)
    return PendingStep(
        state=state,
        step=state.step,
        first=first,
        tokens=counts.tokens,
        parameters=(),
        metrics=tuple(metrics),
        numbers=AsyncHostCopy(torch.stack([norm, *judged.numbers, *metrics.values()])),
        squares_P=AsyncHostCopy(torch.zeros(0)),
        items={},
        patches={},
        loads={},
    )


def _advance(state: JobState, run: Run) -> None:
    state.step += 1
    state.samples += run.train.batch_samples
    state.tokens += run.train.batch_samples * run.data.sequence_tokens


def _tell(state: JobState, mine: Mapping[str, Sequence[Any]]) -> list[Any]:
    """What the stages of all modules have to say, for every rank of the job: `mine`, by module, on all ranks of
    a stage alike."""
    if isinstance(state, State) and state.everyone_trains:
        told = all_gather_json(list(mine[LANGUAGE]), state.model.groups.pp)
    else:
        spoken = (said for name, said in mine.items() if state.modules[name].model.groups.slab.rank == 0)
        told = all_gather_json([each for said in spoken for each in said], state.job)
    return [each for said in told for each in said]


def backward(
    state: JobState,
    run: Run,
    batches: Sequence[MicroBatch],
    counts: Counts,
    watch: Watch | None = None,
    items: Mapping[str, Sequence[Items]] = MappingProxyType({}),
    after_op: AfterOp | None = None,
) -> tuple[dict[str, dict[str, Tensor]], dict[str, ExpertLoad]]:
    """Run the schedule of the step, which leaves the gradients in the optimizers. `batches` are those of the
    language model, `items` those of this rank's encoders. Returns by module this rank's share of the metrics,
    and the expert load over all ranks. `watch` observes nodes as they run, `after_op` is called after each
    op."""
    steps: dict[str, ModuleStep] = {}
    if isinstance(state, State):
        steps[LANGUAGE] = LanguageStep(state, run, batches, counts)
    for name, module in state.encoders.items():
        steps[name] = EncoderStep(state, module, items[name], counts)
    rows = len(batches[0].sample_B) if batches else 0
    graphs = None
    if isinstance(state, State) and watch is None and after_op is None and state.progress.times is None:
        language = steps[LANGUAGE]
        assert isinstance(language, LanguageStep)
        graphs = None if state.graphs is None else state.graphs.of_step(run, language, batches, counts)
    state.log = run_schedule(
        state,
        run,
        state.program,
        steps,
        counts.tables,
        rows=rows,
        watch=watch,
        after_op=after_op,
        graphs=graphs,
    )
    for step in steps.values():
        step.end()
    loads = {name: step.loads.all_reduce(step.model.groups.slab) for name, step in steps.items()}
    return {name: step.metrics for name, step in steps.items()}, loads


def run_schedule(
    state: JobState,
    run: Run,
    program: Program,
    works: Mapping[str, StepWork],
    tables: Tables,
    *,
    rows: int,
    watch: Watch | None = None,
    after_op: AfterOp | None = None,
    graphs: Sections | None = None,
) -> Sequence[OpSpan]:
    """Execute the ops of this rank, with the work of each of its modules, on micro-batches of `rows` rows of
    text and the items of the tables. Returns when each op ran."""
    if not state.plan.encoders:
        links = state.links(rows, run)
        return execute(program, works[LANGUAGE], state.keeper, links, watch, after_op, graphs)
    module_of = [segment.module for segment in state.plan.schedule.graph.segments]

    def message(turn: Turn) -> Tensor:
        work = works[module_of[turn[1]]]
        if isinstance(work, EncoderStep | EncoderEvaluation):
            return work.message(turn[0])
        return state.language_message(rows, run)

    links = PipelineLinks(
        channels=state.channels, message=message, edges=edge_links(state, tables), progress=state.progress
    )
    return execute(program, ModulesWork(state, works), state.keeper, links, watch, after_op)


def _compares_copies(state: JobState, run: Run) -> bool:
    """Whether the next step compares copies of weights."""
    every = run.train.check_copies_every
    return every > 0 and state.job.size > 1 and (state.step + 1) % every == 0


def _reduce_metrics(
    state: JobState,
    run: Run,
    by_module: Mapping[str, Mapping[str, Tensor]],
    said: Mapping[str, bool],
    copies: ComparedCopies | None = None,
) -> dict[str, Tensor]:
    """Metrics over all ranks as 0-D tensors, in one all-reduce, with the number of ranks that say each of
    `said` (`STOP`, `SAVED`), and with `COPIES`. Collective over the job."""
    names = sorted(set(_tell(state, {module: sorted(each) for module, each in by_module.items()})))
    metrics = _joined(by_module.values())
    zero = torch.zeros((), dtype=torch.float64, device=state.device)
    parts = {name: metrics[name].double() if name in metrics else zero for name in names}
    deviation = parts.pop(DEVIATION, None)
    parts |= {name: zero + yes for name, yes in said.items()}
    if _compares_copies(state, run):
        parts[COPIES] = zero if copies is None else copies.differs
    sums = all_reduce_no_grad(torch.stack([*parts.values()]), state.job)
    reduced = dict(zip(parts, sums.unbind(), strict=True))
    if deviation is not None:
        reduced[DEVIATION] = all_reduce_max_no_grad(deviation, state.job)
    return reduced


def _joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of all modules of a rank: only `DEVIATION` may be in several."""
    joined: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            joined[name] = torch.maximum(joined[name], value) if name in joined else value
    return joined


def micro_batches(run: Run, loader: Loader, step: int, first: int, dp: Group = ALONE) -> list[MicroBatch]:
    """This rank's rows of the micro-batches of a step, from sample `first` on. Which global samples form a
    micro-batch does not depend on the topology; data-parallel ranks split it evenly."""
    samples = run.train.batch_samples // run.train.micro_batches
    each = samples // dp.size
    starts = range(first + dp.rank * each, first + run.train.batch_samples, samples)
    batches = (loader.batch(range(start, start + each)) for start in starts)
    return [replace(_masked(run, batch), step=step, seed=run.train.seed) for batch in batches]


def _masked(run: Run, batch: MicroBatch) -> MicroBatch:
    """Without loss where the target is a placeholder."""
    return mask_placeholders(batch, {name: module.token for name, module in run.modules.items()})


def evaluate(state: JobState, run: Run, loader: Loader) -> float:
    """Mean cross-entropy over the first `eval_samples` samples, in nats per token. Collective over the job."""
    total, tokens = evaluation_sums(state, run, loader, LanguageEvaluation)
    return total / max(1, tokens)


@torch.no_grad()
def evaluation_sums(
    state: JobState,
    run: Run,
    loader: Loader,
    work: Callable[[State, Sequence[MicroBatch]], EvaluationWork],
) -> tuple[float, float]:
    """What the work of the language model adds up over the first `eval_samples` samples and all ranks.
    Collective over the job."""
    samples = min(run.train.eval_samples, loader.samples_per_epoch)
    mine = torch.zeros(2, dtype=torch.float64, device=state.device)
    batches: list[MicroBatch] = []
    with fail_together(state.job):
        if isinstance(state, State):
            batches = _evaluation_batches(state, run, loader, samples)
            for batch in batches:
                state.model.check(batch)
    if state.modules:
        language = work(state, batches) if isinstance(state, State) else None
        _evaluate(state, run, loader, batches, samples, language)
        mine = mine if language is None else language.totals
    first, second = all_reduce_no_grad(mine, state.job).tolist()
    return first, second


def _evaluate(
    state: JobState,
    run: Run,
    loader: Loader,
    batches: Sequence[MicroBatch],
    samples: int,
    language: StepWork | None,
) -> None:
    """Run the forwards of this rank's modules."""
    size = run.train.batch_samples // run.train.micro_batches
    chosen = [
        [min(sample, samples - 1) for sample in range(start, start + size)] for start in range(0, samples, size)
    ]
    works: dict[str, StepWork] = {} if language is None else {LANGUAGE: language}
    tables: Tables = {}
    if state.plan.encoders:
        counts = (
            count(state, batches, loader.items)
            if isinstance(state, State)
            else await_counts(state, len(chosen))
        )
        tables = counts.tables
        items = read_items(state, tables, loader.items, chosen, step=0, training=False)
        for name, module in state.encoders.items():
            works[name] = EncoderEvaluation(state, module, items[name], tables[name])
    rows = len(batches[0].sample_B) if batches else 0
    run_schedule(state, run, state.evaluation(len(chosen)), works, tables, rows=rows)


def _evaluation_batches(state: State, run: Run, loader: Loader, samples: int) -> list[MicroBatch]:
    """This rank's rows of the micro-batches of an evaluation."""
    dp = state.model.groups.dp
    each = run.train.batch_samples // run.train.micro_batches // dp.size
    starts = range(dp.rank * each, samples + dp.rank * each, each * dp.size)
    return [_evaluation_batch(run, loader, start, each, samples) for start in starts]


def _evaluation_batch(run: Run, loader: Loader, start: int, each: int, samples: int) -> MicroBatch:
    """`each` samples from `start` on. All ranks need batches of the same shape for their collectives: beyond
    the last sample, it is repeated with its loss masked."""
    chosen = range(start, start + each)
    batch = _masked(run, loader.batch([min(sample, samples - 1) for sample in chosen]))
    counts_B1 = torch.tensor([sample < samples for sample in chosen])[:, None]
    loss_mask_BT = batch.loss_mask_BT & counts_B1
    return replace(batch, loss_mask_BT=loss_mask_BT, step=0, seed=run.train.seed, training=False)
