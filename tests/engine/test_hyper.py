"""Several residual streams under the overlapped schedule: trained as plainly, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.overlap_cases import Case
from tests.engine.test_overlap import PIPELINE, check

STREAMS = Case(streams=3)
ALONE = (
    replace(STREAMS, tied=True),
    replace(STREAMS, pattern="[*E]-[*E]/*E/*E", tied=True, delayed=True),
    replace(STREAMS, pattern="[M*E]*-[G*E]E/*E", dtype="bf16", shared=False, dropout=0.1, delayed=True),
    replace(STREAMS, pattern="[*E]-", latent=4, delayed=True, late_weights=True),
    replace(STREAMS, pattern="/*E", streams=1, early_release=True),
)
RANKS = (
    replace(STREAMS, world=2, ep=2, pattern="[M*E]-[G*E]/*E", dtype="bf16", delayed=True),
    replace(PIPELINE, pattern="[*E]|[M*E]-|[G*E]|*E/*E", streams=2, tied=True, delayed=True),
    replace(PIPELINE, pattern="|[*E]|*E|/*E/*E", streams=4, dtype="bf16", micro_batches=3),
    Case(world=2, pp=2, pattern="|[*E]||", streams=2, micro_batches=3),
)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_process_has_the_same_losses_gradients_and_weights(case):
    check(case)


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_ranks_have_the_same_losses_gradients_and_weights(case):
    check(case)
