"""What is advised where a run does not fit: the least change of each kind that would."""

from __future__ import annotations

from dataclasses import replace

from braid.planning.estimate import advise, estimate
from braid.planning.plan import plan
from tests.runs import small_run


def test_the_least_change_that_fits_is_advised():
    run = small_run()
    run = replace(run, train=replace(run.train, batch_samples=64, micro_batches=1))
    before = estimate(plan(run, 1), "cpu")

    def peak(micro_batches: int) -> int:
        changed = replace(run, train=replace(run.train, micro_batches=micro_batches))
        return estimate(plan(changed, 1), "cpu").peak

    assert peak(8) < peak(4) < peak(2) < before.peak
    for micro_batches in (2, 4, 8):
        (found,) = [each for each in advise(before, peak(micro_batches)) if each.field == "train.micro_batches"]
        assert (found.value, found.peak) == (micro_batches, peak(micro_batches))
    (found,) = [each for each in advise(before, 1) if each.field == "train.micro_batches"]
    assert found.value == 8, "where nothing fits, what needs least"


def test_nothing_is_advised_to_a_run_that_fits():
    before = estimate(plan(small_run(), 1), "cpu")
    assert advise(before, before.peak) == []
