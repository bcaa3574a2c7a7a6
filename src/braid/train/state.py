"""The state of a run, and its way into a checkpoint and back.

Tensors go by canonical names: a model's weights under their own, the optimizer's moments under
`optimizer.<moment>.<name>`. What is saved are the main parameters, so nothing is lost in a narrower dtype.
Everything else is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import braid
from braid import checkpoint, kernels
from braid.config import Run, from_json, to_json
from braid.data import Loader, Tokenizer, tokenizer_from
from braid.errors import CheckpointError
from braid.model.language import LanguageModel
from braid.nn.canonical import Canonical
from braid.optim.adamw import MOMENTS, AdamW
from braid.plan import plan
from braid.train.device import DTYPES, Device

NAMES_VERSION = 1
"""Version of the canonical names, see docs/checkpoint-format.md."""

NO_DATA = "none"
"""Stands for the fingerprint of the data where a model has seen none here."""

RNG = "rng.cpu"
"""Torch's own generator. Nothing in braid draws from it; a module of somebody else's might."""


@dataclass(kw_only=True)
class State:
    """What changes while a run is trained."""

    model: LanguageModel
    optimizer: AdamW
    step: int = 0
    """Steps done, skipped ones included."""
    samples: int = 0
    """Samples consumed: where the data goes on."""
    tokens: int = 0
    """Tokens read, over all steps."""
    skipped_in_a_row: int = 0
    """How many of the last steps were skipped because something was not finite."""

    def weights(self) -> dict[str, Tensor]:
        """By parameter name: the main copy of what the optimizer updates, the model's own of all else."""
        return {**dict(self.model.named_parameters()), **self.optimizer.main}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says about its run, besides tensors."""

    run: Run
    step: int
    samples: int
    tokens: int
    updates: int
    skipped_in_a_row: int
    data_fingerprint: str
    tokenizer: Mapping[str, Any]
    """The tokenizer's description."""
    hub: Mapping[str, Any]
    """What `save_weights` was told; empty for a model that was trained here."""


def initialize(state: State, run: Run) -> None:
    """Set the main parameters, and torch's generator, to where a run with this seed starts."""
    torch.manual_seed(run.train.seed)
    state.model.initialize(run.train.seed, into=state.weights())
    state.optimizer.publish()


def save(root: Path, state: State, run: Run, loader: Loader, tokenizer: Tokenizer) -> Path:
    """Write a checkpoint of the state."""
    pieces = [checkpoint.Piece.whole(name, tensor) for name, tensor in _tensors(state)]
    pieces.append(checkpoint.Piece.whole(RNG, torch.get_rng_state()))
    progress = {
        "samples": state.samples,
        "tokens": state.tokens,
        "updates": state.optimizer.updates,
        "skipped_in_a_row": state.skipped_in_a_row,
        "data": {"fingerprint": loader.fingerprint, **loader.identity},
    }
    return checkpoint.save(root, state.step, pieces, extra=_extra(run, tokenizer) | progress)


def save_weights(
    root: Path, weights: Mapping[str, Tensor], run: Run, tokenizer: Tokenizer, hub: Mapping[str, Any]
) -> Path:
    """Write the weights of a model that was not trained here, as step 0 of a run. `hub` is what its folder
    says besides: `settings` of its config, and the text of further `files`."""
    pieces = (checkpoint.Piece.whole(name, weights[name]) for name in weights)
    return checkpoint.save(root, 0, pieces, extra=_extra(run, tokenizer) | {"hub": dict(hub)})


