"""Training state, and saving and loading it as a topology-independent distributed checkpoint.

Tensors go by canonical names: weights under their own, the optimizer's moments under
`optimizer.<moment>.<name>`. Weights are saved from the main parameters, so no precision is lost to a narrower
compute dtype. Everything else is JSON in the manifest. Each rank writes the boxes of which it holds the first
replica, and reads the boxes it needs, whichever topology wrote them (resharding on load).
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import braid
from braid import checkpoint, kernels
from braid.architecture import Model
from braid.config import Mesh, Run, from_json, model_from_json, to_json
from braid.console import warn
from braid.data import Loader, Tokenizer, tokenizer_from
from braid.distributed.collectives import Group
from braid.engine.executor import PipelineLinks, Program
from braid.engine.progress import Progress
from braid.engine.streams import Streams, streams_for
from braid.engine.weights import Weights
from braid.errors import CheckpointError
from braid.launch.process import all_gather_json, fail_together
from braid.model.language import LanguageModel
from braid.model.names import regrouped_names, renamed
from braid.nn.canonical import Canonical, Held
from braid.nn.dtypes import DTYPES
from braid.nn.init import VERSION as INIT_VERSION
from braid.optim.adamw import MOMENTS, AdamW
from braid.optim.gradients import ReplicatedPart, replicated_parts
from braid.optim.shards import LocalShard, local, local_shard
from braid.pattern import parse
from braid.planning import trained as trained_tensors
from braid.planning.plan import Plan, evaluation_schedule, plan, whole_model
from braid.schedule import Channel, OpSpan, Turn
from braid.train.device import Device, DeviceName, choose_device
from braid.train.surgery import Fresh, InitPlan, Stored, Values, check_plan, plan_by_name

NAMES_VERSION = 1
"""Version of the canonical names, see docs/checkpoint-format.md."""

NO_DATA = "none"
"""Data fingerprint of a model that was imported, not trained."""

RNG = "rng.cpu"
"""Torch's global generator. braid does not draw from it, but a third-party module might."""


@dataclass(kw_only=True)
class JobState:
    """The state of a run on any rank of the job: its plan and its counters. A rank outside the model's grid has
    nothing else; it takes part in the job's collectives only."""

    plan: Plan
    """Holds the schedule that steps execute."""
    job: Group
    """All ranks of the job. Those of the model's grid are `State.model.groups.world`."""
    device: torch.device
    names: frozenset[str]
    """Canonical names of the whole model, over all ranks."""
    progress: Progress = field(default_factory=Progress)
    """What this rank is doing, for the watchdog."""
    step: int = 0
    """Steps done, including skipped ones."""
    samples: int = 0
    """Samples consumed: the position in the data."""
    tokens: int = 0
    """Tokens read, over all steps."""
    skipped_in_a_row: int = 0
    """Consecutive steps up to now that were skipped because of a non-finite loss or gradient."""
    init: Mapping[str, Any] = field(default_factory=lambda: {"version": INIT_VERSION})
    """How the run began, for the record: the version of its initial weights; `from`, `rules` and `allowed` if
    it started from another checkpoint."""

    @property
    def everyone_trains(self) -> bool:
        """Whether every rank of the job is in the model's grid."""
        return self.plan.grid.size == self.job.size


