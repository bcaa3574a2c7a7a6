"""`Trainer`: trains a plan, from a notebook, a script, or the command `braid train`.

    with Trainer(plan(run, world=1), out="runs/mine") as trainer:
        trainer.train()

Each rank creates one. It joins the process group, opens the data, builds this rank's part of the model, and
resumes from the newest checkpoint in its folder, if any. `close`, or leaving the `with`, releases everything it
opened, so one process can use several trainers in turn.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import cast

import torch

import braid
from braid.config import flatten
from braid.console import Line, warn
from braid.data.prompts import Prompt, encode_prompt, parts_with_images
from braid.distributed.groups import opened_groups, opened_host_group
from braid.errors import ConfigError
from braid.launch.process import (
    ProcessContext,
    check_agreement,
    fail_together,
    job_id,
    join,
    leave,
    rank_zero_first,
    refusal_told,
    translate_peer_errors,
)
from braid.launch.watchdog import watched
from braid.model.encoder import EncoderModel
from braid.model.generate import generate_text
from braid.model.language import LanguageModel
from braid.planning import divisibility
from braid.planning.plan import Plan
from braid.train import state as states
from braid.train.async_saving import SAVE_TIMEOUT, AsyncSaver
from braid.train.build import state_context
from braid.train.data_pipeline import DataPipeline, open_data_pipeline
from braid.train.device import DeviceName, choose_device
from braid.train.distributed_generation import generate_distributed
from braid.train.gc_freeze import frozen_gc
from braid.train.host_pool import check_host_memory
from braid.train.init_from import SAME_MODEL, InitOptions
from braid.train.item_prefetch import ItemPrefetch
from braid.train.launches import append, this_launch
from braid.train.load_model import encode, image_limits
from braid.train.loop import Loop, Outcome
from braid.train.memory_checkpoints import MemoryCheckpoints, memory_folder
from braid.train.metrics import Listener, Metrics, NullMetrics
from braid.train.resume import initialize_or_resume
from braid.train.run_dir import RunDir
from braid.train.samples import TEMPERATURE, TextSamples
from braid.train.signals import StopRequest
from braid.train.state import JobState, State
from braid.train.status import StatusFile
from braid.train.step import StepResult
from braid.train.tracing import Tracer

TIMEOUT = timedelta(minutes=10)
"""Minimum timeout of the rendezvous and of each collective."""

MARGIN = timedelta(minutes=1)
"""How much longer collectives wait than the watchdog, which should fire first: it can name the culprit."""


class Trainer:
    """Trains one rank of a plan."""

    plan: Plan
    state: JobState
    """On a rank of the model's grid, a `State`."""
    data: DataPipeline
    resumed: Path | None
    """The checkpoint that training resumed from; None for a new run."""

    def __init__(
        self,
        plan: Plan,
        *,
        out: Path | str = "runs/default",
        init: Path | str | None = None,
        init_options: InitOptions = SAME_MODEL,
        start_over: bool = False,
        device: DeviceName = "auto",
        listeners: Sequence[Listener] = (),
        quiet: bool = False,
        trace: Path | None = None,
        trace_steps: range = range(2, 5),
        watch: bool = False,
        check_collectives: bool = False,
        build_progress: Callable[[int, int], None] | None = None,
        command: str = "",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`out` is the run's folder: checkpoints, metrics.jsonl, built data. If it holds checkpoints, training
        resumes from the newest; if all are damaged, `start_over` keeps them under other names and begins at
        step 0. `init` is a checkpoint or run whose weights a new run starts from, by the rules of
        `init_options` if their models differ. `listeners` receive the metrics of every step, in addition to
        metrics.jsonl. `trace` is a file for op times of the steps `trace_steps`, counted from where this
        trainer starts. With `watch`, a watchdog ends the process when a rank stalls or fails, with a report in
        `out`. With `check_collectives`, for debugging, ranks compare each collective before it runs.
        `build_progress` is called with (bytes done, bytes in all) while the default corpus is built.
        `command` is what started this run, for launches.jsonl.
        `environment` holds the launcher's variables (RANK, ...)."""
        self.plan, self.run_dir = plan, RunDir(out=Path(out))
        self._quiet, self._watch, self._command = quiet, watch, command
        self._trace = (
            "none" if trace is None else f"{trace}, steps {trace_steps.start} to {trace_steps.stop - 1}"
        )
        self.listeners = list(listeners)
        """More may be added before the first step."""
        self.show: Callable[[Line], None] | None = None
        """Receives the progress of every step, on rank 0; may be set before the first step."""
        self._init, self._init_options = None if init is None else Path(init), init_options
        self._start_over, self._check_collectives = start_over, check_collectives
        self._resources = ExitStack()
        self._loop: Loop | None = None
        self._closed = False
        self._restarted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        try:
            with translate_peer_errors():
                self._open(device, environment, build_progress)
                first = self.state.step
                steps = range(first + trace_steps.start, first + trace_steps.stop)
                self._tracer = None if trace is None else Tracer(trace, steps, self.state)
        except BaseException:
            self._resources.close()
            raise

    def _open(
        self,
        device: DeviceName,
        environment: Mapping[str, str],
        build_progress: Callable[[int, int], None] | None,
    ) -> None:
        plan, run = self.plan, self.plan.run
        timeout = max(TIMEOUT, timedelta(seconds=run.train.stall_timeout_s) + MARGIN)
        with refusal_told(environment):
            chosen = choose_device(device)
            self.process = self._join(environment, chosen.torch, timeout)
        self.device = replace(chosen, torch=self.process.device)
        check_agreement(self._settings(device), self.process.world_group)
        with fail_together(self.process.world_group):
            if self.process.rank == 0:
                self._resources.enter_context(self.run_dir.lock())
        check_host_memory(plan, self.process.rank, self.device.torch.type, self.process.world_group)
        self.data = rank_zero_first(
            lambda: open_data_pipeline(run, self.run_dir.data, build_progress), self.process.world_group
        )
        if self.process.rank == 0:
            for note in self.data.notes:
                warn(note)
        runs = divisibility.tp_runs(run.model, plan.layout.kinds(), plan.axes.tp)
        opened = opened_groups(plan.grid, self.process.rank, tp_runs=runs, timeout=timeout)
        groups = self._resources.enter_context(opened)
        self.state = self._resources.enter_context(
            state_context(plan, self.device, groups, self.process.world_group, timeout)
        )
        self._memory = self._open_memory(environment)
        self.resumed = initialize_or_resume(
            self.state,
            run,
            self.data,
            self.run_dir,
            self._init,
            self._init_options,
            start_over=self._start_over,
            memory=self._memory,
        )

    def _open_memory(self, environment: Mapping[str, str]) -> MemoryCheckpoints | None:
        """Checkpoints in memory; None if the run does not ask for them, or nobody would start it again."""
        job = job_id(environment)
        if not self.plan.run.train.memory_save_every:
            return None
        if job is None:
            if self.process.rank == 0:
                warn("nothing is saved in memory: that is for restarts by a launcher (--restarts, torchrun)")
            return None
        return MemoryCheckpoints(memory_folder(self.run_dir.out, job), self.process.world_group)

    def _join(self, environment: Mapping[str, str], device: torch.device, timeout: timedelta) -> ProcessContext:
        """Join the process group, which must have as many ranks as the plan."""
        process = join(environment, device, timeout, check_collectives=self._check_collectives)
        if process.owns_process_group:
            # Not in `close`: the next trainer of this process uses the same process group.
            atexit.register(leave)
        if process.world != self.plan.world:
            actual = "this process is alone" if process.world == 1 else f"{process.world} ranks were started"
            raise ConfigError(
                f"the plan is for {self.plan.world} ranks, but {actual}: plan for {process.world}, or start "
                f"{self.plan.world} processes with torchrun or `braid train --world {self.plan.world}`"
            )
        return process

    def _settings(self, device: str) -> dict[str, object]:
        """Settings that must be the same on every rank, by name."""
        named = {"out": str(self.run_dir.out), "init": str(self._init), "device": device}
        # Opening a tracer is a collective: ranks that disagree about it would wait for each other for ever.
        named |= {"init rules": str(self._init_options), "trace": self._trace}
        named |= {"start over": str(self._start_over), "check collectives": str(self._check_collectives)}
        versions = {"braid": braid.__version__, "torch": torch.__version__}
        return {**versions, **named, **flatten(self.plan.run)}

    # -------------------------------------------------------------------------------------- training

    @property
    def model(self) -> LanguageModel:
        """This rank's part of the model. A rank outside the model's grid has none."""
        if not isinstance(self.state, State):
            ranks = self.plan.grid.ranks
            raise ConfigError(
                f"rank {self.process.rank} holds no part of the model: mesh.ranks puts it on the ranks "
                f"{ranks[0]} to {ranks[-1]}, ask one of these"
            )
        return self.state.model

    @property
    def step_number(self) -> int:
        """Steps done so far."""
        return self.state.step

    def step(self) -> StepResult:
        """Train one step, log its metrics, and evaluate if due. Call `save` to write a checkpoint. Raises
        `ConfigError` after the last step of the run."""
        return self._get_loop().step()

    def train(self) -> Outcome:
        """Train to the last step of the run, evaluating and saving as configured and at the end. On SIGTERM or
        Ctrl-C, saves a checkpoint and raises `PreemptedError`."""
        loop = self._get_loop()
        timeout_s = self.plan.run.train.stall_timeout_s if self._watch else 0.0
        failures, world = self.run_dir.failures, self.plan.world
        status = StatusFile(self.run_dir.status, world) if self.process.rank == 0 else None
        observe = None if status is None else status.observe
        with (
            nullcontext() if status is None else status,
            translate_peer_errors(),
            watched(self.process, failures, self.state.progress, timeout_s, observe=observe) as loop.watchdog,
            StopRequest() as loop.stop_request,
            frozen_gc(),
        ):
            outcome = loop.run_to_end()
            if self._tracer is not None:
                self._tracer.close()
            self.state.progress.enter("the end")
            with fail_together(self.process.world_group):
                pass  # a barrier: no rank may destroy a communicator that another still uses
        loop.stop_request = loop.watchdog = None
        return outcome

    def evaluate(self) -> float | None:
        """The validation loss of the current weights, in nats per token; None without validation data."""
        return self._get_loop().evaluate()

    def save(self) -> Path:
        """Write a checkpoint and return its folder."""
        path = self._get_loop().save(must=True)
        assert path is not None
        return path

    def generate(
        self,
        prompt: str | Prompt,
        *,
        images: Sequence[Path | str] = (),
        tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> str:
        """The prompt and its continuation; `images` are files, which come before its text. A `Prompt` has its
        images (`stored_prompt`). With several ranks there is no KV cache: every token costs a full forward."""
        self._check_open()
        tokenizer, run = self.data.tokenizer, self.plan.run
        with fail_together(self.process.world_group):
            if isinstance(prompt, Prompt):
                asked = prompt
            else:
                parts = parts_with_images(images, prompt)
                asked = encode_prompt(parts, tokenizer, image_limits(run), "the run")
        if self.plan.world > 1:
            return generate_distributed(
                self.state, run, tokenizer, asked, tokens=tokens, temperature=temperature, seed=seed
            )
        models = {name: self.state.encoders[name].model for name in asked.items}
        return generate_text(
            self.model,
            tokenizer,
            asked.ids,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            rows=encode({name: cast(EncoderModel, model) for name, model in models.items()}, asked.items),
            modules={name: run.modules[name].token for name in asked.items},
            never=[module.token for module in run.modules.values()],
        )

    def stored_prompt(self) -> Prompt | None:
        """What a document of the data has before its answer, with its images; None if the data have none.
        Collective: what cannot be read is an error of all ranks."""
        with fail_together(self.process.world_group):
            return self.data.stored_prompt()

    def _check_open(self) -> None:
        """Without its lock, a trainer must not write into its folder; its communicators are gone as well."""
        if self._closed:
            raise ConfigError(
                f"this trainer is closed: create another Trainer with out={str(self.run_dir.out)!r}, "
                "which resumes from the newest checkpoint"
            )

    def _get_loop(self) -> Loop:
        self._check_open()
        if self._loop is None:
            metrics: Metrics | NullMetrics = NullMetrics()
            with fail_together(self.process.world_group):
                if self.process.rank == 0:
                    file = Metrics(
                        self.run_dir.metrics,
                        after_step=self.state.step,
                        listeners=self.listeners,
                        restarted=self._restarted,
                    )
                    metrics = self._resources.enter_context(file)
                    self._note_launch()
            parts = (self.plan, self.run_dir, self.device, self.data, self.state, metrics)
            prefetch = self._resources.enter_context(ItemPrefetch())
            self._loop = Loop(
                *parts,
                quiet=self._quiet,
                tracer=self._tracer,
                prefetch=prefetch,
                saver=self._open_saver(),
                memory=self._memory,
                sample=self._sampler(),
                show=self.show,
            )
        return self._loop

    def _note_launch(self) -> None:
        launch = this_launch(
            self.plan.run,
            step=self.state.step,
            world=self.plan.world,
            device=self.device.name,
            command=self._command,
        )
        append(self.run_dir.launches, launch)

    def _sampler(self) -> Callable[[], None] | None:
        """What writes samples of text when they are due; None if the run has none."""
        train = self.plan.run.train
        if not train.sample_every:
            return None
        with fail_together(self.process.world_group):
            samples = TextSamples(
                self.run_dir.samples,
                after_step=self.state.step,
                seed=train.seed,
                writes=self.process.rank == 0,
                quiet=self._quiet,
            )
        prompts: list[str | Prompt] = [*train.sample_prompts]
        if not prompts:
            prompts = [(self.stored_prompt() if self.data.images else None) or self.data.prompt]

        def generate(prompt: str | Prompt) -> str:
            tokens, seed = train.sample_tokens, train.seed
            return self.generate(prompt, tokens=tokens, temperature=TEMPERATURE, seed=seed)

        return lambda: samples.write(self.state.step, prompts, generate)

    def _open_saver(self) -> AsyncSaver | None:
        """What saves beside training; None if the run does not ask for it, or there is too little memory."""
        train = self.plan.run.train
        if not (train.async_save and (train.save_every or self._memory is not None)):
            return None
        group = self._resources.enter_context(opened_host_group(self.process.world_group, SAVE_TIMEOUT))
        saver = self._resources.enter_context(AsyncSaver(group, self.device.torch))
        captured = states.capture(self.state, self.plan.run, self.data.train, self.data.tokenizer)
        return saver if saver.allocate(captured) else None

    # ----------------------------------------------------------------------------------------- ending

    @property
    def traced(self) -> Path | None:
        """The trace file, if it was written."""
        return self._tracer.file if self._tracer is not None and self._tracer.written else None

    def close(self) -> None:
        """Release everything that was opened: files, communicators, the lock on the folder."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