def _extra(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """What every manifest says: of a run that has not begun, until it is told more."""
    return {
        "braid": braid.__version__,
        "names": NAMES_VERSION,
        "run": to_json(run),
        "tokenizer": dict(tokenizer.description),
        "samples": 0,
        "tokens": 0,
        "updates": 0,
        "skipped_in_a_row": 0,
        "data": {"fingerprint": NO_DATA},
    }


def describe(path: Path) -> Saved:
    """What a checkpoint says about its run."""
    manifest = checkpoint.read_manifest(path)
    extra = manifest.extra
    if extra.get("names", NAMES_VERSION) != NAMES_VERSION:
        raise CheckpointError(
            f"{path} has names of version {extra['names']}, this braid reads version {NAMES_VERSION}: "
            "use the braid that wrote it"
        )
    try:
        return Saved(
            run=from_json(extra["run"]),
            step=manifest.step,
            samples=int(extra["samples"]),
            tokens=int(extra["tokens"]),
            updates=int(extra["updates"]),
            skipped_in_a_row=int(extra["skipped_in_a_row"]),
            data_fingerprint=str(extra["data"]["fingerprint"]),
            tokenizer=dict(extra["tokenizer"]),
            hub=dict(extra.get("hub", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a run of this version: {error}") from error


def load(path: Path, state: State) -> None:
    """Fill the state from a checkpoint; its tensors must be exactly those of the state."""
    saved = describe(path)
    wanted = {**dict(_tensors(state)), RNG: torch.get_rng_state()}
    found = checkpoint.read(path, wanted)
    for name, tensor, target in _places(state):
        tensor.write(target, found[name])
    state.optimizer.publish()
    state.optimizer.updates = saved.updates
    state.step, state.skipped_in_a_row = saved.step, saved.skipped_in_a_row
    state.samples, state.tokens = saved.samples, saved.tokens
    torch.set_rng_state(found[RNG])


def read_weights(path: Path) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint, without those of its optimizer and generators."""
    stored = checkpoint.read_manifest(path).tensors
    unread = {name for name in stored if name == RNG or name.startswith("optimizer.")}
    wanted: dict[str, checkpoint.Wanted | Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
        if name not in unread
    }
    return checkpoint.read(path, wanted, unread=unread)


def load_weights(path: Path, model: LanguageModel, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, given by parameter name, from a checkpoint whose weights are exactly those of the model."""
    tensors, found = model.canonical(), read_weights(path)
    differing = sorted(found.keys() ^ tensors.keys())
    if differing:
        names = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
        raise CheckpointError(f"{path} and the model differ in {len(differing)} tensors: {names}")
    wrong = [name for name, tensor in tensors.items() if tuple(found[name].shape) != tensor.shape]
    if wrong:
        shapes = f"{tuple(found[wrong[0]].shape)} there, {tensors[wrong[0]].shape} here"
        raise CheckpointError(f"{path} and the model differ in {len(wrong)} shapes: {wrong[0]} is {shapes}")
    for name, tensor in tensors.items():
        tensor.write(into[tensor.parameter], found[name])


def open_model(path: Path, device: Device) -> tuple[LanguageModel, Tokenizer]:
    """The model of a checkpoint, or of the newest one of a run's folder, and its tokenizer."""
    path = newest_in(path)
    saved = describe(path)
    dtype = DTYPES[saved.run.train.dtype]
    layout = plan(saved.run, world=1).layout
    chosen = kernels.choose(saved.run.model, layout.kinds(), device.torch, dtype)
    model = LanguageModel(saved.run.model, layout, chosen, device=device.torch, dtype=dtype)
    load_weights(path, model, dict(model.named_parameters()))
    return model, tokenizer_from(saved.tokenizer)


def newest_in(path: Path) -> Path:
    """A checkpoint as it is; for a run's folder, or the folder of its checkpoints, the newest whole one."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: give a checkpoint's folder, or a run's")
    roots = [root for root in (path / "checkpoints", path) if any(root.glob("step-*"))]
    if not roots:
        return path
    newest = checkpoint.latest(roots[0])
    if newest.path is None:
        reasons = "".join(f"\n  {damaged.reason}" for damaged in newest.damaged)
        raise CheckpointError(f"{roots[0]} holds no whole checkpoint{reasons}")
    return newest.path


def _places(state: State) -> Iterator[tuple[str, Canonical, Tensor]]:
    """Every tensor of a checkpoint: its name, and where in which tensor of the state it lives."""
    optimizer, weights = state.optimizer, state.weights()
    for name, tensor in state.model.canonical().items():
        yield name, tensor, weights[tensor.parameter]
        for moment in MOMENTS if tensor.parameter in optimizer.main else ():
            yield f"optimizer.{moment}.{name}", tensor, optimizer.moment(moment, tensor.parameter)


def _tensors(state: State) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.read(target.detach())) for name, tensor, target in _places(state))
