"""Recompute where ranks share weights: they are there again when a replay needs them, by hooks and by ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from braid.config import Mesh
from braid.parallel.sharding import Strategy
from tests.engine.driven import Grain
from tests.engine.recomputed import NAMES, Case, differences
from tests.ranks import run_ranks

STRATEGIES: list[Strategy] = ["none", "optimizer", "gradients", "all"]


def compare(
    world: int, cases: list[Case], shards: list[Strategy], grains: list[Grain], timeout_s: float = 90.0
) -> None:
    for rank, wrong in enumerate(run_ranks(world, differences, cases, shards, grains, timeout_s=timeout_s)):
        assert wrong == [], f"on rank {rank}"


def test_hooks_of_every_strategy_gather_what_a_replay_needs() -> None:
    """Whole blocks are made again inside of FSDP2's backward."""
    case = Case(block="[M*E]", blocks=1, micro_batches=3, dtype="bf16", mesh=Mesh(ep=2), recompute=("full",))
    compare(2, [case], STRATEGIES, ["schedule"])
    tied = Case(block="[*E]", blocks=2, micro_batches=1, tied=True, tail="/*E", recompute=("norm", "block"))
    compare(2, [tied], ["all"], ["schedule"])


def test_a_lowered_schedule_gathers_what_a_replay_needs() -> None:
    case = Case(block="[*E]", blocks=3, micro_batches=3, dtype="bf16", recompute=("full",))
    compare(2, [case], ["all"], ["late"])
    compare(2, [replace(case, block="[M*E]", blocks=1, mesh=Mesh(ep=2))], ["gradients"], ["phases"])


def test_ranks_that_share_tokens_and_heads() -> None:
    case = Case(block="[M*E]", blocks=1, mesh=Mesh(tp=2, ep=2), tail="/*E", recompute=("full",))
    compare(2, [case], ["all"], ["schedule", "late"])


def test_a_sample_on_four_ranks() -> None:
    case = Case(block="[*E]", blocks=1, micro_batches=4, mesh=Mesh(ep=2), recompute=("full",))
    compare(4, [case], ["all"], ["late"])


@pytest.mark.long
@pytest.mark.parametrize("names", NAMES, ids="+".join)
def test_a_larger_sample(names: tuple[str, ...]) -> None:
    shared = Case(block="[M*E]", blocks=1, mesh=Mesh(cp=2), tail="/*E", recompute=names)
    compare(2, [shared, replace(shared, mesh=Mesh(tp=2, ep=2))], ["gradients"], ["schedule", "late"])
    case = Case(block="[M*E]", blocks=3, micro_batches=3, dtype="bf16", recompute=names)
    compare(2, [case, replace(case, block="[*E]", latent=6, mesh=Mesh(ep=2))], ["all"], ["schedule", "late"])
    tied = replace(case, blocks=2, tied=True, tail="/*E", micro_batches=4, mesh=Mesh(pp=2))
    compare(4, [tied], ["gradients", "all"], ["schedule", "late"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("names", [("norm",), ("full",)], ids="+".join)
@pytest.mark.parametrize(("block", "dtype"), [("[*E]", "fp32"), ("[*E]", "bf16"), ("[M*E]", "bf16")])
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_the_whole_product(world: int, names: tuple[str, ...], block: str, dtype: str, blocks: int) -> None:
    case = Case(block=block, blocks=blocks, dtype=dtype, recompute=names)
    cases = [replace(case, micro_batches=number) for number in (1, 3, 4)]
    compare(world, cases, STRATEGIES, ["schedule", "phases", "late"], timeout_s=900.0)
