"""`braid train`: plan a run, open its data, train it, and show what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from braid import recipes, validators
from braid.cli.args import opened_by, options, subject
from braid.cli.next_steps import next_commands, program
from braid.cli.plan_notes import idle_choices, schedule_words
from braid.cli.progress import bar
from braid.cli.recipes import RunFields, help_with_a_recipe
from braid.config import to_json
from braid.errors import BraidError, ConfigError, ExitCode, Problem
from braid.planning.divisibility import described
from braid.planning.plan import Plan, check, plan
from braid.planning.plan import size as size_of

if TYPE_CHECKING:
    from braid.train.loop import Outcome
    from braid.train.metrics import Listener
    from braid.train.trainer import Trainer

SAMPLE_TOKENS = 200
SHARED_SAMPLE_TOKENS = 40
"""Ranks that share a model remember nothing between tokens, so each costs as much as a whole text."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a run. Interrupted, the same command continues where it stopped."""

    run: RunFields
    out: Path | None = None
    """Folder for everything of the run: checkpoints, metrics.jsonl, built data. Default: runs/RECIPE."""
    init: Path | None = None
    """Checkpoint or run of the same model whose weights a new run starts from. The optimizer starts anew."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    world: int | None = None
    """Ranks to start on this machine. Default: 1, and under torchrun as many as it started."""
    restarts: int = 0
    """How often all ranks are started again after one was lost; training goes on from the newest checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard files into the folder (extra `log`)."""
    wandb: str | None = None
    """Also send metrics to this Weights & Biases project (extra `log`)."""
    trace: Path | None = None
    """Also write what ran when, on all ranks, into this file: Perfetto and chrome://tracing open it."""
    trace_steps: str = "2:4"
    """Which steps are traced, first:last, counted from where this command begins."""


def train(words: list[str]) -> int:
    """Start the workers of the run, or be one of them."""
    name, rest = subject(help_with_a_recipe(words), "train", "RECIPE")
    chosen = options(TrainOptions, rest, f"braid train {name}", TrainOptions(run=recipes.load(name)))
    out = chosen.out or Path("runs") / name.rpartition(":")[2]
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return _be_worker(words, chosen, out)
    worked_out = _planned(chosen, 1 if chosen.world is None else chosen.world)
    if worked_out.world == 1 and chosen.restarts == 0:
        return _work(worked_out, out, words, chosen)
    from braid.launch.worker_pool import check_gpus, launch
    from braid.train.trainer import FAILURES

    check_gpus(worked_out.world, chosen.device)
    print(f"starting {worked_out.world} ranks", file=sys.stderr)
    command = [sys.executable, "-m", "braid", "train", *words]
    return launch(
        command,
        world=worked_out.world,
        restarts=chosen.restarts,
        environment=os.environ,
        failures=out / FAILURES,
    )


def _planned(chosen: TrainOptions, world: int) -> Plan:
    """The plan, or what is wrong: all of it, or one line where only the number of ranks is."""
    problems = check(chosen.run, world)
    elsewhere = check(chosen.run, world + 1) if problems else []
    if problems and not any(problem in elsewhere for problem in problems):
        from braid.launch.worker_pool import nearest_worlds

        near = nearest_worlds(lambda other: not check(chosen.run, other), world)
        if near:
            why = "; ".join(f"{problem.field} = {problem.value} {problem.rule}" for problem in problems)
            fitting = " and ".join(str(other) for other in near)
            raise ConfigError(f"--world {world} does not fit: {why}. The nearest that fit: {fitting}")
    problems += validators.at_least("restarts", chosen.restarts, 0)
    problems += _trace_problems(chosen.trace_steps)
    if problems:
        raise ConfigError(problems)
    return plan(chosen.run, world)


def _traced(steps: str) -> range | None:
    """The steps that a text means, counted from 1; None where it means none."""
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        return None
    return range(int(first), int(last) + 1)


def _trace_problems(steps: str) -> Iterator[Problem]:
    if _traced(steps) is None:
        rule = "is the first and the last step to trace, counted from 1"
        yield Problem(field="trace-steps", value=steps, rule=rule, remedy="for example 2:4")


def _be_worker(words: list[str], chosen: TrainOptions, out: Path) -> int:
    """One rank of a launcher, ours or torchrun."""
    from braid.launch.process import LAUNCHER, launch_env_of
    from braid.launch.worker_pool import die_with_launcher

    die_with_launcher(os.environ)
    env = launch_env_of(os.environ)
    assert env is not None
    if chosen.world not in (None, env.world):
        raise ConfigError(f"--world {chosen.world}, but the launcher started {env.world}: leave --world out")
    if chosen.restarts and LAUNCHER not in os.environ:
        raise ConfigError(
            f"--restarts {chosen.restarts} is for workers that braid starts itself; "
            "give torchrun --max-restarts instead"
        )
    code = _work(_planned(chosen, env.world), out, words, chosen)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of closed communicators may outlive the interpreter, and would abort it


