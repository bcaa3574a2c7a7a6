"""Blocks whose activations wait on the host: the bits of a run that keeps everything on the device."""

from __future__ import annotations

import pytest

from braid.train.step_work import WITHOUT_ROOM
from tests.engine.offloaded import Offloaded, train_both
from tests.engine.overlap_cases import assert_same_bits
from tests.ranks import run_ranks

CASES = [
    Offloaded(blocks=True, share=0.5),
    Offloaded(blocks=True, recompute=("block",), pattern="[*E][M-][G-]"),
    Offloaded(blocks=True, recompute=("norm", "core"), dtype="bf16", dropout=0.1),
    Offloaded(recompute=("full",), streams=2),
    Offloaded(blocks=True, recompute=("core",), regions=("norm", "activation"), pattern="[*-][M-][G-]"),
    Offloaded(recompute=("core",), regions=("norm", "experts"), dtype="bf16", dropout=0.1),
    Offloaded(world=2, ep=2, delayed=True, regions=("experts", "norm", "core")),
    Offloaded(world=2, ep=2, delayed=True),
    Offloaded(world=2, pp=2, blocks=True, pattern="[*E]M-|[G-]M*/*E", share=0.5, tied=True),
    Offloaded(world=2, ep=2, recompute=("block",), latent=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_offloaded_blocks_train_to_the_same_bits(case: Offloaded) -> None:
    for kept, again in run_ranks(case.world, train_both, case, timeout_s=120.0):
        for metrics in again.metrics:
            assert metrics.pop(WITHOUT_ROOM) >= 0
        assert_same_bits(kept, again)
