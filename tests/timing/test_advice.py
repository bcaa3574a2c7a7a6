"""Advice for a faster step: what it promises holds for the changed run, which is the same otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest

from braid.config import Run
from braid.pattern import joined, parse
from braid.planning.estimate import estimate
from braid.planning.plan import check, plan
from braid.timing import advice
from braid.timing.advice import TimeAdvice, advise
from braid.timing.predict import Prediction, predict
from tests.timing.test_step import CLUSTER, qwen

GIB = 2**30


def changed(run: Run, changes: Mapping[str, object]) -> Run:
    for field, value in changes.items():
        part, _, name = field.partition(".")
        run = replace(run, **{part: replace(getattr(run, part), **{name: value})})
    return run


RUNS = {
    "a long pipeline": qwen(micro_batches=24, pp=4, ep=4, shard="optimizer"),
    "recompute": qwen(micro_batches=2, ep=8, recompute=("full",)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_change_saves_what_it_says_and_needs_what_it_says(name: str) -> None:
    run = RUNS[name]
    made = plan(run, 16)
    before, found = predict(made, CLUSTER), advise(predict(made, CLUSTER))
    assert 1 <= len(found) <= 3
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    for each in found:
        other = changed(run, each.changes)
        assert joined(parse(other.model.pattern)) == joined(parse(run.model.pattern))
        assert replace(other.model, pattern=run.model.pattern) == run.model
        assert (other.data, other.optim) == (run.data, run.optim)
        assert other.train.batch_samples == run.train.batch_samples
        again = plan(other, 16)
        after = predict(again, CLUSTER)
        assert each.seconds == pytest.approx(after.seconds, rel=1e-6)
        assert each.gain == pytest.approx(before.seconds - after.seconds, rel=1e-6)
        assert each.gain > 0.005 * before.seconds
        assert each.peak == estimate(again).peak
        assert each.cost == each.peak - estimate(made).peak
        assert each.fits is None


@pytest.mark.long
def test_the_parts_of_the_step_tell_which_changes_to_try() -> None:
    """Trying every change finds nothing better."""
    found = predict(plan(RUNS["a long pipeline"], 16), CLUSTER)

    def every(prediction: Prediction, device: str, limit: int | None) -> list[advice._Candidate]:
        cut = advice._other_cut(prediction, device, limit)
        return [*cut, *(each for each in advice._candidates(prediction) if not check(each.run, 16))]

    with mock.patch.object(advice, "_promising", every):
        whole = advise(found)
    assert [each.changes for each in advise(found)] == [each.changes for each in whole]


def test_what_does_not_fit_is_said_and_does_not_crowd_out_what_does() -> None:
    found = predict(plan(RUNS["recompute"], 16), CLUSTER)
    free = advise(found)
    limit = min(each.peak for each in free)
    assert limit < max(each.peak for each in free)
    limited = advise(found, limit=limit)
    assert {each.fits for each in limited} == {True, False}
    assert all((each.peak <= limit) == each.fits for each in limited)
    first: TimeAdvice = free[0]
    assert limited[0].changes == first.changes, "it saves most, and is listed whether it fits or not"


def test_options_are_those_of_a_command() -> None:
    each = TimeAdvice(
        changes={"mesh.pp": 8, "train.micro_batches": 60, "train.recompute": ("norm", "core")},
        seconds=1.0,
        gain=1.0,
        peak=GIB,
        cost=0,
        fits=None,
    )
    assert each.options == "--mesh.pp 8 --train.micro-batches 60 --train.recompute norm core"


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 12), (8, 48)])
def test_another_mesh_has_micro_batches_of_as_many_rows(pp: int, micro_batches: int) -> None:
    run = RUNS["a long pipeline"]
    run = replace(run, train=replace(run.train, batch_samples=96 * 4))

    def rows(each: Run) -> float:
        return each.train.batch_samples / each.train.micro_batches / (16 // each.mesh.pp)

    other, changes = advice._same_rows(run, replace(run.mesh, pp=pp))
    assert changes == {"train.micro_batches": micro_batches}
    assert rows(other) == rows(run)
