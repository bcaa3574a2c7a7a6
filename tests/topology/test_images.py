"""Images of the data, on ranks: training is that of one process, and what is wrong with a file is said by all
ranks alike."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from braid.config import Run
from braid.data import ByteTokenizer, build
from braid.data.order import shuffled
from braid.encoders import Pixels
from braid.errors import DataError
from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Task, alone, outcome, started, train_each
from braid.train.data_pipeline import open_data_pipeline
from braid.train.item_prefetch import ItemPrefetch
from braid.train.step import begin_step, evaluate, train_step
from tests.data.pictures import encoded, noise, png, write_rows
from tests.data.test_images import bomb, jpeg_of_size
from tests.oracles import remembered, shared_folder
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE
from tests.topology.module_cases import VISION, Placement, multimodal

STEP = {"samples": 4, "micro_batches": 2}
PIXELS = Pixels(patch=2, frames=2)
SEEING = replace(VISION, input=PIXELS.input, group=4, pixels=PIXELS)

BESIDE = Placement(world=2, language="at0+1", modules={"vision": "at1+1"})
LONG = (
    BESIDE,
    Placement(world=4, language="tp2 cp2", modules={"vision": "tp2 pp2"}),
    Placement(world=4, language="pp2", modules={"vision": "at1+3"}),
)
PARTLY = Placement(world=3, language="at0+2", modules={"vision": "at1+2"})


def make_rows(folder: Path) -> Path:
    """Documents with none to two images of different sizes, some videos, some text alone."""
    chosen = np.random.default_rng(0)
    files, rows = {}, []
    for number in range(60):
        content: list[dict[str, object]] = [{"text": "ab"[: number % 3]}]
        for place in range(number % 3):
            height, width = chosen.integers(1, 14, 2).tolist()
            files[f"{number}-{place}.png"] = png(height, width, seed=number)
            path = f"{number}-{place}.png"
            content.append({"video": [path] * 3} if number % 5 == 2 and place == 0 else {"image": path})
            content.append({"text": "cde"[place:]})
        rows.append({"content": content} if number % 3 else {"text": "plain text"})
    build(write_rows(folder / "in", files, rows), folder / "out", ByteTokenizer(), validation=0.2)
    return folder / "out"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory) / "pictures"
    return remembered(folder.parent, "pictures", partial(make_rows, folder))


def seeing(model: str, source: Path) -> Run:
    """A model with an encoder of the images of a source."""
    run = multimodal(model, source, {"vision": SEEING}, **STEP)
    vision = replace(run.modules["vision"], items="image", most_items=3, most_patches=32)
    return replace(run, modules={"vision": vision}, data=replace(run.data, sequence_tokens=24))


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("tied", Placement(world=3, language="at0+2 cp2", modules={"vision": "at1+2"})),
        *(pytest.param("hybrid", each, marks=pytest.mark.long) for each in LONG),
    ],
    ids=str,
)
def test_images_train_alike_on_ranks_and_in_one_process(model, placement, pictures, tmp_path):
    """`tied` packs whole documents, `hybrid` cuts the stream of all of them."""
    run = seeing(model, pictures)
    sound = alone(Task(run=run, checkpoints=tmp_path / "one"))
    assert min(step["vision.rows"] for step in sound.figures) > 4
    assert all(float(gradient.norm()) > 0 for name, gradient in sound.gradients.items() if "modules." in name)
    task = Task(run=placement.of(run), checkpoints=tmp_path / "ranks")
    ranks = run_ranks(placement.world, train_each, [task], timeout_s=180)
    checks = deviations(outcome([each for (each,) in ranks], sound.shapes, task), sound)
    assert not red(checks, FP64_BOUND), told(red(checks, FP64_BOUND))


# --------------------------------------------------------------------------------------------- damage


def lose_media(source: Path) -> None:
    (source / "00000.media").unlink()


def spoil_media(source: Path) -> None:
    content = (source / "00000.media").read_bytes()
    (source / "00000.media").write_bytes(bytes(len(content)))


def mark_text(source: Path) -> None:
    """Every token becomes a marker: placeholders too many."""
    with (source / "00000.tokens").open("r+b") as file:  # in place: readers have mapped it
        tokens = np.full((source / "00000.tokens").stat().st_size // 2, 257, "<u2")
        file.write(tokens.tobytes())


DAMAGE: tuple[tuple[Callable[[Path], None], str], ...] = (
    (
        lose_media,
        r"sample \d+, item \d+ \(pictures \d+ to \d+ of .*00000\.media\): .*cannot be read",
    ),
    (spoil_media, r"sample \d+, item \d+ \(.*\): .*00000\.media is damaged: its bytes"),
    (mark_text, r"sample \d+: .*00000\.tokens is damaged: .*mark images or videos"),
)


def damaged(rank: int, world: int, run: Run, folder: Path) -> list[str]:
    """What a step and an evaluation say once files are damaged that a run has opened; then they are whole, and
    so is a step."""
    state, feed = started(rank, world, run)
    said = []
    for damage, _ in DAMAGE:
        dist.barrier()
        if rank == 0:
            for split in ("train", "validation"):
                damage(folder / "data" / split)
        dist.barrier()
        for act in (
            lambda: train_step(state, run, feed.train, LEARNING_RATE),
            lambda: evaluate(state, run, feed.validation),
        ):
            with pytest.raises(DataError) as caught:
                act()
            said.append(str(caught.value))
        dist.barrier()
        if rank == 0:
            for split in ("train", "validation"):
                for file in (folder / "whole" / split).iterdir():
                    place = folder / "data" / split / file.name
                    with place.open("r+b" if place.exists() else "wb") as written:
                        written.write(file.read_bytes())
        dist.barrier()
    assert train_step(state, run, feed.train, LEARNING_RATE).not_finite == ()
    return said


@pytest.mark.parametrize("placement", [BESIDE, pytest.param(PARTLY, marks=pytest.mark.long)], ids=str)
def test_damaged_files_are_an_error_of_all_ranks_alike(placement, pictures, tmp_path):
    for name in ("data", "whole"):
        shutil.copytree(pictures, tmp_path / name)
    run = seeing("tied", tmp_path / "data")
    run = placement.of(replace(run, train=replace(run.train, eval_samples=8)))
    first, *others = run_ranks(placement.world, damaged, run, tmp_path, timeout_s=60)
    assert all(other == first for other in others)
    for place, message in enumerate(first):
        assert re.search(DAMAGE[place // 2][1], message), message


# ------------------------------------------------------------------------------- files that are no images

UNUSABLE: Mapping[str, tuple[Callable[[], bytes], str]] = MappingProxyType(
    {
        "cut.jpg": (lambda: encoded(noise(20, 20), "JPEG")[:-60], "cannot be decoded: .*truncated"),
        "cut.png": (lambda: png(20, 20)[:-30], "is truncated: its last chunk is missing"),
        "none.png": (lambda: bomb(0, 0), "is 0 x 0 pixels: an image has at least one"),
        "huge.png": (
            lambda: bomb(60_000, 60_000),
            "is 60,000 x 60,000 pixels: an image may have 67,108,864 in all",
        ),
        "huge.jpg": (lambda: jpeg_of_size(60_000, 60_000), "is 60,000 x 60,000 pixels"),
        "print.jpg": (lambda: encoded(Image.new("CMYK", (8, 8)), "JPEG"), "has CMYK pixels"),
        "text.png": (lambda: b"not an image", "is neither PNG nor JPEG"),
    }
)
"""`braid data build` refuses them (tests/data/test_media.py); a source that something else wrote may have
them."""

BAD = 5
"""The sample that has one, in the second step."""


def unusable_source(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with such a file, all of whose checksums are right."""
    monkeypatch.setattr(import_module("braid.data.documents"), "checked_size", lambda _: (8, 8))
    visits = shuffled(np.arange(12), 12, seed=0).tolist()
    rows: list[dict[str, object]] = [{} for _ in visits]
    for sample, place in enumerate(visits):
        image = file if sample == BAD else "good.png"
        rows[place] = {"content": [{"image": image}, {"text": "long enough text"}]}
    files = {"good.png": png(8, 8), file: UNUSABLE[file][0]()}
    build(write_rows(folder / "in", files, rows), folder / "out", ByteTokenizer())
    return folder / "out"


