"""Recompute in a pipeline without overlap, and on a folded one: the bits of a run that keeps everything.
Overlapped schedules that recompute are in `test_overlap.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from braid.config import Run
from tests.engine.overlap_cases import assert_same_bits, train, train_both
from tests.engine.recomputed import Overlapped, recomputing
from tests.ranks import run_ranks

# ------------------------------------------------------------------------------------------ whole blocks


@pytest.mark.parametrize(
    "case",
    [
        Overlapped(world=2, pp=2, pattern="[*E]|[M-]|[G-]|[*E]/*E", tied=True, recompute=("full",)),
        Overlapped(world=2, ep=2, pattern="[*E]M-G-/*E", dtype="bf16", recompute=("norm", "core", "experts")),
    ],
    ids=str,
)
def test_plain_schedules_have_the_same_bits(case: Overlapped) -> None:
    for kept, made_again in run_ranks(case.world, train_both, replace(case, blocks=True), timeout_s=120.0):
        assert_same_bits(kept, made_again)


# ------------------------------------------------------------------------------------------- both directions


@dataclass(frozen=True, kw_only=True)
class Folded(Overlapped):
    """DualPipeV, with replays or without."""

    beside: bool = True
    """Whether exchanges are overlapped."""

    def run(self, *, overlap: bool) -> Run:
        run = recomputing(super().run(overlap=self.beside), self.recompute)
        return replace(run, mesh=replace(run.mesh, schedule="dual_pipe_v"))


def both_folded(rank: int, world: int, case: Folded) -> list[str]:
    kept, made_again = (train(rank, each, overlap=True) for each in (replace(case, recompute=()), case))
    try:
        assert_same_bits(kept, made_again)
    except AssertionError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(
    "case",
    [
        Folded(recompute=("full",), world=2, pp=2, pattern="[*E]|[M*E]|-|[*E]/*E", tied=True, micro_batches=4),
        pytest.param(
            Folded(recompute=("norm", "experts"), world=2, pp=2, pattern="[*E]|-|M|*E", beside=False),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_a_folded_pipeline_has_the_same_bits(case: Folded) -> None:
    assert run_ranks(case.world, both_folded, case, timeout_s=120.0) == [[]] * case.world
