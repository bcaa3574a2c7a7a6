"""Items are read ahead in a thread, and nothing but time shows it: results, errors and resumed runs are those
of a run that reads them when it needs them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.data.image_items import ImageItems
from braid.data.items import Patches
from braid.encoders import Pixels
from braid.errors import DataError
from braid.planning.plan import plan
from braid.topology.items import ItemTable
from braid.train.item_prefetch import ItemPrefetch, Lane, lane_items
from braid.train.trainer import Trainer
from tests.data.pictures import png, write_rows
from tests.topology.module_cases import VISION, multimodal

MICRO_BATCHES = [range(8, 12), range(12, 16)]


@dataclass(eq=False)
class Numbers:
    """Items whose patches say which sample and item they are of; what is asked for is written down."""

    seed: int = 3
    bad: int = -1
    """A sample whose items cannot be read."""
    reads: list[tuple[str, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    """By which thread, and what."""
    input = 1
    identity = MappingProxyType[str, str]({})

    def sizes(self, samples: Sequence[int]) -> list[tuple[int, ...]]:
        chosen = [random.Random(f"{self.seed} {sample}") for sample in samples]
        return [tuple(each.randint(1, 5) for _ in range(each.randint(0, 3))) for each in chosen]

    def read(self, wanted: Sequence[tuple[int, int]]) -> Patches:
        self.reads.append((threading.current_thread().name, tuple(wanted)))
        assert wanted, "nobody asks for nothing"
        if any(sample == self.bad for sample, _ in wanted):
            raise DataError(f"sample {self.bad} is unreadable")
        numbers = [[100.0 * sample + item] for sample, item in wanted]
        return Patches(torch.tensor(numbers), [(1, 1)] * len(wanted))


def wanted_by(source: Numbers, samples: Sequence[int], lane: int, lanes: int) -> list[tuple[int, int]]:
    """As a step finds it, from the table that ranks have summed up."""
    sizes = source.sizes(samples)
    table = ItemTable(
        counts=tuple(map(len, sizes)),
        rows=tuple(patches for each in sizes for patches in each),
        patches=tuple(patches for each in sizes for patches in each),
        slices=2,
        placeholders=(1,) * 2 * len(sizes),
    )
    return list(lane_items(table, samples, table.items_of_lane(lane, lanes)))


def begun(prefetch: ItemPrefetch, source: Numbers, lane: int, lanes: int) -> None:
    prefetch.begin({"vision": Lane(source, lane, lanes)}, MICRO_BATCHES)


@pytest.mark.parametrize("lanes", [1, 2, 3, 20])
def test_every_lane_gets_what_it_would_have_read(lanes):
    for lane in range(lanes):
        source = Numbers()
        with ItemPrefetch() as prefetch:
            begun(prefetch, source, lane, lanes)
            for samples in MICRO_BATCHES:
                wanted = wanted_by(source, samples, lane, lanes)
                if wanted:
                    found = prefetch.take("vision", source, samples, wanted)
                    assert found.patches_NI[:, 0].tolist() == [100.0 * s + i for s, i in wanted]
        assert all(name.startswith("items") for name, _ in source.reads), "in the thread alone"
        assert len(source.reads) == sum(bool(wanted_by(source, each, lane, lanes)) for each in MICRO_BATCHES)


def test_what_was_not_read_ahead_is_read_now():
    """Another module, other samples, other items, another source: never what was read for something else."""
    source, other = Numbers(), Numbers(seed=1)
    samples = MICRO_BATCHES[0]
    wanted = wanted_by(source, samples, 0, 1)
    fewer = wanted[1:]
    with ItemPrefetch() as prefetch:
        for name, asked, of, among in (
            ("audio", wanted, source, samples),
            ("vision", wanted, source, range(100)),
            ("vision", fewer, source, samples),
            ("vision", wanted, other, samples),
        ):
            begun(prefetch, source, 0, 1)
            assert len(prefetch.take(name, of, among, asked).patches_NI) == len(asked)
            assert (threading.current_thread().name, tuple(asked)) in of.reads


def test_what_failed_ahead_fails_when_it_is_asked_for_and_not_before():
    source = Numbers(bad=13)
    with ItemPrefetch() as prefetch:
        begun(prefetch, source, 0, 1)
        good, bad = MICRO_BATCHES
        assert 13 in {sample for sample, _ in wanted_by(source, bad, 0, 1)}
        prefetch.take("vision", source, good, wanted_by(source, good, 0, 1))
        with pytest.raises(DataError, match="sample 13 is unreadable"):
            prefetch.take("vision", source, bad, wanted_by(source, bad, 0, 1))
        assert threading.current_thread().name in {name for name, _ in source.reads}
        source.bad = -1  # repaired in the meantime
        begun(prefetch, source, 0, 1)
        prefetch.take("vision", source, bad, wanted_by(source, bad, 0, 1))


def test_the_thread_ends():
    before = threading.active_count()
    with ItemPrefetch() as prefetch:
        begun(prefetch, Numbers(), 0, 1)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------------- in a run


STEPS = 3


@pytest.fixture
def seeing(tmp_path: Path) -> Run:
    """A run with an image in every sample, and made-up items."""
    files = {f"{number}.png": png(4 + number % 5, 4 + number % 3, seed=number) for number in range(12)}
    rows = [{"content": [{"image": f"{n % 12}.png"}, {"text": f"picture {n}"}]} for n in range(60)]
    build(write_rows(tmp_path / "in", files, rows), tmp_path / "data", ByteTokenizer())
    run = multimodal("tied", tmp_path / "data", {"vision": VISION, "audio": VISION}, samples=4, steps=STEPS)
    shape = replace(run.modules["vision"].model, input=12, group=4, pixels=Pixels(patch=2))
    vision = replace(run.modules["vision"], model=shape, most_patches=16, items="image")
    return replace(
        run,
        modules={**run.modules, "vision": vision},
        data=replace(run.data, sequence_tokens=32),
        optim=replace(run.optim, warmup_steps=1),
    )


def trained(run: Run, out: Path, steps: Sequence[int] = (STEPS,)) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of all steps, and the weights at the end. After each of these numbers of steps the run is
    closed, and resumed."""
    losses: list[float] = []
    for until in steps:
        with Trainer(plan(run, 1), out=out, device="cpu", quiet=True) as trainer:
            assert trainer.step_number == len(losses)
            losses += [trainer.step().loss for _ in range(until - len(losses))]
            trainer.save()
            modules = trainer.state.modules.items()
            held = {f"{at}.{name}": each for at, module in modules for name, each in module.weights().items()}
    return losses, {name: weight.clone() for name, weight in held.items()}


