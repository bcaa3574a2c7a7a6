"""Initial weights depend on the seed and on the canonical name, and on nothing else."""

from __future__ import annotations

import torch
from torch import nn

from braid import architecture
from braid.kernels.grouped_mlp import REFERENCE
from braid.nn.init import initial, initialize
from braid.nn.linear import Linear
from braid.nn.moe.experts import Experts


def test_each_expert_starts_alike_however_many_are_stacked() -> None:
    few, many = (
        Experts(architecture.Moe(experts=n, top_k=1, ffn=5), 3, REFERENCE.function, dtype=torch.float32)
        for n in (2, 7)
    )
    for experts in (few, many):
        initialize(dict(experts.named_parameters()), experts.canonical(), seed=1, std=0.02, layers=4)
    assert torch.equal(few.w_in_EFGC, many.w_in_EFGC[:2])
    assert torch.equal(few.w_down_ECF, many.w_down_ECF[:2])


def test_dtype_only_rounds() -> None:
    weights = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        linear = Linear(30, 20, dtype=dtype)
        initialize(dict(linear.named_parameters()), linear.canonical(), seed=1, std=0.02, layers=4)
        weights.append(linear.weight.detach())
    assert torch.equal(weights[0].float(), weights[1])
    assert torch.equal(weights[1].bfloat16(), weights[2])


def test_seed_and_name_both_matter_and_the_spread_is_asked_for() -> None:
    (tensor,) = Linear(100, 100).canonical().values()
    draws = [initial(name, tensor, seed=seed, std=0.02) for name in ("a", "b") for seed in (1, 2)]
    for i, one in enumerate(draws):
        assert abs(one.std().item() - 0.02) < 0.001
        assert abs(one.mean().item()) < 0.001
        assert not any(torch.equal(one, other) for other in draws[:i])
    assert torch.equal(draws[0], initial("a", tensor, seed=1, std=0.02))


def test_writing_into_the_residual_stream_starts_narrower() -> None:
    module = nn.ModuleDict({"o": Linear(200, 200, fill="residual", bias=True)})
    tensors = {f"o.{name}": tensor for name, tensor in module["o"].canonical().items()}
    initialize(dict(module["o"].named_parameters()), tensors, seed=1, std=0.02, layers=16)
    assert abs(module["o"].weight.std().item() - 0.02 / 4) < 0.0002
    assert not module["o"].bias.any()
