"""Vision-language models on ranks are what they are in one process: colocated, apart and partly overlapping,
with images in every sample, on one lane or in none, and whatever is frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from braid.prove.compare import FP64_BOUND, deviations, red, told, without_gradient
from braid.prove.outcome import Outcome, Task, alone, outcome, started, train_each
from tests.covers import cover
from tests.oracles import remembered, shared_folder
from tests.ranks import run_ranks
from tests.topology.report import add_placement
from tests.topology.vlm_cases import (
    NO_GRADIENT,
    Images,
    Point,
    build_images,
    choices_of,
    cost_of,
    every,
    larger,
    legal,
    run_of,
)

pytestmark = pytest.mark.costly("every pair of choices of a vision-language model is trained on ranks")

Reference = Callable[[Point], Outcome]

NAMED = (
    # Encoder and language model on the same eight ranks: dp 8, ep 4, edp 2.
    Point("together 8", "gpt", "plain", 1, "all", "nothing"),
    Point("together 8", "nemotron", "tiles", 4, "few", "nothing"),
    Point("together 8", "mamba", "plain", 1, "all", "nothing"),
    Point("together 8", "mamba", "radio", 1, "all", "nothing"),
    # Encoder on ranks 0 to 3, language model on 4 to 7 with dp 4, ep 2, edp 2; and the same on half of them.
    Point("apart 4+4", "mamba", "plain", 1, "all", "nothing"),
    Point("apart 4+4", "mamba", "plain", 4, "few", "nothing"),
    Point("apart 4+4", "mamba", "radio", 1, "few", "nothing"),
    Point("apart 4+4", "mamba", "radio", 4, "all", "nothing"),
    Point("apart 2+2", "mamba", "radio", 1, "all", "nothing"),
    Point("apart 2+2", "mamba", "radio", 4, "few", "nothing"),
    Point("overlap 8", "nemotron", "tiles", 4, "all", "nothing"),
    # tp 2, dp 4 and tp 4, dp 2 on either side, images of one size; those of several are in
    # test_module_placements.py.
    Point("fan out", "gpt", "radio", 4, "all", "nothing"),
    Point("fan in", "gpt", "radio", 1, "all", "nothing"),
)
"""What every release must be able to do, by name."""


def batches(points: Sequence[Point], most: int) -> list[tuple[Point, ...]]:
    """Points of one number of ranks together, so that ranks are started once for several."""
    found = list[tuple[Point, ...]]()
    alike = sorted(points, key=lambda point: (point.placement.world, point))
    for _, group in groupby(alike, key=lambda point: point.placement.world):
        members = [*group]
        found += [tuple(members[at : at + most]) for at in range(0, len(members), most)]
    return found


def named(points: tuple[Point, ...]) -> str:
    return f"{points[0]}+{len(points) - 1}"


QUICK = cover(every(), choices_of, cost=cost_of, legal=legal)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources with images, built once."""
    folder = shared_folder(tmp_path_factory) / "vlm"
    return remembered(folder.parent, "vlm", partial(build_images, folder))


@pytest.fixture(scope="session")
def reference(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one process makes of a point."""

    def computed(point: Point) -> Outcome:
        run = run_of(point, images)
        root = tmp_path_factory.mktemp("reference")
        made = partial(alone, Task(run=run, checkpoints=root))
        return remembered(shared_folder(tmp_path_factory), str(run), made)

    return computed


def compare(
    points: tuple[Point, ...], images: Path, folder: Path, reference: Reference, node: pytest.Item
) -> None:
    """Train points on the same ranks; fail with everything that is not as in one process."""
    tasks = [
        Task(run=point.placement.of(run_of(point, images)), checkpoints=folder / str(number))
        for number, point in enumerate(points)
    ]
    ranks = run_ranks(points[0].placement.world, train_each, tasks, timeout_s=300)
    wrong = []
    for number, (point, task) in enumerate(zip(points, tasks, strict=True)):
        sound = reference(point)
        check_gradients(point, sound)
        checks = deviations(outcome([rank[number] for rank in ranks], sound.shapes, task), sound)
        what = f"{point.micro_batches} micro-batches, images in {point.images}, {point.frozen} frozen"
        add_placement(node, f"{point.language}, {point.encoder}", point.placement, checks, what)
        if seen := red(checks, FP64_BOUND):
            wrong.append(f"{point}: {told(seen)}")
    assert not wrong, "\n".join(wrong)


def check_gradients(point: Point, sound: Outcome) -> None:
    """All that is trained has a gradient, all that is frozen has none, and selection biases have moved."""
    of_encoder = {name for name in sound.weights if name.startswith("modules.vision.")}
    projector = {name for name in of_encoder if name.startswith("modules.vision.projector.")}
    biases = {name for name in sound.weights if name.endswith("router.bias")}
    of_language = sound.weights.keys() - of_encoder - biases
    trained = {
        "nothing": of_language | of_encoder,
        "encoder": of_language,
        "language": of_encoder,
        "all but projector": projector,
    }[point.frozen]
    assert sound.gradients.keys() == trained
    silent = of_encoder if point.images == "none" else {n for n in of_encoder if n.endswith(NO_GRADIENT)}
    assert without_gradient(sound) == silent & trained
    moved = {name for name in biases if float(sound.weights[name].abs().max()) > 0}
    assert moved == (biases if point.frozen in ("nothing", "encoder") else set())
    assert len(biases) == (2 if point.language == "nemotron" else 0)


@pytest.mark.parametrize("points", batches(QUICK, most=5), ids=named)
def test_every_pair_of_choices(points, images, reference, tmp_path, request):
    compare(points, images, tmp_path, reference, request.node)


@pytest.mark.long
@pytest.mark.parametrize("points", batches(NAMED, most=4), ids=named)
def test_the_placements_that_are_asked_for_by_name(points, images, reference, tmp_path, request):
    compare(points, images, tmp_path, reference, request.node)


@pytest.mark.long
@pytest.mark.drawn("point", larger, 2, legal=legal)
def test_some_of_the_product(point, images, reference, tmp_path, request):
    compare((point,), images, tmp_path, reference, request.node)


@pytest.mark.exhaustive
@pytest.mark.drawn("point", larger, None, legal=legal)
def test_the_whole_product(point, images, reference, tmp_path, request):
    compare((point,), images, tmp_path, reference, request.node)


# ------------------------------------------------------------------------------------ what is compared


@pytest.mark.parametrize("encoder", ["plain", "radio", "tiles"])
def test_samples_have_the_images_that_a_point_says(encoder, images):
    """Else a comparison of text-only batches would compare something else."""

    def sizes(chosen: Images, samples: int) -> list[tuple[int, ...]]:
        point = Point("together 2", "gpt", encoder, 4, chosen, "nothing")
        _, feed = started(0, 1, run_of(point, images))
        assert feed.validation is not None
        assert [bool(each) for each in feed.validation.items["vision"].sizes(range(3))] == [True, False, True]
        return feed.train.items["vision"].sizes(range(samples))

    assert all(sizes("all", 72))
    assert [bool(each) for each in sizes("few", 72)] == [True, *[False] * 7] * 9
    assert not any(sizes("none", 64))
    grids = {each for sample in sizes("all", 72) for each in sample}
    assert len(grids) > 1 if encoder == "tiles" else len(grids) == 1


@pytest.mark.long
def test_every_pair_of_choices_is_legal():
    """Points are left out of covers and samples without a word if they are not."""
    points = [*cover(larger(), lambda point: point._asdict()), *NAMED]
    assert not [str(point) for point in points if not legal(point)]
