"""The training loop: steps, logging, evaluation, checkpoints, and a clean stop on preemption."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from braid import checkpoint
from braid.config import Run
from braid.console import Line, say, warn
from braid.distributed.collectives import Group
from braid.errors import CheckpointError, ConfigError, NumericsError, PreemptedError, first_of
from braid.launch.process import everywhere
from braid.launch.watchdog import Watchdog
from braid.model.language import LanguageModel
from braid.optim.schedule import LearningRate
from braid.planning.plan import Plan, item_flops, training_flops
from braid.train import state as states
from braid.train.async_saving import AsyncSaver
from braid.train.data_pipeline import DataPipeline
from braid.train.device import Device, set_arithmetic
from braid.train.exact_match import exact_match
from braid.train.item_prefetch import ItemPrefetch
from braid.train.memory_checkpoints import MemoryCheckpoints
from braid.train.metrics import Metrics, NullMetrics, Value
from braid.train.nonfinite import describe_origins, find_origins
from braid.train.pace import Pace
from braid.train.run_dir import RunDir
from braid.train.signals import StopRequest
from braid.train.state import JobState, State
from braid.train.step import PendingStep, StepResult, begin_step, evaluate
from braid.train.tracing import Tracer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a finished run."""

    model: LanguageModel | None
    """This rank's part of the model; None on a rank outside the model's grid."""
    checkpoint: Path
    loss: float | None
    """Loss of the last step; None if the run was already finished."""
    val_loss: float | None
    """Loss of the last evaluation."""
    exact_match: float | None = None
    """Share of exact answers in the last evaluation; None without `train.exact_match`."""


class _IssuedStep(NamedTuple):
    """A step that may still run on the device, and what it is reported with."""

    pending: PendingStep
    step: int
    tokens: int
    """Tokens of the run so far, this step included."""
    rate: float
    started: float