@dataclass(kw_only=True)
class State(JobState):
    """The state of a run on a rank of the model's grid: also model, optimizer, and the ops it executes."""

    model: LanguageModel
    optimizer: AdamW
    keeper: Weights
    """Unshards, reshards and reduces the units of the model while ops run."""
    channels: Mapping[Channel, Group] = field(default_factory=dict)
    """Point-to-point groups with the neighbouring pipeline stages."""
    log: Sequence[OpSpan] = ()
    """When each op of the last step ran."""
    _evaluations: dict[int, Program] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """By parameter name: the main copy of what the optimizer updates, the model's tensor (or this rank's
        shard of it) for the rest."""
        return {**{name: local(each) for name, each in self.model.tensors().items()}, **self.optimizer.main}

    def links(self, rows: int, run: Run) -> PipelineLinks:
        """Pipeline channels, and an allocator of receive buffers for micro-batches of `rows` rows."""
        model, groups = self.model, self.model.groups
        tokens = run.data.sequence_tokens // groups.tp_cp.size
        size = (rows, tokens, *model.shape.stream)

        def message(_: Turn) -> Tensor:
            return torch.empty(size, dtype=model.dtype, device=model.device)

        return PipelineLinks(channels=self.channels, message=message, progress=self.progress)

    @functools.cached_property
    def program(self) -> Program:
        """The ops of a training step on this rank."""
        return Program(self.plan.schedule, self.model.groups.pp.rank)

    def evaluation(self, micro_batches: int) -> Program:
        """The ops of an evaluation of that many micro-batches on this rank."""
        if micro_batches not in self._evaluations:
            schedule = evaluation_schedule(self.plan, micro_batches)
            self._evaluations[micro_batches] = Program(schedule, self.model.groups.pp.rank)
        return self._evaluations[micro_batches]

    @functools.cached_property
    def streams(self) -> Streams:
        """The streams of all steps. They are created once, because the caching allocator keeps a separate pool
        for each stream."""
        return streams_for(self.model.device)

    @functools.cached_property
    def kept(self) -> dict[str, LocalShard]:
        """The shard of every parameter on this rank. Buffers are replicated on all ranks."""
        first = self.model.groups.slab.rank == 0
        buffers = {name: LocalShard(None, first=first) for name, _ in self.model.named_buffers()}
        return {name: local_shard(parameter) for name, parameter in self.model.named_parameters()} | buffers

    @functools.cached_property
    def frozen_buffers(self) -> frozenset[str]:
        """Buffers that the run does not train: selection biases that stay as they are."""
        trained = self.plan.trained_buffers(self.model)
        return frozenset(name for name, _ in self.model.named_buffers() if name not in trained)

    @functools.cached_property
    def copies(self) -> list[ReplicatedPart]:
        """The parts of parameters that are replicated on other ranks."""
        shards = {name: self.kept[name].shard for name in self.optimizer.main}
        return replicated_parts(self.model.canonical().values(), shards)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The metadata of a checkpoint: its run, counters and tokenizer."""

    run: Run
    step: int
    samples: int
    tokens: int
    updates: int
    own_updates: Mapping[str, int]
    """Updates of the tensors that joined later, by canonical name."""
    skipped_in_a_row: int
    data_fingerprint: str
    tokenizer: Mapping[str, Any]
    """The tokenizer's description."""
    hub: Mapping[str, Any]
    """`settings` and `files` of an imported folder, in checkpoints of older versions; see `RUN/hub` today."""
    init: Mapping[str, Any]
    """How the run began, see `State.init`."""


def initialize(state: JobState, run: Run) -> None:
    """Initialise the main parameters and torch's generator from the run's seed."""
    torch.manual_seed(run.train.seed)
    if not isinstance(state, State):
        return
    shards = {name: kept.shard for name, kept in state.kept.items() if kept.shard is not None}
    state.model.initialize(run.train.seed, into=state.weights(), shards=shards)
    state.optimizer.copy_to_model()


def save(root: Path, state: JobState, run: Run, loader: Loader, tokenizer: Tokenizer) -> Path:
    """Write a checkpoint and return its folder. Collective over the job: a failure on one rank is raised on
    all, and leaves no partial checkpoint."""
    job = state.job
    counters = {
        "samples": state.samples,
        "tokens": state.tokens,
        "skipped_in_a_row": state.skipped_in_a_row,
        "data": {"fingerprint": loader.fingerprint, **loader.identity},
        "init": dict(state.init),
    }
    try:
        with fail_together(job):
            if job.rank == 0:
                checkpoint.begin(root, state.step)
        with fail_together(job):
            record = checkpoint.write_part(root, state.step, job.rank, _pieces(state))
        # Rank 0 writes the manifest, and may have no optimizer of its own to ask.
        records, told = zip(*all_gather_json([record, _updates(state)], job), strict=True)
        counters["updates"] = next(count for count, _ in told if count is not None)
        if own := {name: count for _, mine in told for name, count in mine.items()}:
            counters["own_updates"] = own
        with fail_together(job):
            if job.rank == 0:
                checkpoint.commit(root, state.step, records, extra=_extra(run, tokenizer) | counters)
    except BaseException:
        if job.rank == 0:
            checkpoint.abandon(root, state.step)
        raise
    return checkpoint.step_path(root, state.step)


def _updates(state: JobState) -> tuple[int | None, dict[str, int]]:
    """Updates of this rank's optimizer, and those of tensors that have another number of them."""
    if not isinstance(state, State):
        return None, {}
    own = state.optimizer.own_updates()
    tensors = state.model.canonical().items()
    return state.optimizer.updates, {name: own[t.parameter] for name, t in tensors if t.parameter in own}


