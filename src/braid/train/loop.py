"""The training loop: step, log, evaluate, save, stop when asked."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from braid import checkpoint
from braid.config import Run
from braid.console import Line, say, warn
from braid.errors import CheckpointError, NumericsError, PreemptedError
from braid.launch.process import everywhere
from braid.launch.watchdog import Watchdog
from braid.model.language import LanguageModel
from braid.optim.schedule import LearningRate
from braid.planning.plan import Plan, whole_model
from braid.train import state as states
from braid.train.data_pipeline import DataPipeline
from braid.train.device import Device, set_arithmetic
from braid.train.metrics import Metrics, Unwritten, Value
from braid.train.run_dir import RunDir
from braid.train.signals import StopRequest
from braid.train.state import State
from braid.train.step import StepResult, evaluate, train_step
from braid.train.tracing import Tracer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run leaves."""

    model: LanguageModel
    checkpoint: Path
    loss: float | None
    """Of the last step; None where there was nothing left to do."""
    val_loss: float | None
    """Of the last evaluation."""


class Loop:
    """The steps of one process: each is measured, logged, and followed by what is due. Everything that outlives
    it is in the state."""

    def __init__(
        self,
        plan: Plan,
        places: RunDir,
        device: Device,
        feed: DataPipeline,
        state: State,
        metrics: Metrics | Unwritten,
        *,
        quiet: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """A `quiet` one prints no progress. A tracer writes down what ran when."""
        set_arithmetic(deterministic=plan.run.train.deterministic)
        state.progress.on_gpu = device.torch.type == "cuda"
        self.plan, self.run = plan, plan.run
        self.watchdog: Watchdog | None = None
        """Knows who is slow."""
        self.asked: StopRequest | None = None
        """Knows whether somebody wants this process to stop."""
        self.quiet, self.tracer = quiet, tracer
        self.places, self.device, self.feed = places, device, feed
        self.state, self.metrics = state, metrics
        self.first = state.model.groups.world.rank == 0
        """Whether this rank speaks for all."""
        self.schedule = schedule_of(plan.run)
        # Training costs three forward passes: one forward, two backward.
        samples = plan.run.train.batch_samples
        flops = whole_model(plan).flops(plan.run.data.sequence_tokens)
        self.step_flops = 3 * samples * flops / plan.world
        self.step_seconds: list[float] = []
        self.val_loss: float | None = None
        self.told_masked = False

    def run_to_end(self) -> Outcome:
        steps, saved = self.run.train.steps, None
        last: StepResult | None = None
        while self.state.step < steps:
            last = self.step()
            done = self.state.step == steps
            if done or self._due(self.run.train.save_every):
                saved = self.save(must=done)
            # Alone, a process need not wait until all ranks know.
            alone_asked = self.plan.world == 1 and self._signal is not None
            if (last.stop or alone_asked) and not done:
                self.save(must=True)
                raise everywhere(PreemptedError(self._told_stopped()))
        if last is None:
            self.val_loss = self.evaluate()
        path = saved or checkpoint.latest(self.places.checkpoints).path
        assert path is not None, "the last step is always saved"
        return Outcome(
            model=self.state.model,
            checkpoint=path,
            loss=None if last is None else last.loss,
            val_loss=self.val_loss,
        )

    @property
    def _signal(self) -> signal.Signals | None:
        return None if self.asked is None else self.asked.signal

    def _told_stopped(self) -> str:
        by = "" if self._signal is None else f" by {self._signal.name}"
        return (
            f"asked to stop{by}; step {self.state.step} of {self.run.train.steps} is saved in "
            f"{self.places.checkpoints}, the same command continues it"
        )

    def step(self) -> StepResult:
        """One step, measured and told."""
        if self.tracer is not None:
            self.tracer.begin(self.state.step + 1)
        started = time.perf_counter()
        self.state.progress.begin(self.state.step + 1)
        rate = self.schedule.rate(self.state.step + 1)
        stop = self._signal is not None
        result = train_step(self.state, self.run, self.feed.train, rate, stop=stop)
        self.device.synchronize()
        seconds = time.perf_counter() - started
        if self.tracer is not None:
            self.tracer.end(self.state.step)
        self.step_seconds = [*self.step_seconds[-99:], seconds]
        if result.not_finite:
            self._tell_skipped(result)
        if result.tokens == 0 and not self.told_masked:
            self.told_masked = True
            self._warn(f"step {self.state.step}: no token counts in the loss; every label of it is masked")
        evaluated = self._evaluate_if_due()
        self.metrics.log(self.state.step, self._metrics(result, rate, seconds, evaluated))
        if self._due(self.run.train.log_every) or self.state.step in (1, self.run.train.steps):
            self._say(str(self._line(result, rate)))
        if evaluated is not None:
            self._say(f"step {self.state.step}/{self.run.train.steps}  validation loss {evaluated:.3f}")
        return result

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _metrics(self, result: StepResult, rate: float, seconds: float, val: float | None) -> dict[str, Value]:
        tokens = self.plan.step_tokens
        return {
            **result.metrics,
            **({"val_loss": val} if val is not None else {}),
            "grad_norm": result.grad_norm,
            "lr": rate,
            "tokens_per_s": tokens / seconds,
            "tokens": self.state.tokens,
            "mfu": self.device.mfu(self.step_flops, seconds, self.run.train.dtype),
            "memory_bytes": self.device.memory_bytes(),
            "skipped": int(bool(result.not_finite)),
            **self._slowest(),
        }

    def _slowest(self) -> dict[str, Value]:
        """The rank that others wait for, and how much longer than they it works; nothing without others."""
        if self.watchdog is None or self.plan.world == 1:
            return {}
        rank, factor = self.watchdog.slow[0] if self.watchdog.slow else (None, None)
        return {"straggler": rank, "straggler_factor": factor}

    def _line(self, result: StepResult, rate: float) -> Line:
        """The figures since the last line; the first step of a process warms up and is left out of averages."""
        recent = self.step_seconds[-self.run.train.log_every :]
        measured = recent[1:] if len(self.step_seconds) == len(recent) > 1 else recent
        seconds = sum(measured) / len(measured)
        return Line(
            step=self.state.step,
            steps=self.run.train.steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=rate,
            tokens_per_s=self.plan.step_tokens / seconds,
            mfu=self.device.mfu(self.step_flops, seconds, self.run.train.dtype),
            memory_bytes=self.device.memory_bytes(),
            seconds_left=seconds * (self.run.train.steps - self.state.step),
        )

    def _evaluate_if_due(self) -> float | None:
        if self._due(self.run.train.eval_every) or self.state.step == self.run.train.steps:
            self.val_loss = self.evaluate()
            return self.val_loss
        return None

    def evaluate(self) -> float | None:
        """The validation loss as the weights are now; None where there is nothing to evaluate on."""
        if self.feed.validation is None:
            return None
        self.state.progress.enter("an evaluation")
        return evaluate(self.state, self.run, self.feed.validation)

    def save(self, *, must: bool) -> Path | None:
        """Save a checkpoint. One on the way may fail: training goes on with the old one."""
        root = self.places.checkpoints
        self.state.progress.enter("a checkpoint")
        try:
            path = states.save(root, self.state, self.run, self.feed.train, self.feed.tokenizer)
        except CheckpointError as error:
            if must:
                raise
            self._warn(f"{error}\ntraining goes on with the checkpoint before this one")
            return None
        if self.first:
            try:
                checkpoint.prune(root, keep=self.run.train.keep)
            except CheckpointError as error:
                warn(f"the checkpoint is saved, but an old one stays: {error}")
        return path

    def _say(self, text: str) -> None:
        if self.first and not self.quiet:
            say(text)

    def _warn(self, text: str) -> None:
        if self.first:
            warn(text)

    def _tell_skipped(self, result: StepResult) -> None:
        named = ", ".join(result.not_finite[:3]) + (", ..." if len(result.not_finite) > 3 else "")
        self._warn(f"step {self.state.step} skipped: not finite: {named}")
        limit = self.run.train.max_skipped
        if self.state.skipped_in_a_row > limit:
            raise everywhere(
                NumericsError(
                    f"{self.state.skipped_in_a_row} steps in a row were not finite (train.max_skipped = "
                    f"{limit}), in {named}: lower optim.lr, or look at that parameter; the weights are those "
                    "of the last sound step"
                )
            )


def schedule_of(run: Run) -> LearningRate:
    """The learning rate of every step."""
    return LearningRate(
        kind=run.optim.schedule,
        peak=run.optim.lr,
        steps=run.train.steps,
        warmup_steps=run.optim.warmup_steps,
        decay_steps=run.optim.decay_steps,
        final_share=run.optim.final_lr_share,
    )
