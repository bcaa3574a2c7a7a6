"""`braid train`: plan a run, open its data, train it, and show what came of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from braid import recipes
from braid.cli.progress import bar
from braid.cli.runs import RunFields, help_with_a_recipe
from braid.cli.words import options, subject
from braid.config import to_json
from braid.errors import BraidError, ConfigError, ExitCode
from braid.plan import Plan, plan

if TYPE_CHECKING:
    from braid.train.device import Device
    from braid.train.feed import Feed
    from braid.train.loop import Outcome
    from braid.train.metrics import Listener
    from braid.train.places import Places
    from braid.train.state import State

SAMPLE_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a run. Interrupted, the same command continues where it stopped."""

    run: RunFields
    out: Path | None = None
    """Folder for everything of the run: checkpoints, metrics.jsonl, built data. Default: runs/RECIPE."""
    init: Path | None = None
    """Checkpoint or run whose weights a new run starts from: fine-tuning. The optimizer starts anew."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    tensorboard: bool = False
    """Also write TensorBoard files into the folder (extra `log`)."""
    wandb: str | None = None
    """Also send metrics to this Weights & Biases project (extra `log`)."""


def train(words: list[str]) -> int:
    name, rest = subject(help_with_a_recipe(words), "train", "RECIPE")
    chosen = options(TrainOptions, rest, f"braid train {name}", TrainOptions(run=recipes.load(name)))
    worked_out = plan(chosen.run, world=chosen.run.mesh.pp)
    if chosen.run.mesh.pp > 1:
        raise ConfigError(f"mesh.pp = {chosen.run.mesh.pp}: this version trains on one process; set it to 1")
    from braid.train.places import Places

    places = Places(out=chosen.out or Path("runs") / name.rpartition(":")[2])
    with places.held():
        return _train(worked_out, places, words, chosen)


def _train(worked_out: Plan, places: Places, words: list[str], chosen: TrainOptions) -> int:
    # torch takes seconds to load: by now the words are known to be right
    from braid.train.console import say, table
    from braid.train.device import choose_device
    from braid.train.feed import open_feed
    from braid.train.loop import begin_or_continue, make_state, train_to_end

    device = choose_device(chosen.device)
    with bar("building the corpus") as progress:
        feed = open_feed(chosen.run, places.data, progress)
    state = make_state(worked_out, device)
    resumed = begin_or_continue(state, chosen.run, feed, places, chosen.init)
    say(f"braid train {words[0]}")
    say(table(_header(worked_out, state, device, feed, places, resumed, chosen.init)))
    say("")
    outcome = train_to_end(worked_out, places, device, feed, state, _listeners(chosen, places.out))
    say("")
    say(table([*_sample(outcome, feed, chosen), ("", ""), *_ending(outcome, feed, places)]))
    say("\ntry next")
    for command in _next_commands(words, places, outcome, chosen):
        say(f"  {command}")
    return ExitCode.OK


def _listeners(chosen: TrainOptions, out: Path) -> list[Listener]:
    from braid.train.metrics import TensorBoard, Wandb

    listeners: list[Listener] = []
    if chosen.tensorboard:
        listeners.append(TensorBoard(out / "tensorboard"))
    if chosen.wandb is not None:
        listeners.append(Wandb(chosen.wandb, out, to_json(chosen.run)))
    return listeners


def _header(
    worked_out: Plan,
    state: State,
    device: Device,
    feed: Feed,
    places: Places,
    resumed: Path | None,
    init: Path | None,
) -> Sequence[tuple[str, str]]:
    from braid.train.console import magnitude

    run = worked_out.run
    size = state.model.size()
    weights = f"{magnitude(size.total)} parameters, {magnitude(size.active)} of them active for a token"
    status = f"continues from step {state.step}" if resumed else "a new run"
    if init is not None and not resumed:
        status += f" from the weights of {init}"
    if state.step == run.train.steps:
        status = f"finished at step {state.step}: nothing is left to do"
    kernels = [str(choice) for choice in state.model.kernels.choices]
    return [
        ("model", f"{run.model.pattern}, {weights}"),
        ("data", f"{feed.name}, {magnitude(feed.tokens)} tokens"),
        ("step", f"{worked_out.step_tokens:,} tokens = {run.train.batch_samples} x {run.data.sequence_tokens}"),
        ("device", f"{device.name}, {run.train.dtype}"),
        *(("kernels" if i == 0 else "", text) for i, text in enumerate(kernels)),
        ("out", f"{places.out}, {status}"),
    ]


def _sample(outcome: Outcome, feed: Feed, chosen: TrainOptions) -> Sequence[tuple[str, str]]:
    """A few lines that the model writes. That it cannot is no reason for a trained run to fail."""
    from braid.model.generate import generate_text

    try:
        text = generate_text(
            outcome.model,
            feed.tokenizer,
            feed.prompt,
            tokens=SAMPLE_TOKENS,
            temperature=0.8,
            seed=chosen.run.train.seed,
        )
    except BraidError as error:
        text = f"(none: {error})"
    return [("sample" if i == 0 else "", line) for i, line in enumerate(text.splitlines() or [""])]


def _ending(outcome: Outcome, feed: Feed, places: Places) -> Sequence[tuple[str, str]]:
    validation = "n/a" if outcome.val_loss is None else f"{outcome.val_loss:.3f} nats per token"
    return [
        ("validation", f"{validation}; knowing only how often each token occurs: {feed.unigram_entropy:.3f}"),
        ("checkpoint", str(outcome.checkpoint)),
        ("metrics", str(places.metrics)),
    ]


def _next_commands(words: list[str], places: Places, outcome: Outcome, chosen: TrainOptions) -> Sequence[str]:
    """Three commands that work as they stand: with the program's own name and every option of this run."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "braid" else "braid"
    longer = [*_without(words, "--train.steps"), "--train.steps", str(2 * chosen.run.train.steps)]
    shown = [words[0], *_run_options(words[1:])]
    return [
        shlex.join([program, "generate", str(places.out), "--prompt", "class "]),
        shlex.join([program, "train", *longer]),
        shlex.join([program, "show", *shown]),
    ]


def _without(words: list[str], option: str) -> list[str]:
    """The words less an option and its value."""
    kept: list[str] = []
    skipping = False
    for word in words:
        if skipping:
            skipping = False
        elif word == option:
            skipping = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _run_options(words: list[str]) -> list[str]:
    """The options that set fields of the run: those with a dot, and their values."""
    kept: list[str] = []
    keeping = False
    for word in words:
        if word.startswith("--"):
            keeping = "." in word.partition("=")[0]
        if keeping:
            kept.append(word)
    return kept
