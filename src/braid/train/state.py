"""The state of a run, and its way into a checkpoint and back.

Tensors go by canonical names: a model's weights under their own, the optimizer's moments under
`optimizer.<moment>.<name>`. What is saved are the main parameters, so nothing is lost in a narrower dtype.
Everything else is JSON. Each rank writes what it is the first to hold, and reads what it holds, whatever ranks
wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import braid
from braid import checkpoint, kernels
from braid.architecture import Model
from braid.config import Mesh, Run, from_json, model_from_json, to_json
from braid.data import Loader, Tokenizer, tokenizer_from
from braid.distributed.collectives import Group
from braid.engine.executor import PipelineLinks, Program
from braid.engine.progress import Progress
from braid.engine.streams import Streams, streams_for
from braid.engine.weights import Weights
from braid.errors import CheckpointError, first_of
from braid.launch.process import gather_json, together
from braid.model.language import LanguageModel
from braid.nn.canonical import Canonical, Held
from braid.nn.dtypes import DTYPES
from braid.optim.adamw import MOMENTS, AdamW
from braid.optim.gradients import Copied, copied
from braid.optim.shards import KeptShard, kept_of
from braid.pattern import parse
from braid.planning.plan import Plan, evaluation_schedule, plan
from braid.schedule import Channel, OpSpan
from braid.train.device import Device, DeviceName, choose_device

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
    plan: Plan
    """What its run was worked out to: the schedule that its steps execute is there."""
    keeper: Weights
    """Who keeps the model's weights while ops run."""
    names: frozenset[str]
    """Canonical names of the whole model, over all ranks."""
    channels: Mapping[Channel, Group] = field(default_factory=dict)
    """How this rank reaches its neighbours in the pipeline."""
    log: Sequence[OpSpan] = ()
    """What ran when in the last step."""
    progress: Progress = field(default_factory=Progress)
    """What this rank is doing."""
    step: int = 0
    """Steps done, skipped ones included."""
    samples: int = 0
    """Samples consumed: where the data goes on."""
    tokens: int = 0
    """Tokens read, over all steps."""
    skipped_in_a_row: int = 0
    """How many of the last steps were skipped because something was not finite."""
    _evaluations: dict[int, Program] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """By parameter name: the main copy of what the optimizer updates, the model's own of all else."""
        return {**self.model.tensors(), **self.optimizer.main}

    def links(self, rows: int, run: Run) -> PipelineLinks:
        """Channels, and memory for a message about so many rows."""
        model, groups = self.model, self.model.groups
        tokens = run.data.sequence_tokens // groups.tp_cp.size
        size = (rows, tokens, *model.shape.stream)
        message = functools.partial(torch.empty, size, dtype=model.dtype, device=model.device)
        return PipelineLinks(channels=self.channels, message=message, progress=self.progress)

    @functools.cached_property
    def program(self) -> Program:
        """What this rank does in a step."""
        return Program(self.plan.schedule, self.model.groups.pp.rank)

    def evaluation(self, micro_batches: int) -> Program:
        """What this rank does in an evaluation of so many micro-batches."""
        if micro_batches not in self._evaluations:
            schedule = evaluation_schedule(self.plan, micro_batches)
            self._evaluations[micro_batches] = Program(schedule, self.model.groups.pp.rank)
        return self._evaluations[micro_batches]

    @functools.cached_property
    def streams(self) -> Streams:
        """Where nodes run, in all steps: memory that one stream of a GPU gives back serves no other one."""
        return streams_for(self.model.device)

    @functools.cached_property
    def kept(self) -> dict[str, KeptShard]:
        """What this rank keeps of every parameter. Of what is no parameter it keeps all, as every rank does."""
        first = self.model.groups.slab.rank == 0
        buffers = {name: KeptShard(None, first=first) for name, _ in self.model.named_buffers()}
        return {name: kept_of(parameter) for name, parameter in self.model.named_parameters()} | buffers

    @functools.cached_property
    def copies(self) -> list[Copied]:
        """The parts of parameters that other ranks hold as well."""
        shards = {name: self.kept[name].shard for name in self.optimizer.main}
        return copied(self.model.canonical().values(), shards)


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
    shards = {name: kept.shard for name, kept in state.kept.items() if kept.shard is not None}
    state.model.initialize(run.train.seed, into=state.weights(), shards=shards)
    state.optimizer.publish()


def save(root: Path, state: State, run: Run, loader: Loader, tokenizer: Tokenizer) -> Path:
    """Write a checkpoint of the state: all ranks together, or none. What fails on one is told on every rank."""
    world = state.model.groups.world
    progress = {
        "samples": state.samples,
        "tokens": state.tokens,
        "updates": state.optimizer.updates,
        "skipped_in_a_row": state.skipped_in_a_row,
        "data": {"fingerprint": loader.fingerprint, **loader.identity},
    }
    try:
        with together(world):
            if world.rank == 0:
                checkpoint.begin(root, state.step)
        with together(world):
            record = checkpoint.write_part(root, state.step, world.rank, _owned(state))
        records = gather_json(record, world)
        with together(world):
            if world.rank == 0:
                checkpoint.commit(root, state.step, records, extra=_extra(run, tokenizer) | progress)
    except BaseException:
        if world.rank == 0:
            checkpoint.abandon(root, state.step)
        raise
    return checkpoint.step_path(root, state.step)


def _owned(state: State) -> Iterator[checkpoint.Piece]:
    """What this rank is the first to hold."""
    for place in _places(state):
        if place.first and not place.held.empty:
            yield checkpoint.Piece(
                name=place.name,
                global_shape=place.canonical.shape,
                offset=place.held.offset,
                tensor=place.held.read(place.holder.detach()),
            )
    if state.model.groups.world.rank == 0:
        yield checkpoint.Piece.whole(RNG, torch.get_rng_state())


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
    manifest = _manifest_of_a_model(path)
    extra = manifest.extra
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


