"""One run on any topology, told as whole tensors: what `braid prove` and the invariance matrix compare.

    told = run_ranks(world, train_each, [task, ...])                 every rank's part of every run
    outcome([each[0] for each in told], reference.shapes, task)      the first run, put together

A rank tells its own parts, each with where it begins in the canonical tensor; the saved checkpoint is read back
by whoever compares. Nothing here knows what an axis is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braid import checkpoint
from braid.config import Run
from braid.distributed.collectives import Group
from braid.distributed.groups import open_groups
from braid.model.context import Context
from braid.nn.moe.replay import Recording
from braid.optim.adamw import AdamW
from braid.planning import divisibility
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_optimizer, make_outside_state, make_state
from braid.train.data_pipeline import DataPipeline, open_data_pipeline
from braid.train.device import choose_device
from braid.train.module_state import ModuleState
from braid.train.state import JobState, State
from braid.train.step import evaluate, train_step
from braid.train.step_work import WITHOUT_ROOM

Parts = dict[str, tuple[tuple[int, ...], Tensor]]
"""By canonical name: where a rank's part begins, and the part."""

Shapes = Mapping[str, torch.Size]
"""Of whole canonical tensors."""


class Routes:
    """Where routers write down what they decide, or read what they repeat: training and evaluation apart,
    because both count samples from 0."""

    def __init__(self) -> None:
        self.recordings = {True: Recording(), False: Recording()}

    def of(self, context: Context) -> Recording:
        return self.recordings[context.batch.training]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run, and what is to be done besides."""

    run: Run
    checkpoints: Path | None = None
    """Where to save the state after the last step."""
    sgd: bool = False
    """Whether plain gradient descent takes the place of AdamW."""
    record: bool = False
    """Whether routing is written down."""
    replay: Routes | None = None
    """Routing to repeat."""


@dataclass(kw_only=True)
class Told:
    """What one rank has to say."""

    figures: list[dict[str, float]] = field(default_factory=list)
    """Of every step: its loss, all other metrics, and the length of its gradient."""
    val_loss: float = 0.0
    gradients: Parts = field(default_factory=dict)
    """Of the first step, over all ranks, as they were before clipping."""
    weights: Parts = field(default_factory=dict)
    """After the last step; selection biases as well."""
    routes: Routes | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run on all its ranks, as one process would tell it."""

    figures: list[dict[str, float]]
    val_loss: float
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    saved: Mapping[str, Tensor]
    """Every tensor of the checkpoint; empty where none was saved."""
    quarrels: list[str]
    """Where ranks that should say the same say different things, and what none of them says."""
    routes: Routes | None

    @property
    def shapes(self) -> Shapes:
        return {name: value.shape for name, value in self.weights.items()}


