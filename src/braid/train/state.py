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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

import braid
from braid import checkpoint
from braid.checkpoint.manifest import MANIFEST_NAME
from braid.config import Run, to_json
from braid.console import warn
from braid.data import Loader, Tokenizer
from braid.distributed.collectives import Group
from braid.distributed.transfer import EdgeChannel
from braid.engine.executor import PipelineLinks, Program
from braid.engine.progress import Progress
from braid.engine.streams import Streams, streams_for
from braid.engine.weights import ModuleWeights, Weights
from braid.errors import CheckpointError, NumericsError, enumeration
from braid.launch.process import all_gather_json, fail_together
from braid.model.encoder import EncoderModel
from braid.model.language import LanguageModel
from braid.model.names import language_names, renamed
from braid.nn.canonical import Canonical, Held
from braid.nn.init import VERSION as INIT_VERSION
from braid.nn.offload import HostPool
from braid.optim.adamw import ALL_MOMENTS, AdamW
from braid.optim.spikes import SpikeWindow
from braid.planning import trained as trained_tensors
from braid.planning.plan import Plan, canonical_names, evaluation_schedule, whole_models
from braid.schedule import Channel, OpSpan
from braid.schedule.graph import LANGUAGE
from braid.train.copies import CopyCheck
from braid.train.host_pool import open_pool
from braid.train.module_state import ModuleState
from braid.train.stored_names import Renames, renames_in, stored_name, stored_tensor_name
from braid.train.stored_run import NAMES_VERSION, NO_DATA, describe, read_run_manifest
from braid.train.surgery import Fresh, InitPlan, Stored, Values, check_plan, plan_by_name

if TYPE_CHECKING:
    from braid.train.step_graphs import StepGraphs

RNG = "rng.cpu"
"""Torch's global generator. braid does not draw from it, but a third-party module might."""


