"""What goes wrong with a module on one rank goes wrong on all ranks of the job alike, before anybody waits for
it; and what a run with modules opens, it closes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid.config import Run
from braid.data import Loader
from braid.data.items import ItemSource, Patches
from braid.errors import DataError
from braid.planning.plan import plan
from braid.prove.outcome import started
from braid.train.step import evaluate, train_step
from braid.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE
from tests.topology.module_cases import VISION, Placement, multimodal

STEP = {"samples": 8, "micro_batches": 2}

PARTLY = Placement(world=3, language="at0+2 pp2", modules={"vision": "at1+2"})
BESIDE = Placement(world=2, language="at0+1", modules={"vision": "at1+1"})


@dataclass(frozen=True)
class SpoiledLoader:
    """A loader with other items."""

    loader: Loader
    spoil: Callable[[ItemSource], ItemSource]

    @property
    def items(self) -> Mapping[str, ItemSource]:
        return {name: self.spoil(source) for name, source in self.loader.items.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@dataclass(frozen=True)
class Items:
    """Items as they are; what spoils them changes a method."""

    source: ItemSource

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        return self.source.sizes(samples)

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        return self.source.read(wanted)


class LargerItems(Items):
    """The last item of sample 5 has a row more than its text has placeholders for."""

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        sizes = self.source.sizes(samples)
        return [
            (*each[:-1], sum(each[-1:]) + VISION.group) if sample == 5 else each
            for sample, each in zip(samples, sizes, strict=True)
        ]


class UnreadableItems(Items):
    """Where they lie, nothing can be read."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        raise DataError(f"item {wanted[0][1]} of sample {wanted[0][0]}: its file is gone")


class LostItems(Items):
    """Their archive is damaged, and the source has not thought of that."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        raise BadZipFile("no photo.png")


class TurnedItems(Items):
    """Their patches do not lie as there are of them."""

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        patches_NI, grids = self.source.read(wanted)
        return Patches(patches_NI, [(rows + 1, columns) for rows, columns in grids])


class UnsizedItems(Items):
    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        raise DataError(f"the items of sample {samples[0]} are not listed")


class UnlistedItems(Items):
    """Nor has it thought of that."""

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        raise FileNotFoundError("no file list.json")


SPOILED: Sequence[tuple[type[Items], int | None]] = (
    (LargerItems, None),
    (UnreadableItems, 1),
    (LostItems, 1),
    (TurnedItems, 1),
    (UnsizedItems, 0),
    (UnlistedItems, 0),
)
"""What is wrong, and the rank that sees it; None for all."""


def refused(rank: int, world: int, run: Run) -> list[str]:
    """What a step and an evaluation say about spoiled items; a sound step follows."""
    state, feed = started(rank, world, run)
    said = []
    for kind, on in SPOILED:
        spoil = kind if on in (None, rank) else Items
        for act in (
            lambda spoil=spoil: train_step(state, run, SpoiledLoader(feed.train, spoil), LEARNING_RATE),
            lambda spoil=spoil: evaluate(state, run, SpoiledLoader(feed.validation, spoil)),
        ):
            with pytest.raises(DataError) as caught:
                act()
            said.append(str(caught.value))
    assert train_step(state, run, feed.train, LEARNING_RATE).not_finite == ()
    return said


@pytest.mark.parametrize("placement", [BESIDE, pytest.param(PARTLY, marks=pytest.mark.long)], ids=str)
def test_items_that_do_not_fit_or_cannot_be_read_are_refused_on_all_ranks_alike(placement, corpus):
    run = multimodal("tied", corpus, {"vision": VISION}, **STEP)
    run = replace(run, train=replace(run.train, eval_samples=8))
    first, *others = run_ranks(placement.world, refused, placement.of(run), timeout_s=60)
    assert all(other == first for other in others)
    for larger in first[:2]:
        assert re.search(r"\n  sample 5, item \d: \d+ are left for its \d+ rows; 'vision' needs one", larger)
    for unreadable in first[2:4]:
        assert unreadable.startswith("rank 1: item ")
        assert unreadable.endswith("its file is gone")
    for lost in first[4:6]:
        assert lost.startswith("rank 1: items of 'vision' in samples ")
        assert lost.endswith("cannot be read: BadZipFile: no photo.png")
    for turned in first[6:8]:
        assert re.search(r"rank 1: item \d of sample \d+ has (\d) patches, but is said to be 2 x \1", turned)
    for unsized in first[8:10]:
        assert unsized == "rank 0: the items of sample 0 are not listed"
    for unlisted in first[10:]:
        assert unlisted.startswith("rank 0: items of 'vision' in samples 0 to ")
        assert unlisted.endswith("cannot be read: FileNotFoundError: no file list.json")


def infinite(rank: int, world: int, run: Run) -> tuple[tuple[str, ...], int, bool, bool]:
    """A step in which the last rank's gradient of its last encoder weight is infinite, and a sound one."""
    state, feed = started(rank, world, run)

    def weights() -> dict[str, Tensor]:
        held = (each.weights().items() for each in state.modules.values())
        return {f"{place}.{name}": weight.clone() for place, each in enumerate(held) for name, weight in each}

    before = weights()
    if rank == world - 1:
        [*state.modules["vision"].optimizer.gradients().values()][-1].flatten()[-1] = torch.inf
    result = train_step(state, run, feed.train, LEARNING_RATE)
    skipped, after = state.skipped_in_a_row, weights()
    kept = all(torch.equal(weight, before[name]) for name, weight in after.items())
    train_step(state, run, feed.train, LEARNING_RATE)
    moved = all(not torch.equal(weight, before[name]) for name, weight in weights().items())
    return result.not_finite, skipped, kept, moved


@pytest.mark.parametrize("placement", [BESIDE, pytest.param(PARTLY, marks=pytest.mark.long)], ids=str)
def test_a_step_that_one_encoder_rank_cannot_do_is_skipped_by_all(placement, corpus):
    run = placement.of(multimodal("tied", corpus, {"vision": VISION}, **STEP))
    (told,) = set(run_ranks(placement.world, infinite, run))
    names, skipped, kept, moved = told
    assert len(names) == 1
    assert names[0].startswith("modules.vision.projector.")
    assert (skipped, kept, moved) == (1, True, True)


def communicators(rank: int, world: int, runs: Sequence[Run], out: Path) -> list[tuple[int, int, int]]:
    """How many are open before, during and after each run."""
    opened, counts = dist.distributed_c10d._world.pg_map, []
    for number, run in enumerate(runs):
        before = len(opened)
        with Trainer(plan(run, world), out=out / str(number), device="cpu", quiet=True) as trainer:
            trainer.step()
            during = len(opened)
        counts.append((before, during, len(opened)))
    return counts


@pytest.mark.long
def test_a_run_with_modules_closes_every_communicator_that_it_opened(corpus, tmp_path):
    run = multimodal("tied", corpus, {"vision": VISION}, **STEP)
    placements = [
        PARTLY,
        Placement(world=3, language="at0+2 tp2", modules={"vision": "at2+1"}),
        Placement(world=3, language="at0+1", modules={"vision": "at0+3"}),
        PARTLY,
    ]
    runs = [placement.of(run) for placement in placements]
    for counts in run_ranks(3, communicators, runs, tmp_path, timeout_s=120):
        for before, during, after in counts:
            assert before == after < during
