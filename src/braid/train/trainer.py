"""`Trainer`: trains a plan, from a notebook, a script, or the command `braid train`.

    with Trainer(plan(run, world=1), out="runs/mine") as trainer:
        trainer.train()

Every rank of a plan makes one. It joins the other ranks, opens the data, builds its part of the model, and goes
on from the newest checkpoint in its folder, where there is one. What it has opened is closed again by `close`,
or at the end of the `with`, so that several can follow one another in one process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch

import braid
from braid.config import flatten
from braid.distributed.groups import opened_groups
from braid.errors import ConfigError
from braid.launch.process import ProcessContext, agree, first_then_others, join, leave, named_failures, together
from braid.launch.watchdog import watched
from braid.model.generate import generate_text
from braid.model.language import LanguageModel
from braid.planning import divisibility
from braid.planning.plan import Plan
from braid.train.build import opened_state
from braid.train.data_pipeline import DataPipeline, open_data_pipeline
from braid.train.device import DeviceName, choose_device
from braid.train.distributed_generation import generate_together
from braid.train.gc_freeze import frozen_gc
from braid.train.loop import Loop, Outcome
from braid.train.metrics import Listener, Metrics, Unwritten
from braid.train.resume import begin_or_continue
from braid.train.run_dir import RunDir
from braid.train.signals import StopRequest
from braid.train.state import State
from braid.train.step import StepResult
from braid.train.tracing import Tracer

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for others: to come, and in each collective."""

MARGIN = timedelta(minutes=1)
"""How much longer a collective waits than the watchdog, which knows who is to blame."""

FAILURES = "failures"
"""Where in the folder of a run ranks report why it failed."""


