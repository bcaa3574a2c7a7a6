"""On a GPU: copies beside computation, from page-locked memory, change no bit."""

from __future__ import annotations

import pytest
import torch

from braid.train.step_work import WITHOUT_ROOM
from tests.engine.offloaded import Offloaded
from tests.engine.overlap_cases import assert_same_bits
from tests.engine.test_overlap_gpu import deterministic, train

__all__ = ["deterministic"]  # a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = (
    Offloaded(blocks=True, pattern="[*E][M-][G-]", share=0.7, dtype="bf16"),
    Offloaded(blocks=True, pattern="[*E][M-][G-]", recompute=("block",), streams=2),
    Offloaded(pattern="[*E][*E]", recompute=("full",), delayed=True),
    Offloaded(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", dropout=0.1),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_stream_changes_no_bit(case: Offloaded) -> None:
    kept, _ = train(case, overlap=False)
    away, _ = train(case, overlap=True)
    for metrics in away.metrics:
        metrics.pop(WITHOUT_ROOM)
    assert_same_bits(kept, away)