def saved_model(path: Path) -> Model | None:
    """The settings of the model in a checkpoint; those that came after it was written have their defaults. None
    where the manifest holds no run: a writer other than braid may leave it out."""
    run = _manifest_of_a_model(path).extra.get("run")
    if run is None:
        return None
    try:
        model = model_from_json(run["model"])
        parse(model.pattern)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has settings of a model that this braid cannot read: {error}; use the braid that wrote it"
        ) from error
    return model


def _manifest_of_a_model(path: Path) -> checkpoint.Manifest:
    manifest = checkpoint.read_manifest(path)
    names = manifest.extra.get("names", NAMES_VERSION)
    if names != NAMES_VERSION:
        raise CheckpointError(
            f"{path} has names of version {names}, this braid reads version {NAMES_VERSION}: "
            "use the braid that wrote it"
        )
    return manifest


def load(path: Path, state: State) -> None:
    """Fill the state from a checkpoint; its tensors must be exactly those of the state, over all ranks."""
    places = list(_places(state))
    generator = torch.get_rng_state()
    wanted: dict[str, checkpoint.Wanted | Tensor] = {RNG: generator}
    wanted |= {place.name: place.wanted(place.holder.dtype) for place in places if not place.held.empty}
    moments = {f"optimizer.{moment}.{name}" for moment in MOMENTS for name in state.names}
    unread = (moments | state.names) - wanted.keys()  # other ranks hold these
    with together(state.model.groups.world):
        saved = describe(path)
        found = checkpoint.read(path, wanted, unread=unread)
    for place in places:
        if not place.held.empty:
            place.held.write(place.holder, found[place.name])
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
    whole = [
        Place(name, tensor, into[tensor.parameter], tensor.held, first=True)
        for name, tensor in model.canonical().items()
    ]
    _fill_weights(path, whole, frozenset(model.canonical()))


def load_state_weights(path: Path, state: State) -> None:
    """Fill the weights of a state, and nothing else of it, from a checkpoint."""
    weights = [place for place in _places(state) if not place.name.startswith("optimizer.")]
    with together(state.model.groups.world):
        _fill_weights(path, weights, state.names)
    state.optimizer.publish()


def _fill_weights(path: Path, places: Sequence[Place], names: frozenset[str]) -> None:
    """Whatever dtype the checkpoint has: values are cast to what holds them."""
    stored = checkpoint.read_manifest(path).tensors
    beside = {name for name in stored if name == RNG or name.startswith("optimizer.")}
    missing = [f"missing  {name}" for name in sorted(names - stored.keys())]
    extra = [f"extra    {name}" for name in sorted(stored.keys() - beside - names)]
    other = []
    for place in places:
        shape = place.canonical.shape
        has = tuple(stored[place.name].shape) if place.name in stored else shape
        if has != shape:
            other.append(f"shape    {place.name}: has {list(has)}, wanted {list(shape)}")
    if count := len(missing) + len(extra) + len(other):
        told = [line for faults in (missing, extra, other) for line in first_of(faults)]
        tensors = "1 tensor" if count == 1 else f"{count} tensors"
        raise CheckpointError("\n  ".join([f"{path} and the model differ in {tensors}", *told]))
    held = {place.name: place for place in places if not place.held.empty}
    wanted = {name: place.wanted(stored[name].dtype) for name, place in held.items()}
    found = checkpoint.read(path, wanted, unread=stored.keys() - wanted.keys())
    for name, place in held.items():
        place.held.write(place.holder, found[name])


def load_model(path: Path | str, device: Device | DeviceName = "auto") -> tuple[LanguageModel, Tokenizer]:
    """The model of a checkpoint, or of the newest one of a run's folder, and its tokenizer. `device` is one
    that was chosen, or says which to choose."""
    path = newest_in(Path(path))
    if not isinstance(device, Device):
        device = choose_device(device)
    saved = describe(path)
    dtype = DTYPES[saved.run.train.dtype]
    layout = plan(replace(saved.run, mesh=Mesh()), world=1).layout
    chosen = kernels.choose(saved.run.model, layout.kinds(), device.torch, dtype)
    model = LanguageModel(saved.run.model, layout, chosen, device=device.torch, dtype=dtype)
    load_weights(path, model, model.tensors())
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


class Place(NamedTuple):
    """A tensor of a checkpoint, and where this rank holds its part of it."""

    name: str
    canonical: Canonical
    holder: Tensor
    """What this rank keeps of a parameter or of one of its moments."""
    held: Held
    first: bool
    """Whether no rank before this one holds the same part."""

    def wanted(self, dtype: torch.dtype) -> checkpoint.Wanted:
        box = checkpoint.Box(offset=self.held.offset, shape=self.held.shape)
        return checkpoint.Wanted(global_shape=self.canonical.shape, box=box, dtype=dtype)


def _places(state: State) -> Iterator[Place]:
    """Every tensor of a checkpoint of which this rank holds a part."""
    optimizer, weights = state.optimizer, state.weights()
    for name, tensor in state.model.canonical().items():
        kept = state.kept[tensor.parameter]
        held, first = tensor.within(kept.shard), kept.first and tensor.copies.rank == 0
        yield Place(name, tensor, weights[tensor.parameter], held, first)
        for moment in MOMENTS if tensor.parameter in optimizer.main else ():
            holder = optimizer.moment(moment, tensor.parameter)
            yield Place(f"optimizer.{moment}.{name}", tensor, holder, held, first)