class Loop:
    """The training loop of one process. It holds nothing that a checkpoint needs: that is all in `State`."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        device: Device,
        data: DataPipeline,
        state: JobState,
        metrics: Metrics | NullMetrics,
        *,
        quiet: bool = False,
        tracer: Tracer | None = None,
        prefetch: ItemPrefetch | None = None,
        saver: AsyncSaver | None = None,
        memory: MemoryCheckpoints | None = None,
        sample: Callable[[], None] | None = None,
        show: Callable[[Line], None] | None = None,
    ) -> None:
        """With `quiet`, no progress is printed. The tracer records when ops ran. `prefetch` reads the items of
        encoders ahead. `saver` writes checkpoints beside training, but those that must be there at once.
        `memory` has those between the ones on disk. `sample` writes generated text when that is due, on all
        ranks. `show` receives the progress of every step, on rank 0."""
        set_arithmetic(deterministic=plan.run.train.deterministic)
        state.progress.on_gpu = device.torch.type == "cuda"
        self.plan, self.run = plan, plan.run
        self.watchdog: Watchdog | None = None
        """Reports stragglers."""
        self.stop_request: StopRequest | None = None
        self.quiet, self.tracer, self.prefetch = quiet, tracer, prefetch
        self.saver, self.memory = saver, memory
        self.sample, self.show, self.pace = sample, show, Pace(plan.run.train)
        self.run_dir, self.device, self.data = run_dir, device, data
        self.state, self.metrics = state, metrics
        self.is_rank_zero = state.job.rank == 0
        self.schedule = lr_schedule(plan.run)
        self.step_flops = plan.run.train.batch_samples * training_flops(plan) / plan.world
        self.item_flops = {name: item_flops(plan, name) for name in plan.encoders}
        """By module, the FLOPs of an item of so many patches."""
        self.step_seconds: list[float] = []
        self.val_loss: float | None = None
        self.exact_match: float | None = None
        self.warned_all_masked = False
        self.looks_late = device.torch.type == "cuda"
        """Whether to issue the next step before looking at the result of this one."""
        self.issued: _IssuedStep | None = None
        """The step whose result was not looked at yet."""
        self.ended = 0.0
        """When the last step was seen to end, by `time.perf_counter`."""

    def run_to_end(self) -> Outcome:
        """Train to the last step of the run and return the outcome."""
        steps, saved = self.run.train.steps, None
        last: StepResult | None = None
        while self.state.step < steps:
            results = self._next_results()
            last = results[-1] if results else last
            if any(each.saved for each in results):
                self._end_save()
            done = self.state.step == steps
            if done or self._due(self.run.train.save_every):
                with self.pace.pause("save"):
                    saved = self.save(must=done)
            elif self._memory_due:
                with self.pace.pause("save"):
                    self.save(must=False, disk=False)
            # Ranks must stop at the same step: the request is all-reduced with the next step's metrics. A
            # single process stops at once.
            stop = any(each.stop for each in results) or (self.plan.world == 1 and self._signal is not None)
            if stop and not done:
                self.finish()
                if (self._end_save() or saved) != self._path:
                    self.save(must=True)
                signalled = "" if self._signal is None else f" by {self._signal.name}"
                raise everywhere(
                    PreemptedError(
                        f"asked to stop{signalled}; step {self.state.step} of {steps} is saved in "
                        f"{self.run_dir.checkpoints}, run the same command to continue"
                    )
                )
        if last is None:
            self._evaluate()
            newest = checkpoint.latest(self.run_dir.checkpoints).path
            resumed = newest == self._path
            # `Trainer.step` may have run the last step, without saving it.
            saved = newest if resumed else self.save(must=True)
        assert saved is not None, "the last step is always saved"
        return Outcome(
            model=self.state.model if isinstance(self.state, State) else None,
            checkpoint=saved,
            loss=None if last is None else last.loss,
            val_loss=self.val_loss,
            exact_match=self.exact_match,
        )

    def _next_results(self) -> list[StepResult]:
        """Issue one more step and return the results that are due: on a GPU that of the step before, which the
        device finishes while the host issues this one, unless this step needs its own result now."""
        before, self.issued = self.issued, self._begin()
        results = [] if before is None else [self._end(before)]
        return results + self.finish() if self._settles() else results

    def _settles(self) -> bool:
        """Whether the step that was issued last must end before anything else happens."""
        train, traced = self.run.train, self.tracer is not None
        last = self.state.step == train.steps
        due = any(map(self._due, (train.save_every, train.eval_every, train.sample_every)))
        due = due or self._memory_due
        return not self.looks_late or last or due or traced

    def finish(self) -> list[StepResult]:
        """Wait for the step that was issued and not looked at yet; its result, if there is one."""
        issued, self.issued = self.issued, None
        return [] if issued is None else [self._end(issued)]

    @property
    def _signal(self) -> signal.Signals | None:
        return None if self.stop_request is None else self.stop_request.signal

    def step(self) -> StepResult:
        """Run one training step; log its metrics and evaluate if due."""
        self.finish()
        if self.state.step >= self.run.train.steps:
            raise everywhere(
                ConfigError(
                    f"the run is complete: step {self.state.step} of {self.run.train.steps} is done; "
                    "set train.steps higher to continue"
                )
            )
        return self._end(self._begin())

    def _begin(self) -> _IssuedStep:
        if self.tracer is not None:
            self.tracer.begin(self.state.step + 1)
        started = time.perf_counter()
        self.state.progress.begin(self.state.step + 1)
        rate = self.schedule.rate(self.state.step + 1)
        pending = begin_step(
            self.state,
            self.run,
            self.data.train,
            rate,
            stop=self._signal is not None,
            saved=self.saver is not None and self.saver.ended,
            prefetch=self.prefetch,
        )
        return _IssuedStep(pending, self.state.step, self.state.tokens, rate, started)

    def _end(self, issued: _IssuedStep) -> StepResult:
        """Wait for a step and report it."""
        result, step = issued.pending.result(), issued.step
        # A step that was issued while the one before it ran has the time between their ends.
        ended, began = time.perf_counter(), max(issued.started, self.ended)
        seconds, self.ended = ended - began, ended
        if self.tracer is not None:
            self.tracer.end(step)
        self.step_seconds = [*self.step_seconds[-99:], seconds]
        self.pace.step(seconds)
        if result.not_finite:
            self._report_skipped(issued.pending, result)
        if result.tokens == 0 and not self.warned_all_masked:
            self.warned_all_masked = True
            self._warn(f"step {step}: no token counts in the loss, because all labels are masked")
        if result.spikes:
            self._report_spike(step, result)
        failed = self._skipped_too_many(step, result)
        evaluated: Mapping[str, float] = {}
        if step == self.state.step and failed is None:
            evaluated = self._evaluate_if_due()
            self._sample_if_due()
        self.metrics.log(step, self._metrics(issued, result, seconds, evaluated))
        if failed is not None:
            raise everywhere(failed)
        if result.diverged:
            raise everywhere(self._diverged(step, result))
        if self.show is not None and self.is_rank_zero:
            self.show(self._line(issued, result))
        if _divides(self.run.train.log_every, step) or step in (1, self.run.train.steps):
            self._say(str(self._line(issued, result)))
        if evaluated:
            exact = f"  exact match {self.exact_match:.1%}" if self.exact_match is not None else ""
            self._say(f"step {step}/{self.run.train.steps}  validation loss {evaluated['val_loss']:.3f}{exact}")
        return result

    @property
    def _path(self) -> Path:
        """The checkpoint of the current step."""
        return checkpoint.step_path(self.run_dir.checkpoints, self.state.step)

    def _due(self, every: int) -> bool:
        return _divides(every, self.state.step)

    @property
    def _memory_due(self) -> bool:
        return self.memory is not None and self._due(self.run.train.memory_save_every)

    def _metrics(
        self, issued: _IssuedStep, result: StepResult, seconds: float, evaluated: Mapping[str, float]
    ) -> dict[str, Value]:
        tokens = self.plan.step_tokens
        return {
            **result.metrics,
            **evaluated,
            "grad_norm": result.grad_norm,
            "lr": issued.rate,
            "tokens_per_s": tokens / seconds,
            "tokens": issued.tokens,
            "mfu": self.device.mfu(self._flops(result), seconds, self.run.train.dtype),
            "memory_bytes": self.device.memory_bytes(),
            "skipped": int(result.skipped),
            "spike": int(bool(result.spikes)),
            **self._slowest(),
        }

    def _flops(self, result: StepResult) -> float:
        """Those of a step on each rank, on average."""
        items = (self.item_flops[name](each) for name, lengths in result.patches.items() for each in lengths)
        return self.step_flops + sum(items) / self.plan.world

    def _slowest(self) -> dict[str, Value]:
        """The worst straggler and its slowdown; empty for a single process or without a watchdog."""
        if self.watchdog is None or self.plan.world == 1:
            return {}
        rank, factor = self.watchdog.slow[0] if self.watchdog.slow else (None, None)
        return {"straggler": rank, "straggler_factor": factor}

    def _line(self, issued: _IssuedStep, result: StepResult) -> Line:
        """The progress line: throughput averaged since the last line, without the process's first step, which
        includes warm-up."""
        recent = self.step_seconds[-self.run.train.log_every :]
        measured = recent[1:] if len(self.step_seconds) == len(recent) > 1 else recent
        seconds = sum(measured) / len(measured)
        return Line(
            step=issued.step,
            steps=self.run.train.steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=issued.rate,
            tokens_per_s=self.plan.step_tokens / seconds,
            mfu=self.device.mfu(self.step_flops, seconds, self.run.train.dtype),
            memory_bytes=self.device.memory_bytes(),
            seconds_left=self.pace.seconds_left(issued.step),
        )

    def _evaluate_if_due(self) -> dict[str, float]:
        """The metrics of an evaluation; none if none is due."""
        if self._due(self.run.train.eval_every) or self.state.step == self.run.train.steps:
            with self.pace.pause("evaluation"):
                return self._evaluate()
        return {}

    def _sample_if_due(self) -> None:
        if self.sample is not None and self._due(self.run.train.sample_every):
            self.state.progress.enter("a sample of text")
            with self.pace.pause("sample"):
                self.sample()

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, and keep the results for the outcome of the run."""
        self.val_loss, loader = self.evaluate(), self.data.validation
        if self.run.train.exact_match and loader is not None:
            self.exact_match = exact_match(self.state, self.run, loader, self.data.tokenizer.vocab)
        found = {"val_loss": self.val_loss, "exact_match": self.exact_match}
        return {name: value for name, value in found.items() if value is not None}

    def evaluate(self) -> float | None:
        """The validation loss of the current weights; None without validation data."""
        if self.data.validation is None:
            return None
        self.state.progress.enter("an evaluation")
        return evaluate(self.state, self.run, self.data.validation)

    def save(self, *, must: bool, disk: bool = True) -> Path | None:
        """Save a checkpoint and prune old ones. With `must`, it is there on return, and a failure to save is an
        error; otherwise the saver writes it, if there is one, and training continues with the previous
        checkpoint if that fails. One that is due in memory goes there too, or there alone without `disk`."""
        self.finish()
        self._end_save()
        self.state.progress.enter("a checkpoint")
        captured = states.capture(self.state, self.run, self.data.train, self.data.tokenizer)
        memory = self._memory_due and not must
        if self.saver is not None and not must:
            write = functools.partial(self._write, job=self.saver.group, disk=disk, memory=memory)
            self.saver.begin(captured, write)
            return None
        try:
            path = self._write(captured, self.state.job, disk=disk, memory=memory)
            if must and self.memory is not None:
                self.memory.clear()
            return path
        except CheckpointError as error:
            if must:
                raise
            self._continue_without(error)
            return None

    def _write(self, captured: states.Capture, job: Group, *, disk: bool, memory: bool) -> Path | None:
        if memory and self.memory is not None:
            try:
                self.memory.save(captured, job)
            except CheckpointError as error:
                self._warn(f"{error}\nnothing newer is in memory than before")
        if not disk:
            return None
        path = states.write(self.run_dir.checkpoints, captured, job)
        if self.is_rank_zero:
            try:
                checkpoint.prune(self.run_dir.checkpoints, keep=self.run.train.keep, written=path)
            except CheckpointError as error:
                warn(f"the checkpoint is saved, but an old one could not be deleted: {error}")
        return path

    def _end_save(self) -> Path | None:
        """Wait for the save under way, if there is one. The checkpoint, or None if it could not be written."""
        if self.saver is None or not self.saver.under_way:
            return None
        self.state.progress.enter("a checkpoint")
        try:
            return self.saver.result()
        except CheckpointError as error:
            self._continue_without(error)
            return None

    def _continue_without(self, error: CheckpointError) -> None:
        self._warn(f"{error}\ntraining continues with the previous checkpoint")

    def _say(self, text: str) -> None:
        if self.is_rank_zero and not self.quiet:
            say(text)

    def _warn(self, text: str) -> None:
        if self.is_rank_zero:
            warn(text)

    def _report_skipped(self, pending: PendingStep, result: StepResult) -> None:
        """Warn about a skipped step. The first in a row runs again, to find out where it begins."""
        found = ""
        if self.state.skipped_in_a_row == 1:
            origins = find_origins(self.state, self.run, self.data.train, pending.step, pending.first)
            found = f"\n  {describe_origins(origins)}"
        self._warn(f"step {pending.step} skipped: not finite: {_listed(result.not_finite)}{found}")

    def _report_spike(self, step: int, result: StepResult) -> None:
        train = self.run.train
        found = " and ".join(
            f"{name} {value:.4g}, above {limit:.4g}" for name, (value, limit) in result.spikes.items()
        )
        end = ""
        if not result.skipped and train.spikes == "skip":
            end = f"; applied, as {train.max_skipped} in a row were skipped (train.max_skipped)"
        self._warn(
            f"step {step}{' skipped' if result.skipped else ''}: a spike of {train.spike_sigma:g} standard "
            f"deviations: {found}{end}"
        )

    def _diverged(self, step: int, result: StepResult) -> NumericsError:
        listed = "\n  ".join(first_of(result.diverged))
        return NumericsError(
            f"copies of weights or moments differ before step {step}\n  {listed}\n"
            "  rule  ranks that hold the same weights agree on them to the bit\n"
            "  set   another machine for these ranks, if it happens again; nothing was saved since the newest "
            f"checkpoint in {self.run_dir.checkpoints}, which the same command resumes"
        )

    def _skipped_too_many(self, step: int, result: StepResult) -> NumericsError | None:
        """The error if more steps in a row were not finite than the run allows."""
        limit = self.run.train.max_skipped
        if not result.not_finite or self.state.skipped_in_a_row <= limit:
            return None
        late = "" if step == self.state.step else f"; step {self.state.step} had been issued by then"
        return NumericsError(
            f"{self.state.skipped_in_a_row} steps in a row were not finite (train.max_skipped = {limit}), in "
            f"{_listed(result.not_finite)}: lower optim.lr, or inspect that parameter; the weights are those "
            f"of the last finite step{late}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def lr_schedule(run: Run) -> LearningRate:
    """The learning-rate schedule of a run."""
    return LearningRate(
        kind=run.optim.schedule,
        peak=run.optim.lr,
        steps=run.train.steps,
        warmup_steps=run.optim.warmup_steps,
        decay_steps=run.optim.decay_steps,
        final_share=run.optim.final_lr_share,
    )