def _pieces(state: JobState) -> Iterator[checkpoint.Piece]:
    """What this rank writes: the boxes of which it holds the first replica."""
    for entry in _entries(state) if isinstance(state, State) else ():
        if entry.first and not entry.held.empty:
            yield checkpoint.Piece(
                name=entry.name,
                global_shape=entry.canonical.shape,
                offset=entry.held.offset,
                tensor=entry.held.read(entry.storage.detach()),
            )
    if state.job.rank == 0:
        yield checkpoint.Piece.whole(RNG, torch.get_rng_state())


def _extra(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `extra` of a manifest, with the counters of a run that has not started."""
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


def describe(path: Path) -> CheckpointInfo:
    """Read the metadata of a checkpoint."""
    manifest = _read_manifest(path)
    extra = manifest.extra
    try:
        return CheckpointInfo(
            run=from_json(extra["run"]),
            step=manifest.step,
            samples=int(extra["samples"]),
            tokens=int(extra["tokens"]),
            updates=int(extra["updates"]),
            own_updates={name: int(count) for name, count in extra.get("own_updates", {}).items()},
            skipped_in_a_row=int(extra["skipped_in_a_row"]),
            data_fingerprint=str(extra["data"]["fingerprint"]),
            tokenizer=dict(extra["tokenizer"]),
            hub=dict(extra.get("hub", {})),
            init=dict(extra.get("init", {"version": 1})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a run of this version: {error}") from error


def saved_model(path: Path) -> Model | None:
    """The model settings of a checkpoint; settings newer than the checkpoint get their defaults. None if the
    manifest has no run, as a writer other than braid may leave it out."""
    run = _read_manifest(path).extra.get("run")
    if run is None:
        return None
    try:
        model = model_from_json(run["model"])
        parse(model.pattern)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has model settings that this braid cannot read: {error}; use the braid that wrote it"
        ) from error
    return model


def _read_manifest(path: Path) -> checkpoint.Manifest:
    """The manifest of a checkpoint whose canonical names this version understands."""
    manifest = checkpoint.read_manifest(path)
    names = manifest.extra.get("names", NAMES_VERSION)
    if names != NAMES_VERSION:
        raise CheckpointError(
            f"{path} has names of version {names}, this braid reads version {NAMES_VERSION}: "
            "use the braid that wrote it"
        )
    return manifest


def load(path: Path, state: JobState) -> None:
    """Load a checkpoint into the state. Its tensors must be exactly those of the state, over all ranks; the
    brackets of its pattern may stand elsewhere."""
    with fail_together(state.job):
        saved, model = describe(path), saved_model(path)
        layers = None if model is None else regrouped_names(state.plan.layout, parse(model.pattern))
        stored, fresh = checkpoint.read_manifest(path).tensors, _without_moments(path, state, layers or {})
    held = [*_entries(state, layers or {})] if isinstance(state, State) else []
    zeroed = {f"optimizer.{moment}.{name}" for moment in MOMENTS for name in fresh}
    entries = [entry for entry in held if not entry.held.empty and entry.name not in zeroed]
    requests: dict[str, checkpoint.ReadRequest | Tensor] = {RNG: torch.get_rng_state()}
    for entry in entries:
        # A frozen weight is stored as precisely as those who froze it held it.
        castable = entry.name in stored and (entry.frozen or entry.name in fresh)
        dtype = stored[entry.name].dtype if castable else entry.storage.dtype
        requests[entry.name] = entry.request(dtype)
    names = {renamed(name, layers or {}) for name in state.names}
    moments = {f"optimizer.{moment}.{name}" for moment in MOMENTS for name in names}
    unread = (moments | names) - requests.keys()  # read by other ranks
    with fail_together(state.job):
        tensors = checkpoint.read(path, requests, unread=unread)
    for entry in entries:
        entry.held.write(entry.storage, tensors[entry.name])
    for entry in held:
        if entry.name in zeroed:
            entry.storage.zero_()
    if fresh and state.job.rank == 0:
        listed = ", ".join(sorted(fresh)[:3]) + (", ..." if len(fresh) > 3 else "")
        warn(f"{path} has no optimizer state of {len(fresh)} tensors, which start with none: {listed}")
    if isinstance(state, State):
        state.optimizer.copy_to_model()
        counts = {**saved.own_updates, **dict.fromkeys(fresh, 0)}
        renaming = ((renamed(name, layers or {}), t.parameter) for name, t in state.model.canonical().items())
        own = {parameter: counts[name] for name, parameter in renaming if name in counts}
        state.optimizer.set_updates(saved.updates, own)
    state.step, state.skipped_in_a_row = saved.step, saved.skipped_in_a_row
    state.samples, state.tokens = saved.samples, saved.tokens
    state.init = saved.init
    torch.set_rng_state(tensors[RNG])


def _without_moments(path: Path, state: JobState, layers: Mapping[str, str]) -> frozenset[str]:
    """Trained tensors whose moments are not in a checkpoint, because the run that saved it had frozen them; by
    their names there."""
    stored, model = checkpoint.read_manifest(path).tensors, whole_model(state.plan)
    trained, learned = state.plan.trained(model), dict(model.named_parameters())
    names = (
        renamed(name, layers)
        for name, tensor in model.canonical().items()
        if tensor.parameter in trained and tensor.parameter in learned
    )
    frozen = frozenset(_frozen_by(path))
    return frozenset(
        name
        for name in names
        if name in frozen and not any(f"optimizer.{each}.{name}" in stored for each in MOMENTS)
    )


def _frozen_by(path: Path) -> Iterator[str]:
    """The weights of a checkpoint that its run did not train."""
    extra = checkpoint.read_manifest(path).extra
    globs = extra.get("run", {}).get("trained", trained_tensors.EVERYTHING)
    return (name for name in stored_weights(path) if not trained_tensors.matches(name, globs))


def weight_names(path: Path, *, moments: bool = False) -> frozenset[str]:
    """Names of the model's tensors in a checkpoint, and of their moments if asked for."""
    stored = checkpoint.read_manifest(path).tensors
    return frozenset(name for name in stored if _is_weight(name) or (moments and name != RNG))


def _is_weight(name: str) -> bool:
    return name != RNG and not name.startswith("optimizer.")


def load_weights(path: Path, model: LanguageModel, into: Mapping[str, Tensor]) -> None:
    """Load the weights of a checkpoint into tensors given by parameter name. Names and shapes must be exactly
    those of the model."""
    entries = [
        _Entry(name, tensor, into[tensor.parameter], tensor.held, first=True)
        for name, tensor in model.canonical().items()
    ]
    wanted = {name: tensor.shape for name, tensor in model.canonical().items()}
    planned, stored = plan_by_name(wanted), stored_weights(path)
    check_plan(str(path), planned, shapes_of(stored), wanted)
    _load_entries(path, entries, planned, stored)


def load_state_weights(path: Path, state: JobState, planned: InitPlan | None = None) -> None:
    """Load only weights into a state, from their origins in a checkpoint; by default those of their own names.
    Collective over the job. What a plan leaves fresh stays as it is."""
    held = _entries(state) if isinstance(state, State) else ()
    entries = [entry for entry in held if _is_weight(entry.name)]
    with fail_together(state.job):
        stored = stored_weights(path)
        if planned is None:
            wanted = {name: tensor.shape for name, tensor in whole_model(state.plan).canonical().items()}
            planned = plan_by_name(wanted)
            check_plan(str(path), planned, shapes_of(stored), wanted)
        _load_entries(path, entries, planned, stored)
    if isinstance(state, State):
        state.optimizer.copy_to_model()


def stored_weights(path: Path) -> dict[str, checkpoint.StoredTensor]:
    """The weights of a checkpoint by name, with shape and dtype, without optimizer and generator state."""
    return {name: stored for name, stored in _read_manifest(path).tensors.items() if _is_weight(name)}


def shapes_of(stored: Mapping[str, checkpoint.StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def _load_entries(
    path: Path, entries: Sequence[_Entry], planned: InitPlan, stored: Mapping[str, checkpoint.StoredTensor]
) -> None:
    """Fill the entries from their origins, cast to the dtype of their storage. Reads the boxes that this rank
    holds, each once, however many entries are copies of it."""
    shapes, wanted = shapes_of(stored), dict[str, list[checkpoint.Box]]()
    sources: list[tuple[_Entry, Stored, checkpoint.Box, checkpoint.Box]] = []
    for entry in entries:
        origin = planned.origins[entry.name]
        if entry.held.empty or isinstance(origin, Fresh):
            continue
        if isinstance(origin, Values):
            value = torch.tensor(origin.numbers, dtype=torch.float64).expand(entry.canonical.shape)
            entry.held.write(entry.storage, entry.held.of(value))
            continue
        offset, shape = origin.box(shapes)
        filled = checkpoint.overlap(entry.box, checkpoint.Box.whole(shape))
        if filled is None:
            if origin.rest == "zeros":
                entry.held.write(entry.storage, torch.zeros(entry.held.shape))
            continue
        box = checkpoint.Box(
            offset=tuple(a + b for a, b in zip(filled.offset, offset, strict=True)), shape=filled.shape
        )
        sources.append((entry, origin, filled, box))
        if box not in wanted.setdefault(origin.name, []):
            wanted[origin.name].append(box)
    # A read has one box of each tensor; most plans need no second one.
    for turn in range(max(map(len, wanted.values()), default=0)):
        boxes = {name: each[turn] for name, each in wanted.items() if turn < len(each)}
        requests = {
            name: checkpoint.ReadRequest(global_shape=shapes[name], box=box, dtype=stored[name].dtype)
            for name, box in boxes.items()
        }
        values = checkpoint.read(path, requests, unread=checkpoint.read_manifest(path).tensors.keys())
        for entry, origin, filled, box in sources:
            if boxes.get(origin.name) == box:
                entry.fill(filled, values[origin.name], origin.rest)


def load_model(path: Path | str, device: Device | DeviceName = "auto") -> tuple[LanguageModel, Tokenizer]:
    """The model and the tokenizer of a checkpoint, or of the newest checkpoint in a run's folder."""
    path = resolve_checkpoint(Path(path))
    if not isinstance(device, Device):
        device = choose_device(device)
    saved = describe(path)
    dtype = DTYPES[saved.run.train.dtype]
    layout = plan(replace(saved.run, mesh=Mesh()), world=1).layout
    chosen = kernels.choose(saved.run.model, layout.kinds(), device.torch, dtype)
    model = LanguageModel(saved.run.model, layout, chosen, device=device.torch, dtype=dtype)
    load_weights(path, model, model.tensors())
    return model, tokenizer_from(saved.tokenizer)


def resolve_checkpoint(path: Path) -> Path:
    """The newest valid checkpoint of a run's folder, or of its `checkpoints` folder; a checkpoint as it is."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: give the folder of a checkpoint or of a run")
    roots = [root for root in (path / "checkpoints", path) if any(root.glob("step-*"))]
    if not roots:
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            command = shlex.join(["braid", "import", str(path), "--out", "runs/imported"])
            raise CheckpointError(
                f"{path} is a folder of the Hugging Face hub: convert it first, with `{command}`"
            )
        return path
    newest = checkpoint.latest(roots[0])
    if newest.path is None:
        reasons = "".join(f"\n  {damaged.reason}" for damaged in newest.damaged)
        raise CheckpointError(f"{roots[0]} has no valid checkpoint{reasons}")
    for damaged in newest.damaged:
        warn(f"skipping a damaged checkpoint: {damaged.reason}")
    return newest.path


class _Entry(NamedTuple):
    """A tensor of a checkpoint, and the part of it that this rank holds."""

    name: str
    canonical: Canonical
    storage: Tensor
    """This rank's shard of the parameter, or of one of its moments."""
    held: Held
    first: bool
    """Whether this rank holds the first replica of the part, and therefore writes it."""
    frozen: bool = False
    """Whether it is a weight that is not trained, and has no main copy."""

    @property
    def box(self) -> checkpoint.Box:
        return checkpoint.Box(offset=self.held.offset, shape=self.held.shape)

    def request(self, dtype: torch.dtype) -> checkpoint.ReadRequest:
        return checkpoint.ReadRequest(global_shape=self.canonical.shape, box=self.box, dtype=dtype)

    def fill(self, box: checkpoint.Box, value: Tensor, rest: Literal["fresh", "zeros"]) -> None:
        """Write a box within the one that this rank holds; the rest stays as it is, or becomes zero."""
        if box != self.box:
            whole = self.held.read(self.storage.detach()).clone()
            whole = torch.zeros_like(whole) if rest == "zeros" else whole
            whole[box.within(self.box)] = value.to(whole.device, whole.dtype)
            value = whole
        self.held.write(self.storage, value)


def _entries(state: State, layers: Mapping[str, str] = MappingProxyType({})) -> Iterator[_Entry]:
    """Every tensor of the checkpoint of which this rank holds a part. `layers` renames layers, for a checkpoint
    of a pattern with other brackets."""
    optimizer, weights = state.optimizer, state.weights()
    for own_name, tensor in state.model.canonical().items():
        name, kept = renamed(own_name, layers), state.kept[tensor.parameter]
        held, first = tensor.within(kept.shard), kept.first and tensor.copies.rank == 0
        frozen = tensor.parameter not in optimizer.main
        yield _Entry(name, tensor, weights[tensor.parameter], held, first, frozen)
        for moment in MOMENTS if tensor.parameter in optimizer.main else ():
            storage = optimizer.moment(moment, tensor.parameter)
            yield _Entry(f"optimizer.{moment}.{name}", tensor, storage, held, first)
