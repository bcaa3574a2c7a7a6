"""The run that a checkpoint describes: settings, counters, tokenizer. Read from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid import checkpoint
from braid.architecture import Trunk
from braid.checkpoint import complete_steps
from braid.checkpoint.manifest import MANIFEST_NAME
from braid.config import Run, encoder_from_json, from_json, model_from_json
from braid.errors import CheckpointError, first_of
from braid.optim.spike_record import SpikeRecord
from braid.pattern import parse
from braid.schedule.graph import LANGUAGE

NAMES_VERSION = 1
"""Version of the canonical names, see docs/checkpoint-format.md."""

NO_DATA = "none"
"""Data fingerprint of a model that was imported, not trained."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The metadata of a checkpoint: its run, counters and tokenizer."""

    run: Run
    step: int
    samples: int
    tokens: int
    updates: int
    module_updates: Mapping[str, int]
    """Updates of each module besides the language model."""
    own_updates: Mapping[str, int]
    """Updates of the tensors that joined later, by canonical name."""
    skipped_in_a_row: int
    spikes: SpikeRecord
    """Gradient norms and losses of the last steps; none in checkpoints of older versions."""
    data_fingerprint: str
    tokenizer: Mapping[str, Any]
    """The tokenizer's description."""
    hub: Mapping[str, Any]
    """`settings` and `files` of an imported folder, in checkpoints of older versions; see `RUN/hub` today."""
    init: Mapping[str, Any]
    """How the run began, see `State.init`."""


def describe(path: Path) -> CheckpointInfo:
    """Read the metadata of a checkpoint."""
    extra = (manifest := read_run_manifest(path)).extra
    _check_counters(path, manifest)
    try:
        return CheckpointInfo(
            run=from_json(extra["run"]),
            step=manifest.step,
            samples=int(extra["samples"]),
            tokens=int(extra["tokens"]),
            updates=int(extra["updates"]),
            module_updates={name: int(count) for name, count in extra.get("module_updates", {}).items()},
            own_updates={name: int(count) for name, count in extra.get("own_updates", {}).items()},
            skipped_in_a_row=int(extra["skipped_in_a_row"]),
            spikes=SpikeRecord.from_json(extra["spikes"]) if "spikes" in extra else SpikeRecord(),
            data_fingerprint=str(extra["data"]["fingerprint"]),
            tokenizer=dict(extra["tokenizer"]),
            hub=dict(extra.get("hub", {})),
            init=dict(extra.get("init", {"version": 1})),
        )
    except (KeyError, TypeError, ValueError) as error:
        told = "it is an encoder alone, for --init-modules" if "encoders" in extra else error
        raise CheckpointError(f"{path} does not describe a run of this version: {told}") from error


MOST = 2**63 - 1
"""The largest value of a counter, as of a step."""


def _check_counters(path: Path, manifest: checkpoint.Manifest) -> None:
    """Refuse counters that no run can have: a run that went on with them would compute nonsense."""
    extra, step = manifest.extra, manifest.step
    limits = {"samples": MOST, "tokens": MOST, "updates": step, "skipped_in_a_row": step}
    counters = [(name, extra[name], most) for name, most in limits.items() if name in extra]
    for of in ("module_updates", "own_updates"):
        by_name = extra.get(of, {})
        if not isinstance(by_name, dict):
            raise CheckpointError(
                f"{path} is of no possible run\n  {of} must be an object, with counts by name"
            )
        counters += [(f"{of}[{each}]", by_name[each], step) for each in by_name]
    ends = {MOST: "2**63 - 1", step: f"the step, {step}"}
    wrong = [
        f"{name} = {value!r}: must be a whole number from 0 to {ends[most]}"
        for name, value, most in counters
        if type(value) is not int or not 0 <= value <= most
    ]
    if wrong:
        raise CheckpointError("\n  ".join([f"{path} is of no possible run", *first_of(wrong)]))


def check_claims(path: Path, run: Run) -> None:
    """Refuse settings with more layers than the checkpoint has tensors, as each layer has at least one, or with
    a larger embedding than it has numbers."""
    tensors = read_run_manifest(path).tensors
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    wrong = None
    for name, pattern in [("", run.model.pattern), *((n, m.model.pattern) for n, m in run.modules.items())]:
        layout = parse(pattern)
        layers = len(layout.layers) + sum(len(depth.layers) for depth in layout.mtp)
        if layers > len(tensors):
            at = f"modules.{name}.model.pattern" if name else "model.pattern"
            wrong = f"{at} has {layers:,} layers, and there are {len(tensors):,} tensors"
    if (embedding := run.model.vocab * run.model.hidden) > numbers:
        wrong = f"its embedding has {embedding:,} numbers, and there are {numbers:,}"
    if wrong is not None:
        raise CheckpointError(
            f"{path} does not hold the model that it describes: {wrong}\n  set   the checkpoint as it was saved"
        )


def refuse_at_once(path: Path) -> None:
    """Refuse a checkpoint, or a run with one, whose manifest claims what cannot be, before torch is loaded.
    What this does not find is found when the checkpoint is loaded."""
    roots = [root for root in (path / "checkpoints", path) if root.is_dir()]
    of_run = next((list(steps.values()) for root in roots if (steps := complete_steps(root))), [])
    for newest in of_run:
        with suppress(CheckpointError):  # it is damaged, and the one before it is used
            checkpoint.read_manifest(newest)
            path = newest
            break
    if (path / MANIFEST_NAME).is_file():
        check_claims(path, describe(path).run)


def saved_models(path: Path) -> dict[str, Trunk]:
    """The model settings of a checkpoint, by module; settings newer than the checkpoint get their defaults.
    Empty if the manifest has no run, as a writer other than braid may leave it out."""
    run = read_run_manifest(path).extra.get("run")
    if run is None:
        return {}
    try:
        models: dict[str, Trunk] = {LANGUAGE: model_from_json(run["model"])}
        models |= {
            name: encoder_from_json(each["model"], name) for name, each in run.get("modules", {}).items()
        }
        for model in models.values():
            parse(model.pattern)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has model settings that this braid cannot read: {error}; use the braid that wrote it"
        ) from error
    return models


def read_run_manifest(path: Path) -> checkpoint.Manifest:
    """The manifest of a checkpoint whose canonical names this version understands."""
    manifest = checkpoint.read_manifest(path)
    names = manifest.extra.get("names", NAMES_VERSION)
    if names != NAMES_VERSION:
        raise CheckpointError(
            f"{path} has names of version {names}, this braid reads version {NAMES_VERSION}: "
            "use the braid that wrote it"
        )
    return manifest
