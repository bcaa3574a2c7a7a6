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
from braid.model.language import LanguageModel
from braid.optim import gradients
from braid.train.feed import micro_batch
from braid.train.state import State


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step."""

    loss: float
    """Mean cross-entropy of the tokens that count, in nats; 0 where none does."""
    grad_norm: float
    """Before clipping."""
    aux: dict[str, float]
    """Further losses by name, as means over the step."""
    not_finite: tuple[str, ...] = ()
    """What was not finite: then the weights were left alone."""


def train_step(state: State, run: Run, loader: Loader, rate: float) -> StepResult:
    """Do step `state.step + 1`. Where loss or gradients are not finite, the weights stay as they were."""
    step = state.step + 1
    batches = micro_batches(run, loader, step)
    step_tokens = max(1, sum(int(batch.loss_mask_BT.sum()) for batch in batches))
    loss_sum = torch.zeros((), dtype=torch.float64)
    aux: dict[str, torch.Tensor] = {}
    for batch in batches:
        losses = state.model(batch)
        losses.share(step_tokens).backward()
        state.optimizer.gather()
        loss_sum += losses.loss_sum.detach().double().cpu()
        for name, value in losses.aux.items():
            part = value.detach() * losses.token_count / step_tokens
            aux[name] = aux.get(name, torch.zeros_like(part)) + part
    found = state.optimizer.gradients()
    norm = float(gradients.total_norm(found))
    loss = float(loss_sum) / step_tokens
    state.step = step
    spoiled = _not_finite(loss, norm, found)
    if spoiled:
        state.optimizer.forget()
        state.skipped_in_a_row += 1
    else:
        gradients.clip_(found, norm, run.optim.clip)
        state.optimizer.update(rate)
        state.skipped_in_a_row = 0
    return StepResult(
        loss=loss,
        grad_norm=norm,
        aux={name: float(value) for name, value in aux.items()},
        not_finite=tuple(spoiled),
    )


def micro_batches(run: Run, loader: Loader, step: int) -> list[MicroBatch]:
    """The micro-batches of a step: fixed global samples, whatever the ranks."""
    samples = run.train.batch_samples // run.train.micro_batches
    first = (step - 1) * run.train.batch_samples
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
