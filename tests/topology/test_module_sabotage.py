"""The comparison of placements can fail: whatever is broken between modules turns it red. Without anything
broken, the same runs are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from braid.prove.compare import FP64_BOUND, deviations, red, told
from braid.prove.outcome import Outcome, Task, Told, alone, outcome, train
from tests.ranks import run_ranks
from tests.topology.module_cases import VISION, multimodal
from tests.topology.module_sabotages import MODULE_SABOTAGES

pytestmark = pytest.mark.costly("every sabotage is a training of its own")

STEP = {"samples": 8, "micro_batches": 2, "steps": 1}
"""The smallest step that shows them all: four samples in a micro-batch."""


def both_ways(rank: int, world: int, named: Sequence[tuple[str, Task, Task]]) -> list[tuple[Told, Told]]:
    """Sound, then broken."""
    both = []
    for name, sound, broken in named:
        first = train(rank, world, sound)
        with MODULE_SABOTAGES[name].broken():
            both.append((first, train(rank, world, broken)))
    return both


@pytest.mark.long
def test_every_sabotage_between_modules_is_seen(corpus: Path, tmp_path: Path) -> None:
    run = multimodal("tied", corpus, {"vision": VISION}, **STEP)
    named = []
    for number, (name, sabotage) in enumerate(MODULE_SABOTAGES.items()):
        placed = sabotage.placement.of(sabotage.of(run))
        sound, broken = (
            Task(run=placed, checkpoints=tmp_path / f"{kind}{number}") for kind in ("sound", "broken")
        )
        named.append((name, sound, broken))
    ranks = run_ranks(2, both_ways, named, timeout_s=300)
    wrong = []
    for number, (name, sound, broken) in enumerate(named):
        sabotage = MODULE_SABOTAGES[name]
        one = Task(run=sabotage.of(run), checkpoints=tmp_path / f"one{number}")
        expected = alone(one)
        found = outcome([rank[number][0] for rank in ranks], expected.shapes, sound)
        if differs := red(deviations(found, expected), FP64_BOUND):
            wrong.append(f"{name}: sound, and seen by {told(differs)}")
        again = Task(run=one.run, checkpoints=tmp_path / f"again{number}")
        with sabotage.broken() if sabotage.alone_too else nullcontext():
            against: Outcome = alone(again) if sabotage.alone_too else expected
        found = outcome([rank[number][1] for rank in ranks], expected.shapes, broken)
        seen = red(deviations(found, against), FP64_BOUND)
        if sabotage.seen_by not in seen:
            wrong.append(f"{name}: expected {sabotage.seen_by}, seen by {list(seen)}")
    assert not wrong, "\n".join(wrong)
