"""Experts learn: a few steps towards a target, on a GPU if there is one; and a bfloat16 run on a CPU, with what
a run chooses there by itself beside the references alone. `benchmarks.convergence` is the long run on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from braid import kernels
from braid.architecture import Attention, Model, Moe
from braid.config import Data, Optim, Run, Train
from braid.nn.moe.experts import Experts
from braid.pattern import Kind
from braid.planning.plan import plan
from braid.train import state as states
from braid.train.build import make_state
from braid.train.data_pipeline import open_data_pipeline
from braid.train.device import choose_device
from braid.train.loop import lr_schedule
from braid.train.step import train_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 64


def shape() -> Model:
    return Model(
        pattern="[*E][*E]",
        hidden=HIDDEN,
        vocab=257,
        attention=Attention(heads=4, kv_heads=4, head_dim=HIDDEN // 4),
        moe=Moe(experts=4, top_k=1, ffn=2 * HIDDEN, routing="sinkhorn", normalize_top_k=False, aux_loss=0.0),
    )


def experts_of(model: Model, dtype: torch.dtype) -> Experts:
    moe = model.moe
    assert moe is not None
    chosen = kernels.choose(model, {Kind.MOE}, DEVICE, dtype)
    assert chosen.grouped_mlp is not None
    experts = Experts(moe, model.hidden, chosen.grouped_mlp.function, device=DEVICE, dtype=dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sixteen_steps_bring_experts_halfway_to_a_target(dtype: torch.dtype) -> None:
    """Also where one of four has no rows."""
    experts = experts_of(shape(), dtype)
    counts = torch.tensor([20, 0, 31, 13], device=DEVICE)
    x, probs = torch.randn(64, HIDDEN, device=DEVICE, dtype=dtype), torch.rand(64, device=DEVICE)
    optimizer, losses = torch.optim.Adam(experts.parameters(), lr=0.05), []
    for _ in range(16):
        loss = (experts(x, probs, counts).float() - 0.5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] / 2


def test_no_rows_at_all_give_no_gradient() -> None:
    experts = experts_of(shape(), torch.bfloat16)
    x = torch.randn(0, HIDDEN, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    none = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    experts(x, torch.rand(0, device=DEVICE), none).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, HIDDEN)
    assert all(weight.grad is None or not weight.grad.any() for weight in experts.parameters())


def losses_of(folder: Path, chosen: kernels.Kernels | None, steps: int) -> list[float]:
    train = Train(steps=50, batch_samples=4, micro_batches=2, seed=3, dtype="bf16", eval_samples=0)
    optim = Optim(lr=2e-3, warmup_steps=5)
    run = Run(model=shape(), data=Data(sequence_tokens=64), optim=optim, train=train)
    feed = open_data_pipeline(run, folder)
    state = make_state(plan(run, 1), choose_device("cpu"), chosen=chosen)
    states.initialize(state, run)
    schedule, losses = lr_schedule(run), []
    for step in range(1, steps + 1):
        result = train_step(state, run, feed.train, schedule.rate(step))
        assert not result.not_finite
        losses.append(result.loss)
    return losses


@pytest.mark.parametrize("steps", [20, pytest.param(50, marks=pytest.mark.long)])
def test_steps_in_bfloat16_repeat_and_follow_the_references(steps: int, tmp_path: Path) -> None:
    """Four layers, four experts, top-1 by sinkhorn. Begun again it has the same losses to the last bit;
    beside the references they stay together as rounding to bfloat16 allows, and fall."""
    fast, again = losses_of(tmp_path, None, steps), losses_of(tmp_path, None, 5)
    plain = losses_of(tmp_path, kernels.references(), steps)
    assert fast[:5] == again
    assert fast[-1] < 0.8 * fast[0]
    for step, (one, other) in enumerate(zip(fast, plain, strict=True)):
        assert abs(one / other - 1) < 0.03, f"step {step + 1}: {one} beside {other}"
