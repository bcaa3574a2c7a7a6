"""The peak of a step with an encoder, on every rank: estimated, and as tracked storage by storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Mesh, Module, Run, Train
from braid.data.items import Patches
from braid.distributed.collectives import Group
from braid.distributed.groups import opened_groups
from braid.encoders import Encoder, PositionTable, Projector
from braid.model.context import MicroBatch
from braid.optim.adamw import MOMENTS
from braid.optim.shards import local
from braid.planning import divisibility
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import state_context
from braid.train.counts import await_counts
from braid.train.device import choose_device
from braid.train.items import read_items
from braid.train.state import JobState, State
from braid.train.step import backward, count
from tests.model.cases import batch
from tests.planning.estimate.reality import Allocations
from tests.ranks import run_ranks

TOKENS, VOCAB, TOKEN = 256, 64, 63
ITEMS, PATCHES = 2, 256
"""Most items and most patches of a sample: all samples have that many."""


ENCODER = Encoder(
    pattern="[*-]" * 2,
    hidden=64,
    input=48,
    group=2,
    attention=Attention(heads=4, kv_heads=4, head_dim=16),
    mlp=Mlp(ffn=192, activation="gelu"),
    projector=Projector(width=64, ffn=96),
)
IMAGES = replace(
    ENCODER,
    norm="layer",
    positions=PositionTable(rows=20, columns=20, jitter=True),
    prefix=6,
    layer_scale=0.5,
    final_norm=False,
    group=4,
    attention=Attention(heads=4, kv_heads=4, head_dim=16, positions="none", bias=True),
    projector=Projector(width=64, ffn=96, norm="rms"),
)


def run_of(language: Mesh, vision: Mesh, dtype: Any, encoder: Encoder = ENCODER) -> Run:
    model = Model(
        pattern="[*-]" * 4,
        hidden=64,
        vocab=VOCAB,
        tied=False,
        attention=Attention(heads=8, kv_heads=2, head_dim=16, qk_norm=True),
        mlp=Mlp(ffn=256),
    )
    module = Module(model=encoder, token=TOKEN, most_items=ITEMS, most_patches=PATCHES, mesh=vision)
    return Run(
        model=model,
        data=Data(sequence_tokens=TOKENS, tokenizer="none.json"),
        train=Train(steps=1, batch_samples=8, micro_batches=4, dtype=dtype),
        mesh=language,
        modules={"vision": module},
    )


@dataclass(frozen=True)
class FullItems:
    """Items of noise, as large as they may be."""

    input: int

    @property
    def identity(self) -> Mapping[str, Any]:
        return {}

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        return [(PATCHES // ITEMS,) * ITEMS] * len(samples)

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        grid = (8, PATCHES // ITEMS // 8)
        return Patches(torch.randn(len(wanted) * prod(grid), self.input), [grid] * len(wanted))


def text(run: Run, rows: int, seed: int) -> MicroBatch:
    """Samples that begin with the placeholders of their items."""
    whole = batch([[run.data.sequence_tokens]] * rows, vocab=TOKEN, seed=seed)
    whole.tokens_BT[:, : run.modules["vision"].model.rows(PATCHES)] = TOKEN
    return whole


def peak_of(rank: int, world: int, run: Run) -> int:
    """The most bytes that are there at a time in a step, with weights and moments."""
    worked_out = plan(run, world)
    job = Group(name="everyone", size=world, rank=rank, handle=dist.group.WORLD)
    runs = divisibility.tp_runs(run.model, worked_out.layout.kinds(), worked_out.axes.tp)
    with (
        opened_groups(worked_out.grid, rank, tp_runs=runs) as groups,
        state_context(worked_out, choose_device("cpu"), groups, job) as state,
    ):
        states.initialize(state, run)
        return tracked_peak(state, run)


def tracked_peak(state: JobState, run: Run) -> int:
    size = state.plan.micro_batch_samples
    sources = {name: FullItems(module.model.input) for name, module in run.modules.items()}
    batches: list[MicroBatch] = []
    if isinstance(state, State):
        batches = [text(run, size // state.plan.axes.dp, seed) for seed in range(run.train.micro_batches)]
        counts = count(state, batches, sources)
    else:
        counts = await_counts(state, run.train.micro_batches)
    samples = [range(n * size, (n + 1) * size) for n in range(run.train.micro_batches)]
    items = read_items(state, counts.tables, sources, samples, step=1)
    held = {id(tensor): tensor for tensor in weights_and_moments(state)}
    inputs = [t for each in batches for t in (each.tokens_BT, each.labels_BT, each.documents_BT)]
    inputs += [each.patches_NI for packs in items.values() for each in packs]
    with Allocations([*held.values(), *inputs]) as tracked:
        backward(state, run, batches, counts, items=items)
        for module in state.modules.values():
            module.optimizer.update(1e-3)
    return tracked.peak + sum(tensor.nbytes for tensor in held.values())


def weights_and_moments(state: JobState) -> list[Tensor]:
    found: list[Tensor] = []
    for module in state.modules.values():
        optimizer = module.optimizer
        found += [local(parameter) for parameter in module.model.parameters()]
        found += [local(main) for main in optimizer.main.values()]
        found += [optimizer.moment(kind, name) for name in optimizer.main for kind in MOMENTS]
    return found


long = pytest.mark.long
PLACEMENTS = [
    pytest.param(2, Mesh(), Mesh(), "fp32", id="colocated"),
    pytest.param(3, Mesh(ranks=(0, 2), pp=2), Mesh(ranks=(2, 1)), "fp32", id="disjoint", marks=long),
    pytest.param(3, Mesh(ranks=(0, 2), pp=2), Mesh(ranks=(1, 2)), "bf16", id="partly", marks=long),
]


IMAGE_PLACEMENTS = [
    pytest.param(2, Mesh(), Mesh(tp=2), "fp32", id="colocated, tp"),
    pytest.param(3, Mesh(ranks=(0, 2), pp=2), Mesh(ranks=(2, 1)), "fp32", id="disjoint", marks=long),
    pytest.param(2, Mesh(), Mesh(cp=2), "bf16", id="colocated, cp", marks=long),
    pytest.param(2, Mesh(), Mesh(pp=2), "fp32", id="colocated, pp", marks=long),
]


@pytest.mark.parametrize(("world", "language", "vision", "dtype"), PLACEMENTS)
def test_the_peak_of_every_rank_is_within_a_tenth(world: int, language: Mesh, vision: Mesh, dtype: str) -> None:
    check(world, run_of(language, vision, dtype))


@pytest.mark.parametrize(("world", "language", "vision", "dtype"), IMAGE_PLACEMENTS)
def test_with_positions_and_prefix_tokens(world: int, language: Mesh, vision: Mesh, dtype: str) -> None:
    check(world, run_of(language, vision, dtype, IMAGES))


def check(world: int, run: Run) -> None:
    # Every op passes a dispatch mode that counts bytes, which is slow beside other work.
    measured = dict(enumerate(run_ranks(world, peak_of, run, timeout_s=240.0)))
    stations = estimate(plan(run, world), "cpu").stations
    assert {rank: each.memory.peak for each in stations for rank in each.ranks} == pytest.approx(
        measured, rel=0.1
    )
