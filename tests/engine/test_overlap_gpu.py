"""On a GPU: nodes on two streams train as the plain schedule does, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.engine.node import Watch
from braid.kernels.grouped_mlp import reference
from braid.planning.plan import plan
from braid.train import step as steps
from braid.train.build import make_state
from braid.train.device import choose_device
from braid.train.state import initialize
from tests.engine import oracle
from tests.engine.overlap_cases import RATE, Case, Trained, assert_same_bits, micro_batches
from tests.engine.stream_log import stream_faults
from tests.states import backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = (
    Case(pattern="[*E][*E]", delayed=True, late_weights=True),
    Case(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", delayed=True),
    Case(pattern="[*E]-[*E]/*E/*E", tied=True, dropout=0.1),
    Case(pattern="[*E]E", latent=4, shared=False, capacity=True, early_release=True),
    Case(pattern="[*E]-E", dtype="bf16", micro_batches=4, delayed=True, paired_ends=True),
    Case(pattern="[*E]E/*E", dtype="bf16", latent=4, tied=True, delayed=True, paired_ends=True),
    Case(pattern="[M*E]*-[G*E]E/*E", dtype="bf16", blocks=True),
    Case(pattern="[*E]-E/*E", tied=True, blocks=True),
)


@pytest.fixture(autouse=True)
def deterministic():
    """Sums by atomic additions would differ between any two runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_of_a_gpu_change_no_bit(case):
    plain, _ = train(case, overlap=False)
    overlapped, watch = train(case, overlap=True)
    assert_same_bits(plain, overlapped)
    schedule = plan(wide(case, overlap=True), 1).schedule
    assert list(stream_faults(watch.issued, schedule.phases)) == []


def wide(case: Case, *, overlap: bool):
    """The case with rows of experts that are a multiple of 16 bytes."""
    run = case.run(overlap=overlap)
    moe = replace(run.model.moe, ffn=16, shared_ffn=16 if case.shared else 0, latent=16 if case.latent else 0)
    return replace(run, model=replace(run.model, hidden=16, moe=moe))


def train(case: Case, *, overlap: bool) -> tuple[Trained, Watch]:
    run = wide(case, overlap=overlap)
    state = make_state(plan(run, 1), choose_device("cuda"))
    initialize(state, run)
    told, watch = Trained(), Watch()
    for number in range(case.steps):
        batches = micro_batches(case, state.model.groups, number)
        counts = steps.count(state, batches)
        watch = Watch()
        if overlap:
            parts, _ = backward(state, run, batches, counts, watch)
        else:
            parts, _ = oracle.backward(state, run, batches, counts)
        told.metrics.append(parts)
        found = state.optimizer.gradients()
        told.gradients.append({name: gradient.clone() for name, gradient in found.items()})
        state.optimizer.update(RATE)
    told.weights = {name: tensor.detach().clone() for name, tensor in state.weights().items()}
    return told, watch


@pytest.mark.parametrize("paired_ends", [False, True])
def test_a_step_never_waits_for_the_device(paired_ends):
    """While the host waits for a result, nobody gives the device more to do. Experts in bfloat16: the loop for
    float32 asks for the rows of each expert."""
    torch.use_deterministic_algorithms(False)
    case = Case(pattern="[*E][*E]", dtype="bf16", delayed=True, paired_ends=paired_ends)
    run = wide(case, overlap=True)
    state = make_state(plan(run, 1), choose_device("cuda"))
    initialize(state, run)
    assert all(moe.experts.grouped_mlp is not reference.grouped_mlp for _, moe in state.model.moe_layers())
    batches = micro_batches(case, state.model.groups, 0)
    counts = steps.count(state, batches)
    steps.backward(state, run, batches, counts)
    state.optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.backward(state, run, batches, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