def test_a_run_is_the_same_without_and_across_a_resume(seeing, tmp_path, monkeypatch):
    reads: list[tuple[str, int, int]] = []
    read, begin = ImageItems.read, ItemPrefetch.begin

    def written_down(self: ImageItems, wanted: Sequence[tuple[int, int]]) -> Patches:
        reads.extend((threading.current_thread().name[:5], *each) for each in wanted)
        return read(self, wanted)

    monkeypatch.setattr(ImageItems, "read", written_down)
    ahead = trained(seeing, tmp_path / "ahead")
    first = {sample for name, sample, _ in reads if name != "items"}
    later = {sample for name, sample, _ in reads if name == "items"}
    assert first <= set(range(4)), "the first step has nobody before it"
    assert first | later == set(range(4 * STEPS)), "and nothing is read that no step wants"
    assert len(reads) == len(set(reads))
    again = trained(seeing, tmp_path / "again", (2, STEPS))
    monkeypatch.setattr(ItemPrefetch, "begin", lambda self, lanes, samples: begin(self, {}, samples))
    reads.clear()
    direct = trained(seeing, tmp_path / "direct")
    assert {name for name, *_ in reads} == {threading.current_thread().name[:5]}
    for losses, weights in (again, direct):
        assert losses == ahead[0]
        assert all(torch.equal(weight, ahead[1][name]) for name, weight in weights.items())


def test_a_damaged_image_stops_the_step_that_reads_it(seeing, tmp_path):
    """The steps before it are done, though it was met while they ran."""
    with Trainer(plan(seeing, 1), out=tmp_path / "run", device="cpu", quiet=True) as trainer:
        (stream,) = (each.source for each in trainer.data.train.samples)
        placed = trainer.data.train.items["vision"].place(range(4, 8))
        stored = stream.stored_item(placed[0][0].number)
        at = int(stored.media.records_P[stored.pictures[0]]["start"])
        with stored.media.file.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        assert trainer.step().not_finite == ()
        for _ in range(2):
            with pytest.raises(DataError, match=r"sample 4, item 0 \(pictures .*00000\.media\): .*is damaged"):
                trainer.step()
        assert trainer.step_number == 1
        with stored.media.file.open("r+b") as file:
            file.seek(at)
            file.write(b"\x89")  # the first byte of a PNG
        assert trainer.step().not_finite == ()
