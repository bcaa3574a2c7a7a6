"""`braid train`: plan a run, open its data, train it, and show what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from braid import recipes
from braid.cli.progress import bar
from braid.cli.runs import RunFields, recipe_note
from braid.cli.words import options, subject
from braid.config import to_json
from braid.errors import ConfigError, ExitCode
from braid.plan import Plan, plan

if TYPE_CHECKING:
    from braid.train.device import Device
    from braid.train.feed import Feed
    from braid.train.loop import Outcome, Places
    from braid.train.metrics import Listener
    from braid.train.state import State

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a run. Interrupted, the same command continues where it stopped."""

    run: RunFields
    out: Path | None = None
    """Folder for everything of the run: checkpoints, metrics.jsonl, built data. Default: runs/RECIPE."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    tensorboard: bool = False
    """Also write TensorBoard files into the folder (extra `log`)."""
    wandb: str | None = None
    """Also send metrics to this Weights & Biases project (extra `log`)."""


def train(words: list[str]) -> int:
    name, rest = subject(words, "train", "RECIPE", recipe_note())
    chosen = options(TrainOptions, rest, f"braid train {name}", TrainOptions(run=recipes.load(name)))
    worked_out = plan(chosen.run, world=1)
    if chosen.run.mesh.pp > 1:
        raise ConfigError(
            f"mesh.pp = {chosen.run.mesh.pp}: this version trains on one process; set mesh.pp to 1"
        )
    out = chosen.out or Path("runs") / Path(name.replace(":", "-")).name.removesuffix(".py")
    return _train(worked_out, out, name, chosen)


def _train(worked_out: Plan, out: Path, name: str, chosen: TrainOptions) -> int:
    # torch takes seconds to load: by now the words are known to be right
    from braid.train.console import say, table
    from braid.train.device import choose_device
    from braid.train.feed import open_feed
    from braid.train.loop import Places, begin_or_continue, make_state, train_to_end

    places = Places(out=out)
    device = choose_device(chosen.device)
    with bar("building the corpus") as progress:
        feed = open_feed(chosen.run, places.data, progress)
    state = make_state(worked_out, device)
    resumed = begin_or_continue(state, chosen.run, feed, places)
    say(f"braid train {name}")
    say(table(_header(worked_out, state, device, feed, places, resumed)))
    say("")
    outcome = train_to_end(worked_out, places, device, feed, state, _listeners(chosen, out))
    say("")
    say(table(_ending(worked_out, feed, places, outcome, name)))
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
    worked_out: Plan, state: State, device: Device, feed: Feed, places: Places, resumed: Path | None
) -> Sequence[tuple[str, str]]:
    from braid.train.console import magnitude

    run = worked_out.run
    size = state.model.size()
    continues = f"continues from step {state.step}" if resumed else "a new run"
    kernels = [("", str(choice)) for choice in state.model.kernels.choices]
    return [
        (
            "model",
            f"{run.model.pattern}, {magnitude(size.total)} parameters, {magnitude(size.active)} per token",
        ),
        ("data", f"{feed.name}, {magnitude(feed.tokens)} tokens"),
        ("step", f"{worked_out.step_tokens:,} tokens = {run.train.batch_samples} x {run.data.sequence_tokens}"),
        ("device", f"{device.name}, {run.train.dtype}"),
        *([("kernels", kernels[0][1]), *kernels[1:]] if kernels else []),
        ("out", f"{places.out}, {continues}"),
    ]


def _ending(
    worked_out: Plan, feed: Feed, places: Places, outcome: Outcome, name: str
) -> Sequence[tuple[str, str]]:
    from braid.model.generate import generate_text

    seed = worked_out.run.train.seed
    text = generate_text(
        outcome.model, feed.tokenizer, SAMPLE_PROMPT, tokens=SAMPLE_TOKENS, temperature=0.8, seed=seed
    )
    validation = "n/a" if outcome.val_loss is None else f"{outcome.val_loss:.3f}"
    more = worked_out.run.train.steps * 2
    sample = [("sample" if i == 0 else "", line) for i, line in enumerate(text.splitlines() or [""])]
    return [
        *sample,
        ("", ""),
        ("validation", f"{validation} nats per token; counting tokens alone gives {feed.unigram_entropy:.3f}"),
        ("checkpoint", str(outcome.checkpoint)),
        ("metrics", str(places.metrics)),
        ("", ""),
        ("try next", f'braid generate {outcome.checkpoint} --prompt "class "'),
        ("", f"braid train {name} --out {places.out} --train.steps {more}"),
        ("", f"braid show {name}"),
    ]