class Trainer:
    """One rank of a run that is trained."""

    plan: Plan
    state: State
    feed: DataPipeline
    resumed: Path | None
    """The checkpoint that it goes on from; None where the run is new."""

    def __init__(
        self,
        plan: Plan,
        *,
        out: Path | str = "runs/default",
        init: Path | str | None = None,
        device: DeviceName = "auto",
        listeners: Sequence[Listener] = (),
        quiet: bool = False,
        trace: Path | None = None,
        trace_steps: range = range(2, 5),
        watch: bool = False,
        building: Callable[[int, int], None] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`out` is the folder for everything of the run: checkpoints, metrics.jsonl, built data. Where it holds
        checkpoints, training goes on from the newest. `init` is a checkpoint or a run whose weights a new run
        starts from. `listeners` are told the metrics of every step, beside metrics.jsonl. `trace` is a file for
        what ran when in the steps `trace_steps`, counted from where this trainer starts. With `watch`, a rank
        that stalls or fails ends its process, with a report in `out`. `building` is told how far the building
        of a corpus has come. `environment` is where a launcher said which rank this is."""
        self.plan, self.places = plan, RunDir(out=Path(out))
        self._quiet, self._watch = quiet, watch
        self.listeners = list(listeners)
        """More may be added before the first step."""
        self._init = None if init is None else Path(init)
        self._held = ExitStack()
        self._loop: Loop | None = None
        try:
            with named_failures():
                self._open(device, environment, building)
                self._tracer = self._traced(trace, trace_steps)
        except BaseException:
            self._held.close()
            raise

    def _open(
        self, device: DeviceName, environment: Mapping[str, str], building: Callable[[int, int], None] | None
    ) -> None:
        plan, run = self.plan, self.plan.run
        patience = max(TIMEOUT, timedelta(seconds=run.train.stall_timeout_s) + MARGIN)
        chosen = choose_device(device)
        self.joined = self._joined(environment, chosen.torch, patience)
        self.device = replace(chosen, torch=self.joined.device)
        agree(self._settings(device), self.joined.everyone)
        with together(self.joined.everyone):
            if self.joined.rank == 0:
                self._held.enter_context(self.places.held())
        self.feed = first_then_others(
            lambda: open_data_pipeline(run, self.places.data, building), self.joined.everyone
        )
        runs = divisibility.tp_runs(run.model, plan.layout.kinds(), plan.axes.tp)
        opened = opened_groups(plan.grid, self.joined.rank, tp_runs=runs, timeout=patience)
        self.state = self._held.enter_context(opened_state(plan, self.device, self._held.enter_context(opened)))
        self.resumed = begin_or_continue(self.state, run, self.feed, self.places, self._init)

    def _joined(
        self, environment: Mapping[str, str], device: torch.device, patience: timedelta
    ) -> ProcessContext:
        """This process among the ranks of the plan."""
        joined = join(environment, device, patience)
        if joined.ours:  # the next trainer of this process meets the same ranks: they part when it ends
            atexit.register(leave)
        if joined.world != self.plan.world:
            there = "this process is alone" if joined.world == 1 else f"{joined.world} ranks were started"
            raise ConfigError(
                f"the plan is for {self.plan.world} ranks, but {there}: plan for {joined.world}, or start "
                f"{self.plan.world} processes with torchrun or `braid train --world {self.plan.world}`"
            )
        return joined

    def _settings(self, device: str) -> dict[str, object]:
        """What must be the same on every rank, by the name that a person would look for."""
        named = {"out": str(self.places.out), "init": str(self._init), "device": device}
        versions = {"braid": braid.__version__, "torch": torch.__version__}
        return {**versions, **named, **flatten(self.plan.run)}

    def _traced(self, file: Path | None, steps: range) -> Tracer | None:
        if file is None:
            return None
        first = self.state.step
        return Tracer(file, range(first + steps.start, first + steps.stop), self.state)

    # -------------------------------------------------------------------------------------- training

    @property
    def model(self) -> LanguageModel:
        """This rank's part of the model."""
        return self.state.model

    @property
    def step_number(self) -> int:
        """Steps done so far."""
        return self.state.step

    def step(self) -> StepResult:
        """Train one step, with the evaluation and the metrics that are due after it. Nothing is saved: call
        `save`."""
        return self._opened_loop().step()

    def train(self) -> Outcome:
        """Train to the last step of the run, with evaluations and checkpoints on the way, and one at the end.
        Asked to stop by SIGTERM or Ctrl-C, it saves and raises a `PreemptedError`."""
        loop = self._opened_loop()
        timeout_s = self.plan.run.train.stall_timeout_s if self._watch else 0.0
        failures = self.places.out / FAILURES
        with (
            named_failures(),
            watched(self.joined, failures, self.state.progress, timeout_s) as loop.watchdog,
            StopRequest() as loop.asked,
            frozen_gc(),
        ):
            outcome = loop.run_to_end()
            if self._tracer is not None:
                self._tracer.close()
            self.state.progress.enter("the end")
            with together(self.joined.everyone):
                pass  # nobody closes a communicator that another still uses
        loop.asked = loop.watchdog = None
        return outcome

    def evaluate(self) -> float | None:
        """The validation loss as the weights are now, in nats per token; None where there is no such data."""
        return self._opened_loop().evaluate()

    def save(self) -> Path:
        """Write a checkpoint of where training stands; its folder."""
        path = self._opened_loop().save(must=True)
        assert path is not None
        return path

    def generate(self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        """The prompt and what the model makes of it. Ranks write together, and remember nothing between tokens:
        there a few tokens take long."""
        tokenizer, run = self.feed.tokenizer, self.plan.run
        if self.plan.world == 1:
            return generate_text(
                self.model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed
            )
        return generate_together(
            self.state, run, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed
        )

    def _opened_loop(self) -> Loop:
        if self._loop is None:
            first = self.joined.rank == 0
            step, listeners = self.state.step, self.listeners
            metrics: Metrics | Unwritten = Unwritten()
            if first:
                file = Metrics(self.places.metrics, after_step=step, listeners=listeners)
                metrics = self._held.enter_context(file)
            opened = (self.plan, self.places, self.device, self.feed, self.state, metrics)
            self._loop = Loop(*opened, quiet=self._quiet, tracer=self._tracer)
        return self._loop

    # ----------------------------------------------------------------------------------------- ending

    @property
    def traced(self) -> Path | None:
        """The trace that was written."""
        return self._tracer.file if self._tracer is not None and self._tracer.written else None

    def close(self) -> None:
        """Give back everything that was opened: files, communicators, the lock of the folder."""
        self._held.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
