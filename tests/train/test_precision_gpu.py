"""Training in fp8_block on a GPU: steps by kernels follow those of the reference, and a run learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.architecture import Attention, Mamba2, Mlp, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.distributed.collectives import Groups
from braid.kernels.precision.block_experts import BlockGroupedMlp
from braid.nn.linear import Linear, RowLinear
from braid.nn.moe.experts import Experts
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device, set_arithmetic
from braid.train.gc_freeze import frozen_gc
from braid.train.state import State
from braid.train.step import StepResult, train_step
from tests.train.helpers import corpus

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

STEPS = 6
EMULATED = ("auto", "low_precision=reference", "grouped_mlp=reference")
MODEL = Model(
    pattern="[*-][ME][*-]",
    hidden=512,
    vocab=257,
    attention=Attention(heads=8, kv_heads=2, head_dim=64),
    mlp=Mlp(ffn=640),
    mamba2=Mamba2(heads=16, head_dim=64, state=64, groups=2),
    moe=Moe(experts=8, top_k=2, ffn=384, shared_ffn=256),
)
"""Widths that are multiples of 512, of 128, and of 16 alone: Mamba's projection has 2,320 outputs."""


def run_of(folder: Path, settings: str, **train: object) -> Run:
    run = Run(
        model=MODEL,
        data=Data(sequence_tokens=256, sources=(str(corpus(folder)),)),
        optim=Optim(lr=5e-4, warmup_steps=2),
        train=Train(
            steps=STEPS, batch_samples=8, micro_batches=2, eval_samples=0, dtype="bf16",
            precision=tuple(settings.split()),
        ),
    )  # fmt: skip
    return replace(run, train=replace(run.train, **train))


def trained(run: Run, folder: Path) -> tuple[State, list[StepResult]]:
    set_arithmetic(deterministic=False)
    state = make_state(plan(run, 1), choose_device("cuda"), Groups())
    states.initialize(state, run)
    data = open_data_pipeline(run, folder)
    with frozen_gc():
        return state, [train_step(state, run, data.train, run.optim.lr) for _ in range(STEPS)]


def assert_near(found: list[StepResult], wanted: list[StepResult], first: float, later: float) -> None:
    """The first step begins at the same weights; rounding grows in those after it."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        bound = first if number == 0 else later
        assert not one.skipped
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=bound)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=10 * bound)


@pytest.mark.parametrize(
    "settings",
    [
        "fp8_block ends",
        "fp8_block",
        "fp8_block ends dense.weight_grad=bf16 experts.down.input_grad=bf16",
    ],
)
def test_steps_by_kernels_are_those_of_the_reference(settings: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, settings)
    state, found = trained(run, tmp_path / "found")
    emulating, wanted = trained(replace(run, train=replace(run.train, kernels=EMULATED)), tmp_path / "wanted")
    assert_near(found, wanted, 1e-3, 1e-2)
    for one, other in zip(found, wanted, strict=True):
        counted = {name: share for name, share in one.metrics.items() if name.startswith("fp8_zeroed")}
        assert counted.keys() == {name for name in other.metrics if name.startswith("fp8_zeroed")}
        assert counted["fp8_zeroed_weight"] == pytest.approx(
            other.metrics["fp8_zeroed_weight"], rel=0.1, abs=1e-6
        )
    experts = [module for module in state.model.modules() if isinstance(module, Experts)]
    assert all(isinstance(each.grouped_mlp, BlockGroupedMlp) for each in experts)
    layers = [module for module in state.model.modules() if isinstance(module, Linear | RowLinear)]
    assert any(each.products is not None and each.products.kernels is not None for each in layers)
    emulated = [module for module in emulating.model.modules() if isinstance(module, Linear | RowLinear)]
    assert not any(each.products is not None and each.products.kernels is not None for each in emulated)


def test_a_run_learns_as_it_does_in_bfloat16(tmp_path: Path) -> None:
    run = run_of(tmp_path, "")
    _, plain = trained(run, tmp_path / "plain")
    _, found = trained(
        replace(run, train=replace(run.train, precision=("fp8_block", "ends"))), tmp_path / "fp8"
    )
    assert plain[-1].metrics["loss"] < 0.95 * plain[0].metrics["loss"]
    assert_near(found, plain, 5e-3, 5e-2)


def test_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, "fp8_block ends")
    _, kept = trained(run, tmp_path / "kept")
    again = replace(run, train=replace(run.train, recompute=("block",)))
    _, recomputed = trained(again, tmp_path / "again")
    assert_near(recomputed, kept, 1e-4, 1e-2)
