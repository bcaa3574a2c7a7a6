"""One step: micro-batches forward and backward, one look at the gradient, one update. And evaluation.

The tokens that count are known before the first forward, so every loss is scaled by them before its backward
and all reductions are plain sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from braid.config import Run
from braid.data import Loader
from braid.model.context import MicroBatch
from braid.model.language import LanguageModel, PartOfStep
from braid.model.mtp import targets
from braid.optim import gradients
from braid.train.feed import micro_batch
from braid.train.loads import Loads, update_selection_biases
from braid.train.state import State


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step."""

    metrics: dict[str, float]
    """`loss`, the mean cross-entropy of the tokens that count, in nats (0 where none does), and others."""
    tokens: int
    """Tokens that counted."""
    grad_norm: float
    """Before clipping."""
    not_finite: tuple[str, ...] = ()
    """What was not finite: then the weights were left alone."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


def train_step(state: State, run: Run, loader: Loader, rate: float) -> StepResult:
    """Do step `state.step + 1`. Where loss or gradients are not finite, the weights stay as they were."""
    batches = micro_batches(run, loader, state.step + 1, state.samples)
    tokens = sum(int(batch.loss_mask_BT.sum()) for batch in batches)
    metrics, loads = _backward(state, batches, tokens)
    state.step += 1
    state.samples += run.train.batch_samples
    state.tokens += run.train.batch_samples * run.data.sequence_tokens
    found = state.optimizer.gradients()
    norm = float(gradients.total_norm(found))
    spoiled = _not_finite(metrics["loss"], norm, found)
    if spoiled:
        state.optimizer.forget()
        state.skipped_in_a_row += 1
    else:
        gradients.clip_(found, norm, run.optim.clip)
        state.optimizer.update(rate)
        update_selection_biases(state.model, loads)
        state.skipped_in_a_row = 0
    metrics |= loads.metrics()
    return StepResult(metrics=metrics, tokens=tokens, grad_norm=norm, not_finite=tuple(spoiled))


def _backward(state: State, batches: Sequence[MicroBatch], step_tokens: int) -> tuple[dict[str, float], Loads]:
    """Leave the gradient of the whole step in the optimizer; tell its figures, and the load of its experts."""
    depths = range(len(state.model.layout.mtp))
    mtp_tokens = [sum(int(targets(batch, d).loss_mask_BT.sum()) for batch in batches) for d in depths]
    metrics: dict[str, torch.Tensor] = {}
    loads = Loads()
    for batch, part_of_step in zip(batches, parts_of_step(batches), strict=True):
        context = state.model.prepare(batch)
        context.earlier_E = loads.favourites_E
        losses = state.model.losses(context)
        losses.share(step_tokens, mtp_tokens, part_of_step).backward()
        state.optimizer.gather()
        loads = loads.plus(losses.balances)
        for name, part in losses.metrics(step_tokens, mtp_tokens, part_of_step).items():
            metrics[name] = metrics[name] + part if name in metrics else part
    return {name: float(value) for name, value in metrics.items()}, loads


def parts_of_step(batches: Sequence[MicroBatch]) -> list[PartOfStep]:
    """How much of the step each of its micro-batches is. Known on the host, before any forward."""
    valid = [batch.documents_BT >= 0 for batch in batches]
    tokens, rows = [int(each.sum()) for each in valid], [int(each.any(1).sum()) for each in valid]
    return [
        PartOfStep(tokens=t / max(1, sum(tokens)), rows=r / max(1, sum(rows)))
        for t, r in zip(tokens, rows, strict=True)
    ]


def micro_batches(run: Run, loader: Loader, step: int, first: int) -> list[MicroBatch]:
    """The micro-batches of a step, from sample `first` on: fixed global samples, whatever the ranks."""
    samples = run.train.batch_samples // run.train.micro_batches
    return [
        micro_batch(loader, range(start, start + samples), step=step, seed=run.train.seed, training=True)
        for start in range(first, first + run.train.batch_samples, samples)
    ]


def _not_finite(loss: float, norm: float, found: dict[str, torch.Tensor]) -> list[str]:
    if math.isfinite(loss) and math.isfinite(norm):
        return []
    return [*(["loss"] if not math.isfinite(loss) else []), *gradients.not_finite(found)] or ["grad_norm"]


@torch.no_grad()
def evaluate(model: LanguageModel, run: Run, loader: Loader) -> float:
    """Mean cross-entropy over the first `eval_samples` samples, in nats per token."""
    samples = min(run.train.eval_samples, loader.samples_per_epoch)
    at_once = run.train.batch_samples // run.train.micro_batches
    total, count = 0.0, 0
    for start in range(0, samples, at_once):
        chosen: Sequence[int] = range(start, min(start + at_once, samples))
        losses = model(micro_batch(loader, chosen, step=0, seed=run.train.seed, training=False))
        total += float(losses.loss_sum)
        count += int(losses.token_count)
    return total / max(1, count)
