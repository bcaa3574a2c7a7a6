"""Initialisation and resume: from the run's newest valid checkpoint, from given weights, or from the seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from braid import checkpoint
from braid.architecture import Model
from braid.config import Run, difference
from braid.console import warn
from braid.errors import CheckpointError, ConfigError, DataError, enumeration, first_of
from braid.launch.process import all_gather_json, check_agreement, fail_together
from braid.model.names import symbols
from braid.pattern import parse
from braid.train import state as states
from braid.train import stored_run
from braid.train.data_pipeline import DataPipeline
from braid.train.init_from import SAME_MODEL, InitOptions, start_from
from braid.train.memory_checkpoints import MemoryCheckpoints
from braid.train.run_dir import RunDir
from braid.train.state import JobState

MAX_ERROR_LINES = 6
"""Lines quoted of the error of a checkpoint that does not match the model."""


def initialize_or_resume(
    state: JobState,
    run: Run,
    data: DataPipeline,
    run_dir: RunDir,
    init: Path | None = None,
    options: InitOptions = SAME_MODEL,
    *,
    start_over: bool = False,
    memory: MemoryCheckpoints | None = None,
) -> Path | None:
    """Resume from the newest valid checkpoint of the run and return its path. Without one, initialise from the
    run's seed, or load the weights of the checkpoint `init` if given, by the rules of `options`. If all
    checkpoints are damaged, that needs `start_over`. A checkpoint in `memory` is used if it is newer than those
    on disk. Succeeds or fails on all ranks alike."""
    job = state.job
    with fail_together(job):
        newest = checkpoint.latest(run_dir.checkpoints)
    on_disk = newest.path
    kept = None if memory is None else _newer_in_memory(memory, state, newest)
    with fail_together(job):
        if kept is not None:
            newest = replace(newest, path=kept)
        elif newest.path is None and newest.damaged and not start_over:
            raise _all_damaged(run_dir, newest)
        weights = None
        if newest.path is None and init is not None:
            weights = states.resolve_checkpoint(init, quiet=job.rank != 0)
    # Every rank has looked for itself: with a filesystem that is not shared, or not readable on one node, ranks
    # would resume from different steps.
    check_agreement(
        {"newest valid checkpoint": str(on_disk or weights)},
        job,
        "the ranks find different checkpoints: set --out and --init to folders that all of them share",
        CheckpointError,
    )
    with fail_together(job):
        if job.rank == 0:
            _set_aside(newest)
    with fail_together(job):
        if newest.path is None:
            _initialize(state, run, weights, options)
        else:
            _resume(state, run, data, run_dir, newest.path)
    return newest.path


def _newer_in_memory(memory: MemoryCheckpoints, state: JobState, newest: checkpoint.Latest) -> Path | None:
    """The checkpoint in memory, if it is newer than the one on disk."""
    on_disk = -1 if newest.path is None else checkpoint.read_manifest(newest.path).step
    after = min(all_gather_json(on_disk, state.job))  # where they differ, that is an error below
    kept = memory.restore(state, after)
    if kept is not None and state.job.rank == 0:
        older = "the disk has none" if after < 0 else f"the newest on disk is step {after}"
        warn(f"resuming from the checkpoint of {kept.name} in memory, {kept}: {older}")
    return kept


def _all_damaged(run_dir: RunDir, newest: checkpoint.Latest) -> CheckpointError:
    reasons = [line for damaged in newest.damaged for line in first_of(damaged.reason.splitlines())]
    return CheckpointError(
        "\n  ".join(
            [
                f"all checkpoints in {run_dir.checkpoints} are damaged: the run is left unchanged",
                *reasons,
                "rule  a run resumes from its newest valid checkpoint, and starts over only if it has none",
                "set   an intact copy in place of one of them; or --start-over, which keeps them under another "
                "name and trains from step 0; or another --out",
            ]
        )
    )


def _set_aside(newest: checkpoint.Latest) -> None:
    """Rename damaged checkpoints, which the run would otherwise replace once it gets to their steps, and say
    what is used instead."""
    instead = "training starts over" if newest.path is None else f"resuming from {newest.path.name}"
    for damaged in newest.damaged:
        warn(
            f"skipping a damaged checkpoint: {damaged.reason}\n"
            f"  {instead}; it is kept as {checkpoint.set_aside(damaged.path).name}"
        )


def _initialize(state: JobState, run: Run, weights: Path | None, options: InitOptions) -> None:
    started = None if weights is None else start_from(weights, state.plan, options)
    states.initialize(state, run)
    if weights is None or started is None:
        return
    if state.job.rank == 0:
        for note in started.plan.notes:
            warn(note)
    for source, planned in started.loads(weights):
        states.load_state_weights(source, state, planned)
    state.init = {**state.init, **started.record}


def _only_regrouped(before: Model, now: Model) -> bool:
    """Whether two patterns have the same layers in other brackets."""
    return symbols(parse(before.pattern)) == symbols(parse(now.pattern))


def _resume(state: JobState, run: Run, data: DataPipeline, run_dir: RunDir, path: Path) -> None:
    saved = stored_run.describe(path)
    before, now = saved.run.modules, run.modules
    moved = {name: "added" for name in now if name not in before}
    moved |= {name: "removed" for name in before if name not in now}
    changed = {
        field: values
        for field, values in difference(saved.run, run).items()
        if not any(field.startswith(f"modules.{name}.") for name in moved)
    }
    if (changed or moved) and state.job.rank == 0:
        warn(f"the run differs from the one that saved {path}:")
        for field, (old, new) in changed.items():
            warn(f"  {field}: {old} -> {new}")
        for name, how in moved.items():
            warn(f"  modules.{name}: {how}")
        if "model.pattern" in changed and _only_regrouped(saved.run.model, run.model):
            warn("  the layers are the same: their weights and optimizer state are taken over layer by layer")
    if saved.step > run.train.steps:
        raise ConfigError(
            f"{run_dir.out} is at step {saved.step}, train.steps is {run.train.steps}: "
            f"set train.steps to {saved.step} or more, or another --out"
        )
    if saved.data_fingerprint == stored_run.NO_DATA and not saved.updates:
        raise ConfigError(
            f"{run_dir.out} holds imported weights, not a run to resume: "
            f"train from them with --init {run_dir.out} and another --out"
        )
    if moved:
        which = enumeration([f"modules.{name} was {how}" for name, how in moved.items()])
        raise ConfigError(
            f"{which} since {path} was saved, and a run resumes with the modules that it has: "
            "restore the modules, or set another --out"
        )
    kinds = [{*each.optim.muon.kinds} for each in (saved.run, run) if each.optim.name == "muon"]
    decide = ("optim.name", "optim.muon.kinds") if kinds[1:] and kinds[0] != kinds[1] else ("optim.name",)
    if other := [each for each in decide if each in changed]:
        listed = ", ".join(f"{each}: {changed[each][0]} -> {changed[each][1]}" for each in other)
        raise ConfigError(
            f"{listed}: {path} has no optimizer state for this run: restore the setting, or train from the "
            f"weights alone with --init {path} and another --out"
        )
    if saved.data_fingerprint not in (stored_run.NO_DATA, data.train.fingerprint):
        raise DataError(
            f"{path} was trained on other data or in another order, so it is unknown which samples it has "
            "consumed: restore the data and the data fields of the run, or set another --out"
        )
    try:
        states.load(path, state)
    except CheckpointError as error:
        if not any(name.startswith("model.") for name in changed):
            raise
        details = "\n".join(str(error).splitlines()[:MAX_ERROR_LINES])
        raise CheckpointError(
            f"the model differs from the one in {run_dir.out}: set another --out\n{details}\n..."
        ) from error