def _work(worked_out: Plan, out: Path, words: list[str], chosen: TrainOptions) -> int:
    """Train as one of the ranks. What all of them fail by, rank 0 alone tells."""
    # torch takes seconds to load: by now the words are known to be right
    from braid.launch.process import is_everywhere, launch_env_of, leave

    env = launch_env_of(os.environ)
    rank = 0 if env is None else env.rank
    try:
        with ExitStack() as held:
            if rank != 0:
                held.enter_context(redirect_stdout(held.enter_context(Path(os.devnull).open("w"))))
            return _train(worked_out, out, words, chosen)
    except BraidError as error:
        if rank == 0 or not is_everywhere(error):
            raise
        return error.exit_code
    finally:
        leave()


def _train(worked_out: Plan, out: Path, words: list[str], chosen: TrainOptions) -> int:
    from braid.console import say, table, warn
    from braid.train.trainer import Trainer

    steps = _traced(chosen.trace_steps)
    assert steps is not None, "the words are known to be right"
    with bar("building the corpus") as progress:
        trainer = Trainer(
            worked_out,
            out=out,
            init=chosen.init,
            device=chosen.device,
            trace=chosen.trace,
            trace_steps=steps,
            watch=True,
            building=progress,
        )
    with trainer:
        say(f"braid train {words[0]}")
        say(table(_header(trainer, chosen.init)))
        say("")
        for note in idle_choices(worked_out) if trainer.joined.rank == 0 else ():
            warn(note)
        if trainer.joined.rank == 0:
            trainer.listeners += _listeners(chosen, out)
        outcome = trainer.train()
        sample = _sample(trainer)
    say("")
    say(table([*sample, ("", ""), *_ending(outcome, trainer)]))
    say("\ntry next")
    for command in next_commands(words, out, worked_out, program(), os.environ):
        say(f"  {command}")
    return ExitCode.OK


def _listeners(chosen: TrainOptions, out: Path) -> list[Listener]:
    """Of rank 0, which speaks for all."""
    from braid.train.metrics import TensorBoard, Wandb

    listeners: list[Listener] = []
    if chosen.tensorboard:
        listeners.append(TensorBoard(out / "tensorboard"))
    if chosen.wandb is not None:
        listeners.append(Wandb(chosen.wandb, out, to_json(chosen.run)))
    return listeners


def _header(trainer: Trainer, init: Path | None) -> Sequence[tuple[str, str]]:
    from braid.console import magnitude

    worked_out, state, feed = trainer.plan, trainer.state, trainer.feed
    run = worked_out.run
    size = size_of(worked_out)
    weights = f"{magnitude(size.total)} parameters, {magnitude(size.active)} of them active for a token"
    status = f"continues from step {state.step}" if trainer.resumed else "a new run"
    if init is not None and not trainer.resumed:
        status += f" from the weights of {init}"
    if state.step == run.train.steps:
        status = f"finished at step {state.step}: nothing is left to do"
    kernels = [str(choice) for choice in state.model.kernels.choices]
    return [
        ("model", f"{run.model.pattern}, {weights}"),
        ("data", f"{feed.name}, {magnitude(feed.tokens)} tokens"),
        ("step", f"{worked_out.step_tokens:,} tokens = {run.train.batch_samples} x {run.data.sequence_tokens}"),
        ("device", f"{trainer.device.name}, {run.train.dtype}"),
        *([] if worked_out.world == 1 else [("ranks", _ranks(worked_out))]),
        *([("schedule", text)] if (text := schedule_words(worked_out)) else []),
        *(("kernels" if i == 0 else "", text) for i, text in enumerate(kernels)),
        ("out", f"{trainer.places.out}, {status}"),
    ]


def _ranks(worked_out: Plan) -> str:
    return f"{worked_out.world}: {described(worked_out.run.mesh, worked_out.axes)}"


def _sample(trainer: Trainer) -> Sequence[tuple[str, str]]:
    """A few lines that the model writes. That it cannot is no reason for a trained run to fail."""
    tokens = SAMPLE_TOKENS if trainer.plan.world == 1 else SHARED_SAMPLE_TOKENS
    try:
        text = trainer.generate(trainer.feed.prompt, tokens=tokens, seed=trainer.plan.run.train.seed)
    except BraidError as error:
        text = f"(none: {error})"
    lines = (_printable(line) for line in text.splitlines() or [""])
    return [("sample" if i == 0 else "", line) for i, line in enumerate(lines)]


def _printable(line: str) -> str:
    """A terminal obeys control characters: they are shown as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _ending(outcome: Outcome, trainer: Trainer) -> Sequence[tuple[str, str]]:
    validation = "n/a" if outcome.val_loss is None else f"{outcome.val_loss:.3f} nats per token"
    best = trainer.feed.unigram_entropy
    return [
        ("validation", f"{validation}; knowing only how often each token occurs: {best:.3f}"),
        ("checkpoint", str(outcome.checkpoint)),
        ("metrics", str(trainer.places.metrics)),
        *([] if trainer.traced is None else [("trace", opened_by(trainer.traced))]),
    ]
