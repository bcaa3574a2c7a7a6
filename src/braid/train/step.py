"""One step: micro-batches forward and backward, one look at the gradient, one update. And evaluation.

The tokens that count are known over all ranks before the first forward, so every loss is scaled by them before
its backward and all reductions are plain sums.

Shapes: M micro-batches of the step, K counts of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from braid.collectives import ALONE, Group, summed
from braid.config import Run
from braid.data import Loader
from braid.errors import DataError
from braid.model.context import MicroBatch, Whole
from braid.model.language import LanguageModel, PartOfStep
from braid.model.mtp import targets
from braid.optim import gradients
from braid.parallel.sharding import before_backward, release
from braid.train.feed import micro_batch
from braid.train.loads import Loads, update_selection_biases
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
    asked, metrics = _over_ranks(parts, stop, groups.world)
    state.step += 1
    state.samples += run.train.batch_samples
    state.tokens += run.train.batch_samples * run.data.sequence_tokens
    found = state.optimizer.gradients()
    gradients.sum_copies_(found, state.copies)
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
    metrics |= loads.metrics()
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
    device = model.embedding.weight.device
    counts_MK = summed(torch.tensor(rows, device=device), groups.dp).tolist()
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
    state: State, run: Run, batches: Sequence[MicroBatch], counts: Counts
) -> tuple[dict[str, Tensor], Loads]:
    """Leave the gradient of the whole step in the optimizer; tell this rank's part of its figures, and the
    load of its experts over all ranks."""
    model, metrics, loads = state.model, dict[str, Tensor](), Loads()
    for number, (batch, whole, part) in enumerate(zip(batches, counts.wholes, counts.parts, strict=True)):
        context = model.prepare(batch, whole=whole)
        context.earlier_E = loads.favourites_E
        losses = model.losses(context)
        before_backward(model, run.mesh.shard, last=number == len(batches) - 1)
        losses.share(counts.tokens, counts.mtp_tokens, part).backward()
        state.optimizer.gather()
        loads = loads.plus(losses.balances)
        for name, figure in losses.metrics(counts.tokens, counts.mtp_tokens, part).items():
            # The head's losses are the same on all tp ranks: one of them tells.
            if name.startswith("aux_") or model.groups.tp.rank == 0:
                metrics[name] = metrics[name] + figure if name in metrics else figure
            else:
                metrics[name] = torch.zeros_like(figure)
    return metrics, loads.over(model.groups.slab)


def _over_ranks(metrics: Mapping[str, Tensor], stop: bool, world: Group) -> tuple[bool, dict[str, float]]:
    """Figures summed over ranks, and whether any rank was asked to stop."""
    device = next(iter(metrics.values())).device
    figures = [figure.double() for figure in metrics.values()]
    told = summed(torch.stack([torch.tensor(float(stop), device=device).double(), *figures]), world).tolist()
    return told[0] > 0, dict(zip(metrics, told[1:], strict=True))


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


def _not_finite(loss: float, norm: float, found: Mapping[str, Tensor], world: Group) -> list[str]:
    """What is not finite, on any rank."""
    if math.isfinite(loss) and math.isfinite(norm):
        return []
    everywhere = gather_json(gradients.not_finite(found), world)
    names = dict.fromkeys(name for names in everywhere for name in names)
    return [*(["loss"] if not math.isfinite(loss) else []), *names] or ["grad_norm"]


@torch.no_grad()
def evaluate(model: LanguageModel, run: Run, loader: Loader) -> float:
    """Mean cross-entropy over the first `eval_samples` samples, in nats per token."""
    groups = model.groups
    samples = min(run.train.eval_samples, loader.samples_per_epoch)
    each = run.train.batch_samples // run.train.micro_batches // groups.dp.size
    totals = torch.zeros(2, dtype=torch.float64, device=model.embedding.weight.device)
    for start in range(0, samples, each * groups.dp.size):
        first = start + groups.dp.rank * each
        chosen = range(first, min(first + each, samples)) if groups.dp.size == 1 else range(first, first + each)
        batch = micro_batch(
            loader, [min(s, samples - 1) for s in chosen], step=0, seed=run.train.seed, training=False
        )
        # Ranks compute in step: one that has run out of samples goes on with one that does not count.
        counts_B1 = torch.tensor([s < samples for s in chosen])[:, None]
        batch = replace(batch, loss_mask_BT=batch.loss_mask_BT & counts_B1)
        losses = model.losses(model.prepare(batch))
        totals += torch.stack([losses.loss_sum.double(), losses.token_count.double()])
    release(model)
    total, tokens = summed(totals, groups.dp_cp).tolist()
    return float(total / max(1, tokens))
