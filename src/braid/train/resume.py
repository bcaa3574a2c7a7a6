"""Where a run starts: from the newest whole checkpoint of its folder, from other weights, or from its seed."""

from __future__ import annotations

from pathlib import Path

from braid import checkpoint
from braid.config import Run, difference
from braid.console import warn
from braid.errors import CheckpointError, ConfigError, DataError, first_of
from braid.launch.process import agree, together
from braid.train import state as states
from braid.train.data_pipeline import DataPipeline
from braid.train.finetune import check_settings
from braid.train.run_dir import RunDir
from braid.train.state import State

MOST_LINES = 6
"""How much is told of a checkpoint that does not fit."""


def begin_or_continue(
    state: State, run: Run, feed: DataPipeline, places: RunDir, init: Path | None = None
) -> Path | None:
    """Fill the state: from the newest whole checkpoint of the run, which is returned; or else from the run's
    seed, with the weights of the checkpoint `init` where one is given. All ranks do the same, or none. A run
    whose checkpoints are all damaged is refused, and left as it is."""
    world = state.model.groups.world
    with together(world):
        newest = _newest(places)
        weights = states.newest_in(init) if newest.path is None and init is not None else None
    # Every rank has looked for itself: where files are not shared, or one machine cannot read them, ranks would
    # go on from different steps.
    agree(
        {"newest whole checkpoint": str(newest.path or weights)},
        world,
        "the ranks find different checkpoints: give --out and --init folders that all of them share",
        CheckpointError,
    )
    for damaged in newest.damaged if world.rank == 0 else ():
        warn(f"passing over a damaged checkpoint: {damaged.reason}")
    with together(world):
        if newest.path is None:
            _begin(state, run, weights)
        else:
            _continue(state, run, feed, places, newest.path)
    return newest.path


def _newest(places: RunDir) -> checkpoint.Latest:
    """The newest whole checkpoint of a run that has one, or has none at all. To begin a run anew whose
    checkpoints are all damaged would cut its metrics, and delete what can perhaps be saved of it."""
    newest = checkpoint.latest(places.checkpoints)
    if newest.path is not None or not newest.damaged:
        return newest
    faults = [line for damaged in newest.damaged for line in first_of(damaged.reason.splitlines())]
    raise CheckpointError(
        "\n  ".join(
            [
                f"no checkpoint in {places.checkpoints} is whole: the run is left as it is",
                *faults,
                "rule  a run goes on from its newest whole checkpoint, and begins anew only where it has none",
                f"set   a whole copy in the place of one of them; to begin anew, move or delete {places.out}, "
                "or set another --out",
            ]
        )
    )


def _begin(state: State, run: Run, weights: Path | None) -> None:
    """Start from the run's seed, or from the weights of a checkpoint."""
    if weights is not None:
        saved = states.saved_model(weights)
        if saved is not None:
            check_settings(weights, saved, run.model)
        elif state.model.groups.world.rank == 0:
            warn(f"{weights} holds no settings of its model: only names and shapes of its tensors are compared")
    states.initialize(state, run)
    if weights is not None:
        states.load_state_weights(weights, state)


def _continue(state: State, run: Run, feed: DataPipeline, places: RunDir, path: Path) -> None:
    """Go on from a checkpoint of the run."""
    first = state.model.groups.world.rank == 0
    saved = states.describe(path)
    changed = difference(saved.run, run)
    if changed and first:
        warn(f"the run differs from the one that saved {path}:")
        for name, (before, now) in changed.items():
            warn(f"  {name}: {before} -> {now}")
    if saved.step > run.train.steps:
        raise ConfigError(
            f"{places.out} is at step {saved.step}, train.steps is {run.train.steps}: "
            f"set train.steps to {saved.step} or more, or another --out"
        )
    if saved.data_fingerprint == states.NO_DATA and not saved.updates:
        raise ConfigError(
            f"{places.out} holds the weights of a model that was not trained here: "
            f"train from them with --init {places.out} and another --out"
        )
    if saved.data_fingerprint not in (states.NO_DATA, feed.train.fingerprint):
        raise DataError(
            f"{path} was trained on other data or in another order: the samples it consumed cannot be "
            "told from new ones. Restore the data and its fields, or set another --out"
        )
    try:
        states.load(path, state)
    except CheckpointError as error:
        if not any(name.startswith("model.") for name in changed):
            raise
        told = "\n".join(str(error).splitlines()[:MOST_LINES])
        raise CheckpointError(
            f"the model differs from the one in {places.out}: set another --out\n{told}\n..."
        ) from error