class Watched(AdamW):
    """AdamW, or plain gradient descent in its place, that keeps a copy of the first gradient it is given."""

    first: dict[str, Tensor] | None = None
    sgd = False

    def update(self, rate: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        if scale is not None:
            for gradient in self.gradients().values():
                gradient.mul_(scale)
        if self.first is None:
            self.first = {name: gradient.clone() for name, gradient in self.gradients().items()}
        if not self.sgd:
            return super().update(rate, skip=skip)
        with torch.no_grad():
            for name, gradient in self.gradients().items():
                self.main[name].sub_(gradient, alpha=rate)
        self.copy_to_model()
        self.zero_grad()


# ------------------------------------------------------------------------------------------ on a rank


def train_each(rank: int, world: int, tasks: Sequence[Task]) -> list[Told]:
    """Every task in turn, on the same ranks."""
    return [train(rank, world, task) for task in tasks]


def train(rank: int, world: int, task: Task) -> Told:
    """Train from the run's seed, and tell what came of it."""
    try:
        return trained(*started(rank, world, task.run), task)
    except Exception as error:
        error.add_note(f"on {world} ranks: {task.run.model.pattern}, {task.run.mesh}")
        raise


def started(rank: int, world: int, run: Run) -> tuple[JobState, DataPipeline]:
    """This rank's state at the beginning of the run, and the run's data."""
    worked_out, device = plan(run, world), choose_device("cpu")
    handle = dist.group.WORLD if world > 1 else None
    job = Group(name="everyone", size=world, rank=rank, handle=handle)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    # Groups stay open until the rank ends: torch remembers meshes, and meets one of an earlier run again.
    groups = open_groups(worked_out.grid, rank, tp_runs=runs)
    state: JobState
    if rank in worked_out.grid.ranks:
        state = make_state(worked_out, device, groups, job=job)
    else:
        state = make_outside_state(worked_out, device, job)
    for name, module in state.modules.items():
        module.optimizer = make_optimizer(worked_out, module.model, Watched, name)
    states.initialize(state, run)
    return state, open_data_pipeline(run, Path(run.data.sources[0]).parent)


def trained(state: JobState, feed: DataPipeline, task: Task) -> Told:
    """All steps, an evaluation, and a checkpoint where one is wanted."""
    run, routes = task.run, Routes()
    for module in state.modules.values():
        assert isinstance(module.optimizer, Watched)
        module.optimizer.sgd = task.sgd
    if isinstance(state, State):
        watch_routing(state, record=routes if task.record else None, replay=task.replay)
    told = Told(routes=routes if task.record else None)
    for _ in range(run.train.steps):
        result = train_step(state, run, feed.train, run.optim.lr)
        figures = {name: value for name, value in result.metrics.items() if not _of_ranks(name)}
        told.figures.append({**figures, "gradient norm": result.grad_norm})
    assert feed.validation is not None
    told.val_loss = evaluate(state, run, feed.validation)
    for module in state.modules.values():
        assert isinstance(module.optimizer, Watched)
        told.gradients |= parts(module, module.optimizer.first or {})
        told.weights |= parts(module, module.weights())
    longest = run.optim.clip
    clipped = max(1.0, told.figures[0]["gradient norm"] / longest) if longest else 1.0  # 0 does not clip
    for _, gradient in told.gradients.values():
        gradient.mul_(clipped)
    if task.checkpoints is not None:
        states.save(task.checkpoints, state, run, feed.train, feed.tokenizer)
    return told


def _of_ranks(metric: str) -> bool:
    """Whether a metric is about the topology, and not about the answer: how full lanes are, and what found no
    room on the host."""
    return metric.endswith((".fullest_lane", WITHOUT_ROOM))


def watch_routing(state: State, *, record: Routes | None, replay: Routes | None) -> None:
    """Give every micro-batch a recording to write, or one to repeat."""
    prepare = state.model.prepare

    def prepared(*given: Any, **named: Any) -> Context:
        context = prepare(*given, **named)
        context.recording = None if record is None else record.of(context)
        context.replay = None if replay is None else replay.of(context)
        return context

    if record is not None or replay is not None:
        state.model.prepare = prepared  # type: ignore[method-assign]


def parts(module: ModuleState, holders: Mapping[str, Tensor]) -> Parts:
    """This rank's part of every canonical tensor of a module that has a holder."""
    told: Parts = {}
    for name, tensor in module.model.canonical().items():
        if tensor.parameter in holders:
            held = tensor.within(module.kept[tensor.parameter].shard)
            if not held.empty:
                told[module.prefix + name] = (
                    held.offset,
                    held.read(holders[tensor.parameter].detach()).clone(),
                )
    return told


# -------------------------------------------------------------------------------------- put together


def alone(task: Task) -> Outcome:
    """The task in this process: the reference. What it tells are whole tensors."""
    told = train(0, 1, task)
    return outcome([told], {name: value.shape for name, (_, value) in told.weights.items()}, task)


def outcome(told: Sequence[Told], shapes: Shapes, task: Task) -> Outcome:
    """What all ranks said, as one."""
    first = told[0]
    gradients, no_gradients = whole([each.gradients for each in told], shapes)
    weights, no_weights = whole([each.weights for each in told], shapes)
    figures = [
        f"rank {rank} has other figures than rank 0"
        for rank, each in enumerate(told)
        if (each.figures, each.val_loss) != (first.figures, first.val_loss)
    ]
    return Outcome(
        figures=first.figures,
        val_loss=first.val_loss,
        gradients=gradients,
        weights=weights,
        saved={} if task.checkpoints is None else read_whole(task.checkpoints),
        quarrels=[*figures, *no_gradients, *no_weights],
        routes=first.routes,
    )


def whole(told: Sequence[Parts], shapes: Shapes) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors put together from what ranks hold, and what is wrong with them: copies agree to the last bit,
    and nothing is missing."""
    joined: dict[str, Tensor] = {}
    wrong = []
    for rank, each in enumerate(told):
        for name, (offset, value) in each.items():
            if name not in joined:
                joined[name] = torch.full(shapes[name], torch.nan, dtype=value.dtype)
            place = tuple(slice(o, o + n) for o, n in zip(offset, value.shape, strict=True))
            there = joined[name][place]
            known = ~there.isnan()
            if not torch.equal(there[known], value[known]):
                wrong.append(f"rank {rank} has another copy of {name}")
            there.copy_(value)
    wrong += [f"nobody has all of {name}" for name, value in joined.items() if value.isnan().any()]
    return joined, wrong


def read_whole(root: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, verified."""
    path = checkpoint.latest(root).path
    assert path is not None, f"{root} has no whole checkpoint"
    stored = checkpoint.read_manifest(path).tensors
    like: dict[str, checkpoint.ReadRequest | Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()
    }
    return checkpoint.read(path, like)
