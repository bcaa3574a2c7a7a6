"""Recompute where ranks share weights: they are there again when a replay needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.choices import Strategy
from braid.config import Mesh
from tests.engine.driven import Case, Comparison, Grain, Ranks
from tests.ranks import run_ranks


def differences(
    rank: int, world: int, cases: list[Case], shards: list[Strategy], ways: list[Grain]
) -> list[str]:
    """What is not the same to the last bit with and without recompute."""
    comparison, wrong = Comparison(Ranks(rank, world)), list[str]()
    for case in (case.sharing(shard) for case in cases for shard in shards):
        for way in ways:
            found = comparison.differences(case, way, once=True)
            wrong += [f"{case} by {way}: {each}" for each in found]
    return wrong


def compare(
    world: int, cases: list[Case], shards: list[Strategy], ways: list[Grain], timeout_s: float = 90.0
) -> None:
    for rank, wrong in enumerate(run_ranks(world, differences, cases, shards, ways, timeout_s=timeout_s)):
        assert wrong == [], f"on rank {rank}"


def test_a_lowered_schedule_gathers_what_a_replay_needs() -> None:
    case = Case(block="[*E]", blocks=2, micro_batches=2, dtype="bf16", recompute=("full",))
    compare(2, [case], ["all"], ["blocks", "late"])
    compare(2, [replace(case, block="[M*E]", blocks=1, mesh=Mesh(ep=2))], ["gradients"], ["phases"])


def test_ranks_that_share_tokens_and_heads() -> None:
    mesh, names = Mesh(tp=2, ep=2), ("full",)
    case = Case(block="[M*E]", blocks=1, micro_batches=2, mesh=mesh, tail="/*E", recompute=names)
    compare(2, [case], ["all"], ["blocks", "late"])


@pytest.mark.long
def test_a_sample_on_four_ranks() -> None:
    case = Case(block="[*E]", blocks=1, micro_batches=4, mesh=Mesh(ep=2), recompute=("full",))
    compare(4, [case], ["all"], ["late"])