def stopped(rank: int, world: int, runs: Sequence[Run]) -> list[tuple[str, int]]:
    """What a step says about the sources of these runs, of which the step before it has read the items ahead;
    and how many samples are consumed."""
    state, _ = started(rank, world, runs[0])
    said = []
    for run in runs:
        feed = open_data_pipeline(run, Path(run.data.sources[0]).parent)
        state.step, state.samples = 0, 0
        with ItemPrefetch() as prefetch:
            step = partial(begin_step, state, run, feed.train, LEARNING_RATE, prefetch=prefetch)
            assert step().result().not_finite == ()
            with pytest.raises(DataError) as caught:
                step()
            said.append((str(caught.value), state.samples))
    return said


@pytest.mark.parametrize("placement", [BESIDE, pytest.param(PARTLY, marks=pytest.mark.long)], ids=str)
def test_files_that_are_no_images_are_an_error_of_all_ranks_alike(placement, tmp_path, monkeypatch):
    runs = []
    for file in UNUSABLE:
        run = seeing("tied", unusable_source(tmp_path / file, file, monkeypatch))
        runs.append(placement.of(replace(run, train=replace(run.train, eval_samples=0, steps=3))))
    first, *others = run_ranks(placement.world, stopped, runs, timeout_s=120)
    assert all(other == first for other in others)
    for (said, samples), (_, reason) in zip(first, UNUSABLE.values(), strict=True):
        where = rf"sample {BAD}, item 0 \(pictures \d+ to \d+ of .*00000\.media\)"
        assert re.fullmatch(rf"rank \d+: {where}: {reason}.*", said), said
        assert samples == STEP["samples"], "the step before it is whole"


def open_only(rank: int, world: int, run: Run) -> str:
    with pytest.raises(DataError) as caught:
        started(rank, world, run)
    return str(caught.value)


def test_a_source_that_is_not_whole_stops_every_rank_before_it_begins(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    index = tmp_path / "data" / "train" / "index.json"
    name = json.loads(index.read_text())["shards"][0]["media"]["media"]["name"]
    content = bytearray((tmp_path / "data" / "train" / name).read_bytes())
    content[7] ^= 1
    (tmp_path / "data" / "train" / name).write_bytes(content)
    (said,) = set(run_ranks(2, open_only, BESIDE.of(seeing("tied", tmp_path / "data"))))
    assert re.search(r"00000\.media is corrupt: its sha256", said)
