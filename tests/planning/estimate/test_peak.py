"""The peak of a step: estimated, and as tracked storage by storage on a CPU, in one process."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from braid.architecture import Attention, DeltaNet, LatentAttention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Mesh, Run, Train
from braid.optim.adamw import MOMENTS
from braid.planning.estimate import estimate
from braid.planning.plan import Plan, plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.device import choose_device
from braid.train.step import backward, count
from tests.model.cases import batch
from tests.planning.estimate.reality import Allocations

TOKENS = 384


def run_of(text: str, dtype: Any, **more: Any) -> Run:
    model = Model(
        pattern=text,
        hidden=64,
        vocab=64,
        tied=False,
        attention=Attention(heads=8, kv_heads=2, head_dim=16, qk_norm=True),
        latent_attention=LatentAttention(heads=8, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        mamba2=Mamba2(heads=8, head_dim=16, state=32, groups=2),
        delta_net=DeltaNet(key_heads=4, value_heads=8, key_dim=16, value_dim=16),
        mlp=Mlp(ffn=256),
        moe=Moe(experts=16, top_k=4, ffn=64),
    )
    train = Train(steps=1, batch_samples=2, micro_batches=2, dtype=dtype)
    data = Data(sequence_tokens=TOKENS, tokenizer="none.json")
    return Run(model=replace(model, **more), data=data, train=train)


SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "logits_scale": 2.0}
CASES = [
    ("[*-]" * 2, "bf16", {}),
    ("[*-]" * 2, "fp32", {"vocab": 1000, "tied": True}),
    ("[*E]" * 2, "bf16", SCALES),
    ("[+E]+", "fp32", {}),
    ("[M-][G-]", "bf16", {}),
    ("M", "fp32", {}),
]


@pytest.mark.parametrize(("text", "dtype", "more"), CASES, ids=lambda value: str(value)[:20])
def test_the_peak_of_a_step_is_within_a_tenth(text: str, dtype: str, more: dict[str, Any]) -> None:
    worked_out = plan(run_of(text, dtype, **more), 1)
    assert estimate(worked_out, "cpu").peak == pytest.approx(peak_of(worked_out), rel=0.1)


LOW_PRECISION = [
    ("[*-]" * 2, "bf16", ("fp8_block", "ends")),
    ("[*-]" * 2, "fp32", ("mxfp8", "ends")),
    ("[*E]" * 2, "bf16", ("mxfp8", "ends", "dense.weight_grad=bf16")),
    ("[M-][G-]", "bf16", ("fp8_row", "ends")),
]


@pytest.mark.parametrize(("text", "dtype", "precision"), LOW_PRECISION, ids=lambda value: str(value)[:20])
def test_so_is_that_of_emulated_products(text: str, dtype: str, precision: tuple[str, ...]) -> None:
    """With the copies of weights that a step has, and what a backward converts to float32."""
    run = run_of(text, dtype)
    worked_out = plan(replace(run, train=replace(run.train, precision=precision)), 1)
    found = peak_of(worked_out)
    assert estimate(worked_out, "cpu").peak == pytest.approx(found, rel=0.1)
    assert found > 1.1 * estimate(plan(run, 1), "cpu").peak


FROZEN = [
    ("[*-]" * 4, "bf16", ("blocks.3.*", "head.*"), Mesh(), 0.1),
    ("[*-]" * 4, "fp32", ("blocks.0.*",), Mesh(), 0.1),
    ("[M-][G-]" * 2, "fp32", ("blocks.2.*",), Mesh(), 0.1),
    ("[*E]" * 4, "fp32", ("blocks.[23].*",), Mesh(overlap=True), 0.1),
    # A block that only runs forward has temporary tensors alone, which nothing is known about.
    ("[*-]" * 4, "fp32", ("head.*",), Mesh(), 0.2),
]


@pytest.mark.parametrize(
    ("text", "dtype", "trained", "mesh", "within"), FROZEN, ids=lambda value: str(value)[:20]
)
def test_frozen_weights_take_as_little_as_is_said(text, dtype, trained, mesh, within) -> None:
    """No gradients, no moments, no main copies; no activations where nothing before is trained."""
    whole = replace(run_of(text, dtype), mesh=mesh)
    worked_out = plan(replace(whole, trained=trained), 1)
    estimated = estimate(worked_out, "cpu").peak
    assert estimated == pytest.approx(peak_of(worked_out), rel=within)
    assert estimated < estimate(plan(whole, 1), "cpu").peak


SIDE_BY_SIDE = [
    (Mesh(overlap=True), ()),
    (Mesh(overlap=True, delay_weights=True, paired_ends=True), ()),
    (Mesh(overlap=True), ("block",)),
    (Mesh(overlap=True, paired_ends=True), ("block",)),
    (Mesh(overlap=True), ("norm", "activation", "core", "experts")),
]


@pytest.mark.parametrize(("mesh", "recompute"), SIDE_BY_SIDE, ids=lambda value: str(value)[-90:])
def test_so_is_that_of_micro_batches_side_by_side(mesh: Mesh, recompute: tuple[Any, ...]) -> None:
    """One grows while the other shrinks, and two backwards make blocks again at the same time."""
    run = run_of("[*E]" * 4, "fp32")
    train = replace(run.train, micro_batches=4, batch_samples=4, recompute=recompute)
    worked_out = plan(replace(run, mesh=mesh, train=train), 1)
    assert estimate(worked_out, "cpu").peak == pytest.approx(peak_of(worked_out), rel=0.1)


def peak_of(worked_out: Plan) -> int:
    """The most bytes that are there at a time in a step, with weights and moments."""
    run = worked_out.run
    state = make_state(worked_out, choose_device("cpu"))
    states.initialize(state, run)
    batches = [batch([[TOKENS]], vocab=run.model.vocab, seed=seed) for seed in range(run.train.micro_batches)]
    counts, optimizer = count(state, batches), state.optimizer
    moments = [optimizer.moment(kind, name) for name in optimizer.main for kind in MOMENTS]
    held = {id(tensor): tensor for tensor in (*state.model.parameters(), *optimizer.main.values(), *moments)}
    inputs = [tensor for each in batches for tensor in (each.tokens_BT, each.labels_BT, each.documents_BT)]
    waiting = [] if state.host_pool is None else [state.host_pool.memory]
    with Allocations([*held.values(), *inputs, *waiting]) as tracked:
        backward(state, run, batches, counts)
        optimizer.update(1e-3)
    return tracked.peak + sum(tensor.nbytes for tensor in held.values())


HELD = [
    (Mesh(), 1, (), ("*",)),
    (Mesh(shard="none"), 4, (), ("*",)),
    (Mesh(shard="optimizer", pp=2), 4, ("norm",), ("*",)),
    (Mesh(tp=2, ep=2, overlap=True), 4, (), ("head.*",)),
    (Mesh(pp=2, schedule="dual_pipe_v", overlap=True), 2, ("full",), ("*",)),
]


@pytest.mark.parametrize(
    ("mesh", "world", "recompute", "trained"), HELD, ids=["alone", "none", "1f1b", "frozen", "dual_pipe_v"]
)
def test_what_is_held_at_the_peak_adds_up_to_it(mesh, world, recompute, trained) -> None:
    run = replace(run_of("[*E]" * 4, "bf16"), mesh=mesh, trained=trained)
    run = replace(run, train=replace(run.train, batch_samples=16, micro_batches=4, recompute=recompute))
    for stage in estimate(plan(run, world), "cuda").stages:
        memory, held = stage.memory, asdict(stage.memory.at_peak)
        assert sum(held.values()) == memory.peak
        assert held["parameters"] == memory.parameters
        assert held["optimizer"] == memory.optimizer
        assert held["features"] == 0
        for kind in ("gathered", "activations"):
            assert 0 <= held[kind] <= getattr(memory, kind)
        if memory.peak_at.startswith("backward"):
            assert held["activations"] > 0
            assert 0 < held["temporary"] <= memory.temporary * stage.live