@dataclass(kw_only=True)
class JobState:
    """The state of a run on any rank of the job: its plan, its counters, and the modules that it holds. A rank
    without modules takes part in the job's collectives only."""

    plan: Plan
    """Holds the schedule that steps execute."""
    job: Group
    """All ranks of the job. Those of the language model's grid are `State.model.groups.world`."""
    device: torch.device
    names: frozenset[str]
    """Canonical names of all modules, over all ranks."""
    modules: Mapping[str, ModuleState] = field(default_factory=dict)
    """The modules of which this rank holds a part, in the order of the plan."""
    channels: Mapping[Channel, Group] = field(default_factory=dict)
    """Point-to-point groups with the neighbouring pipeline stages of each module."""
    edges: Mapping[EdgeChannel, Group] = field(default_factory=dict)
    """The communicators of the edges between modules."""
    progress: Progress = field(default_factory=Progress)
    """What this rank is doing, for the watchdog."""
    log: Sequence[OpSpan] = ()
    """When each op of the last step ran."""
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
    _evaluations: dict[int, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress.modules = enumeration(list(self.modules))

    @property
    def everyone_trains(self) -> bool:
        """Whether the language model is the only module, and on every rank of the job."""
        return self.plan.grid.size == self.job.size and not self.plan.encoders

    @property
    def encoders(self) -> dict[str, ModuleState]:
        """The modules of this rank besides the language model."""
        return {name: each for name, each in self.modules.items() if name != LANGUAGE}

    @functools.cached_property
    def keeper(self) -> Weights:
        """Unshards, reshards and reduces the units of all modules of this rank."""
        if not self.plan.encoders:
            return self.modules[LANGUAGE].keeper
        return ModuleWeights({name: each.keeper for name, each in self.modules.items()})

    def language_message(self, rows: int, run: Run) -> Tensor:
        """A receive buffer of the language model's pipeline, for a micro-batch of `rows` rows."""
        model = self.modules[LANGUAGE].model
        tokens = run.data.sequence_tokens // model.groups.tp_cp.size
        return torch.empty(rows, tokens, *model.shape.stream, dtype=model.dtype, device=model.device)

    def links(self, rows: int, run: Run) -> PipelineLinks:
        """Pipeline channels of a language model alone, for micro-batches of `rows` rows."""
        message = functools.partial(self.language_message, rows, run)
        return PipelineLinks(channels=self.channels, message=lambda _: message(), progress=self.progress)

    @functools.cached_property
    def program(self) -> Program:
        """The ops of a training step on this rank."""
        return Program(self.plan.schedule, self._station)

    def evaluation(self, micro_batches: int) -> Program:
        """The ops of an evaluation of that many micro-batches on this rank."""
        if micro_batches not in self._evaluations:
            schedule = evaluation_schedule(self.plan, micro_batches)
            self._evaluations[micro_batches] = Program(schedule, self._station)
        return self._evaluations[micro_batches]

    @functools.cached_property
    def spikes(self) -> SpikeWindow:
        """The gradient norms and losses of the last steps. The same on all ranks of the job."""
        return SpikeWindow(self.plan.run.train.spike_window, self.device)

    @functools.cached_property
    def copies(self) -> CopyCheck:
        """Compares what this rank holds with the copies of other ranks."""
        return CopyCheck(self.modules, self.device)

    @functools.cached_property
    def host_pool(self) -> HostPool | None:
        """Where offloaded blocks wait; None if this rank has none."""
        return open_pool(self.plan, self._station, self.device) if self.program.away else None

    @property
    def _station(self) -> int:
        station = self.plan.station(self.job.rank)
        assert station is not None, f"rank {self.job.rank} holds no module"
        return station

    @functools.cached_property
    def streams(self) -> Streams:
        """The streams of all steps. They are created once, because the caching allocator keeps a separate pool
        for each stream."""
        return streams_for(self.device)


@dataclass(kw_only=True)
class State(JobState):
    """The state of a run on a rank of the language model's grid."""

    graphs: StepGraphs | None = None
    """The CUDA graphs of its steps; None if they run without."""

    @property
    def language(self) -> ModuleState:
        return self.modules[LANGUAGE]

    @property
    def model(self) -> LanguageModel:
        """This rank's part of the language model."""
        model = self.language.model
        assert isinstance(model, LanguageModel)
        return model

    @property
    def optimizer(self) -> AdamW:
        """That of the language model."""
        return self.language.optimizer

    def weights(self) -> dict[str, Tensor]:
        """Those of the language model, see `ModuleState.weights`."""
        return self.language.weights()


def initialize(state: JobState, run: Run) -> None:
    """Initialise the main parameters and torch's generator from the run's seed."""
    torch.manual_seed(run.train.seed)
    for module in state.modules.values():
        module.initialize(run.train.seed)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What this rank saves of one step: tensors, where they lie or as copies, and numbers as of that step."""

    step: int
    entries: Sequence[_Entry]
    """The tensors of which this rank holds the first replica of a part."""
    rng: Tensor
    """Torch's generator."""
    updates: tuple[dict[str, int], dict[str, int]]
    """See `_updates`."""
    extra: Mapping[str, Any]
    not_finite: Sequence[str] | None = None
    """Names of tensors that are not finite; None if nobody has looked yet."""

    def storages(self) -> list[Tensor]:
        """The tensors that hold the entries, each once."""
        return list({_place(entry.storage): entry.storage.detach() for entry in self.entries}.values())

    def on(self, copies: Sequence[Tensor]) -> Capture:
        """The same with copies of `storages()`."""
        by_place = dict(zip(map(_place, self.storages()), copies, strict=True))
        entries = [entry._replace(storage=by_place[_place(entry.storage)]) for entry in self.entries]
        return replace(self, entries=entries)

    def examined(self) -> Capture:
        """The same, with the names of tensors that are not finite."""
        storages = [each for each in self.storages() if each.is_floating_point()]
        bounds = [torch.stack(each.aminmax()).isfinite().all() for each in storages]
        verdicts = torch.stack(bounds).tolist() if bounds else []
        wrong = {_place(each) for each, finite in zip(storages, verdicts, strict=True) if not finite}
        return replace(self, not_finite=[e.name for e in self.entries if _place(e.storage) in wrong])

    def pieces(self, rank: int) -> Iterator[checkpoint.Piece]:
        """The boxes that this rank writes."""
        for entry in self.entries:
            yield checkpoint.Piece(
                name=entry.name,
                global_shape=entry.canonical.shape,
                offset=entry.held.offset,
                tensor=torch.empty(entry.held.shape, dtype=entry.storage.dtype, device="meta"),
                read=functools.partial(entry.held.read, entry.storage.detach()),
            )
        if rank == 0:
            yield checkpoint.Piece.whole(RNG, self.rng)


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def capture(state: JobState, run: Run, loader: Loader, tokenizer: Tokenizer) -> Capture:
    """What this rank saves now. Its tensors are those of the state, which the next step changes."""
    counters = {
        "samples": state.samples,
        "tokens": state.tokens,
        "skipped_in_a_row": state.skipped_in_a_row,
        "data": {"fingerprint": loader.fingerprint, **loader.identity},
        "init": dict(state.init),
        "spikes": state.spikes.record().to_json(),
    }
    return Capture(
        step=state.step,
        entries=[entry for entry in _entries(state) if entry.first and not entry.held.empty],
        rng=torch.get_rng_state(),
        updates=_updates(state),
        extra=_extra(run, tokenizer) | counters,
    )


def save(root: Path, state: JobState, run: Run, loader: Loader, tokenizer: Tokenizer) -> Path:
    """Write a checkpoint and return its folder. Collective over the job: a failure on one rank is raised on
    all, and leaves no partial checkpoint."""
    return write(root, capture(state, run, loader, tokenizer), state.job)


class Replication(Protocol):
    """Where ranks write if each machine has a folder of its own."""

    @property
    def leads(self) -> bool:
        """Whether this rank begins and commits the checkpoint of its machine."""

    def exchange(self, folder: Path, records: Sequence[checkpoint.Record]) -> None:
        """Copy the files of a checkpoint in the making to other machines. Collective."""


def write(root: Path, captured: Capture, job: Group, replication: Replication | None = None) -> Path:
    """`save` what was captured before. `job` may be any group of all ranks of the job."""
    step, extra = captured.step, dict(captured.extra)
    leads = job.rank == 0 if replication is None else replication.leads
    with fail_together(job):
        _check_finite(root, captured)
    try:
        with fail_together(job):
            if leads:
                checkpoint.begin(root, step)
        with fail_together(job):
            record = checkpoint.write_part(root, step, job.rank, captured.pieces(job.rank))
        # Rank 0 writes the manifest, and may have no optimizer of its own to ask.
        records, told = zip(*all_gather_json([record, captured.updates], job), strict=True)
        updates = {module: count for counts, _ in told for module, count in counts.items()}
        extra["updates"] = updates.pop(LANGUAGE)
        if updates:
            extra["module_updates"] = updates
        if own := {name: count for _, mine in told for name, count in mine.items()}:
            extra["own_updates"] = own
        if replication is not None:
            with fail_together(job):
                replication.exchange(checkpoint.partial_path(root, step), records)
        with fail_together(job):
            if leads:
                checkpoint.commit(root, step, records, extra=extra, whole=replication is None)
    except BaseException:
        if leads:
            checkpoint.abandon(root, step)
        raise
    return checkpoint.step_path(root, step)


def _check_finite(root: Path, captured: Capture) -> None:
    """Refuse to save what no run can continue from: such a checkpoint would replace an older, good one."""
    wrong = captured.not_finite if captured.not_finite is not None else captured.examined().not_finite
    if wrong:
        listed = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise NumericsError(
            f"step {captured.step} is not saved: {len(wrong)} tensors are not finite: {listed}\n"
            f"  rule  a checkpoint holds a state that training can continue from; those in {root} stay\n"
            "  set   a lower optim.lr, and run again from the checkpoint before"
        )


def _updates(state: JobState) -> tuple[dict[str, int], dict[str, int]]:
    """Updates of the optimizer of each module of this rank, and those of tensors that have another number."""
    counts = {name: module.optimizer.updates for name, module in state.modules.items()}
    own = {name: n for module in state.modules.values() for name, n in module.own_updates().items()}
    return counts, own


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


def boxes_in(path: Path, state: JobState) -> list[tuple[str, checkpoint.Box]]:
    """The tensors of a checkpoint of which this rank holds a part, each with its box."""
    entries = _entries(state, renames_in(path, state.plan))
    return [(entry.name, entry.box) for entry in entries if not entry.held.empty]


def load(path: Path, state: JobState) -> None:
    """Load a checkpoint into the state. Its tensors must be exactly those of the state, over all ranks; the
    brackets of its patterns may stand elsewhere."""
    with fail_together(state.job):
        saved, renames = describe(path), renames_in(path, state.plan)
        stored, fresh = checkpoint.read_manifest(path).tensors, _without_moments(path, state, renames)
    held = [*_entries(state, renames)]
    zeroed = {f"optimizer.{moment}.{name}" for moment in ALL_MOMENTS for name in fresh}
    entries = [entry for entry in held if not entry.held.empty and entry.name not in zeroed]
    requests: dict[str, checkpoint.ReadRequest | Tensor] = {RNG: torch.get_rng_state()}
    for entry in entries:
        # A frozen weight is stored as precisely as those who froze it held it.
        castable = entry.name in stored and (entry.frozen or entry.name in fresh)
        dtype = stored[entry.name].dtype if castable else entry.storage.dtype
        requests[entry.name] = entry.request(dtype)
    names = {stored_tensor_name(name, state.plan, renames) for name in state.names}
    moments = {f"optimizer.{moment}.{name}" for moment in ALL_MOMENTS for name in names}
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
    counts = {**saved.own_updates, **dict.fromkeys(fresh, 0)}
    for name, module in state.modules.items():
        module.optimizer.copy_to_model()
        tensors_of = ((stored_name(each, module, renames), t) for each, t in module.model.canonical().items())
        own = {t.parameter: counts[each] for each, t in tensors_of if each in counts}
        updates = saved.updates if name == LANGUAGE else saved.module_updates.get(name, 0)
        module.optimizer.set_updates(updates, own)
    state.step, state.skipped_in_a_row = saved.step, saved.skipped_in_a_row
    state.samples, state.tokens = saved.samples, saved.tokens
    state.init = saved.init
    state.spikes.restore(saved.spikes)
    torch.set_rng_state(tensors[RNG])


def _without_moments(path: Path, state: JobState, renames: Renames) -> frozenset[str]:
    """Trained tensors whose moments are not in a checkpoint, because the run that saved it had frozen them; by
    their names there."""
    stored, frozen = checkpoint.read_manifest(path).tensors, frozenset(_frozen_by(path))
    found = set()
    for module, model in whole_models(state.plan).items():
        learned, selection = dict(model.named_parameters()), state.plan.selection_of(module)
        trained, prefix = trained_tensors.parameters_of(model, selection), state.plan.prefix_of(module)
        for own, tensor in model.canonical().items():
            name = prefix + renamed(own, renames.get(module, {}))
            if tensor.parameter in trained and tensor.parameter in learned and name in frozen:
                found.add(name)
    return frozenset(
        name for name in found if not any(f"optimizer.{each}.{name}" in stored for each in ALL_MOMENTS)
    )


def _frozen_by(path: Path) -> Iterator[str]:
    """The weights of a checkpoint that its run did not train."""
    run = checkpoint.read_manifest(path).extra.get("run", {})
    globs = {f"modules.{name}.": each["trained"] for name, each in run.get("modules", {}).items()}
    for name in stored_weights(path):
        prefix = next((each for each in globs if name.startswith(each)), "")
        trained = globs.get(prefix) or (() if prefix else run.get("trained", trained_tensors.EVERYTHING))
        if not trained_tensors.matches(name[len(prefix) :], trained):
            yield name


def weight_names(path: Path, *, moments: bool = False) -> frozenset[str]:
    """Names of the model's tensors in a checkpoint, and of their moments if asked for."""
    stored = checkpoint.read_manifest(path).tensors
    return frozenset(name for name in stored if _is_weight(name) or (moments and name != RNG))


def _is_weight(name: str) -> bool:
    return name != RNG and not name.startswith("optimizer.")


def load_weights(
    path: Path, model: LanguageModel | EncoderModel, into: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Load the weights of a language model, or of an encoder whose names have a prefix, from a checkpoint into
    tensors given by parameter name. Names and shapes must be exactly those of the model."""
    entries = [
        _Entry(prefix + name, tensor, into[tensor.parameter], tensor.held, first=True)
        for name, tensor in model.canonical().items()
    ]
    wanted = {entry.name: entry.canonical.shape for entry in entries}
    every = stored_weights(path)
    own = [name for name in every if name.startswith(prefix)] if prefix else language_names(every)
    stored = {name: every[name] for name in own}
    planned = plan_by_name(wanted)
    check_plan(str(path), planned, shapes_of(stored), wanted)
    _load_entries(path, entries, planned, stored)


def load_state_weights(path: Path, state: JobState, planned: InitPlan | None = None) -> None:
    """Load only weights into a state, from their origins in a checkpoint; by default those of their own names.
    Collective over the job. What a plan leaves fresh stays as it is."""
    entries = [entry for entry in _entries(state) if _is_weight(entry.name)]
    with fail_together(state.job):
        stored = stored_weights(path)
        if planned is None:
            wanted = canonical_names(state.plan)
            planned = plan_by_name(wanted)
            check_plan(str(path), planned, shapes_of(stored), wanted)
        _load_entries(path, entries, planned, stored)
    for module in state.modules.values():
        module.optimizer.copy_to_model()


def stored_weights(path: Path) -> dict[str, checkpoint.StoredTensor]:
    """The weights of a checkpoint by name, with shape and dtype, without optimizer and generator state."""
    return {name: stored for name, stored in read_run_manifest(path).tensors.items() if _is_weight(name)}


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


def resolve_checkpoint(path: Path, *, quiet: bool = False) -> Path:
    """The newest valid checkpoint of a run's folder, or of its `checkpoints` folder; a checkpoint as it is.
    Warns if that is not the newest of all, unless `quiet`: the same was resolved before, or on another rank."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: give the folder of a checkpoint or of a run")
    roots = [root for root in (path / "checkpoints", path) if any(root.glob("step-*"))]
    if not roots:
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            command = shlex.join(["braid", "import", str(path), "--out", "runs/imported"])
            raise CheckpointError(
                f"{path} is a folder of the Hugging Face hub: convert it first, with `{command}`"
            )
        if not path.name.startswith("step-") and not (path / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{path} is neither a run nor a checkpoint: it holds no step-* folder and no {MANIFEST_NAME}; "
                "give the folder of a checkpoint or of a run"
            )
        return path
    newest = checkpoint.latest(roots[0])
    if newest.path is None:
        reasons = "".join(f"\n  {damaged.reason}" for damaged in newest.damaged)
        raise CheckpointError(f"{roots[0]} has no valid checkpoint{reasons}")
    for damaged in () if quiet else newest.damaged:
        warn(f"skipping a damaged checkpoint: {damaged.reason}\n  using {newest.path} instead, which is older")
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


def _entries(state: JobState, renames: Renames = MappingProxyType({})) -> Iterator[_Entry]:
    """Every tensor of the checkpoint of which this rank holds a part."""
    for module in state.modules.values():
        optimizer, weights = module.optimizer, module.weights()
        for own_name, (tensor, held) in module.tensors.items():
            name, kept = stored_name(own_name, module, renames), module.kept[tensor.parameter]
            first, frozen = kept.first and tensor.copies.rank == 0, tensor.parameter not in optimizer.main
            yield _Entry(name, tensor, weights[tensor.parameter], held, first, frozen)
            moments = {} if frozen else optimizer.moments(tensor.parameter)
            for moment, storage in moments.items():
                yield _Entry(f"optimizer.{moment}.{name}", tensor, storage, held, first)
