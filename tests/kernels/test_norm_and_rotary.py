"""Norms and turns of heads: every implementation gives what float64 gives, gradients included, wherever the
vectors lie.

Without a GPU the Triton kernels are interpreted, in a process of their own: Triton asks whether to interpret
when it is first imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from braid.kernels import rms_norm, rotary
from braid.kernels.rms_norm import Normalize
from braid.kernels.rotary import Rotate
from braid.kernels.rows import rows_of
from braid.nn.rotary import Rotary, rotary_tables, rotate
from tests.kernels.interpreting import (
    DEVICE,
    GPU,
    INTERPRETED,
    needs_kernels,
)

ON_A_GPU = torch.device("cuda")
NORMS = [
    pytest.param(lambda: rms_norm.PLAIN, id="reference"),
    pytest.param(lambda: rms_norm.choose(ON_A_GPU, torch.float32).function, id="fused", marks=needs_kernels),
]
TURNS = [
    pytest.param(lambda: rotary.PLAIN, id="reference"),
    pytest.param(lambda: rotary.choose(ON_A_GPU, torch.float32).function, id="fused", marks=needs_kernels),
]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "vectors": lambda: torch.randn(37, 24),
    "one": lambda: torch.randn(1, 1, 7),
    "none": lambda: torch.randn(0, 5, 8),
    "wide": lambda: torch.randn(3, 2100),
    "slice": lambda: torch.randn(2, 9, 40)[..., 8:24],
    "heads": lambda: torch.randn(2, 5, 3, 64)[..., :48].unflatten(-1, (3, 16)),
    "across": lambda: torch.randn(2, 6, 5, 16).transpose(1, 2),
    "far apart": lambda: torch.randn(2, 3, 4, 5, 6, 8)[:, :2, ::2, :, ::3],
    "columns": lambda: torch.randn(12, 9).t(),
    "many": lambda: torch.randn(9000, 4),
    "too long": lambda: torch.randn(2, 17_000),
    "none, far apart": lambda: torch.empty(2, 3, 4, 5, 0, 8)[:, ::2, ::3].transpose(0, 3),
}


def error(found: Tensor, wanted: Tensor) -> float:
    scale = wanted.double().norm().item() or 1.0
    return (found.double().cpu() - wanted.double().cpu()).norm().item() / scale


@pytest.mark.parametrize("way", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_is_its_formula_with_its_gradients(
    way: Callable[[], Normalize], dtype: torch.dtype, layout: str
) -> None:
    if layout == "many" and INTERPRETED and dtype != torch.float32:
        pytest.skip("slow to interpret")
    narrow = LAYOUTS[layout]().to(DEVICE, dtype)
    weight = (1 + 0.5 * torch.randn(narrow.shape[-1])).to(DEVICE, dtype).requires_grad_()
    x, probe = narrow.detach().requires_grad_(), torch.randn(narrow.shape).to(DEVICE, dtype)
    y = way()(x, weight, 1e-3)
    assert y.dtype == dtype
    assert y.shape == x.shape
    grads = torch.autograd.grad(y, (x, weight), probe)
    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    exact = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * exact_weight
    wanted = torch.autograd.grad(exact, (exact_x, exact_weight), probe.double())
    for found, want in zip((y, *grads), (exact, *wanted), strict=True):
        assert found.shape == want.shape
        assert error(found, want) < BOUND[dtype]


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_takes_wide_vectors_with_a_narrow_weight(way: Callable[[], Normalize]) -> None:
    x, weight = torch.randn(5, 16, device=DEVICE), torch.randn(16, device=DEVICE, dtype=torch.float16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    y = way()(x, weight.requires_grad_(), 1e-6)
    assert y.dtype == torch.float32
    assert error(y, wanted) < 3e-6
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float16


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_repeats_to_the_last_bit(way: Callable[[], Normalize]) -> None:
    x, weight = (torch.randn(*size, device=DEVICE).requires_grad_() for size in ((70, 5, 24), (24,)))
    probe = torch.randn(70, 5, 24, device=DEVICE)
    one, other = (torch.autograd.grad(way()(x, weight, 1e-6), (x, weight), probe) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


HEADS: dict[str, Callable[[], Tensor]] = {
    "one dim of heads": lambda: torch.randn(2, 5, 3, 16),
    "groups in a projection": lambda: torch.randn(2, 5, 3, 60)[..., :48].unflatten(-1, (3, 16)),
    "some channels pass": lambda: torch.randn(2, 5, 4, 23),
    "a slice of heads": lambda: torch.randn(2, 5, 4, 40)[..., 8:24],
    "none": lambda: torch.randn(2, 5, 0, 16),
}


def tables(heads: Tensor, rope_dim: int, dtype: torch.dtype) -> Rotary:
    positions = torch.randint(0, 10_000, heads.shape[:2])
    made = rotary_tables(positions, rope_dim, 500.0, dtype)
    return Rotary(*(table.to(DEVICE) for table in made))


@pytest.mark.parametrize("way", TURNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope_dim", [16, 12])
@pytest.mark.parametrize("layout", HEADS)
def test_heads_are_turned_by_the_angles_of_the_tables(
    way: Callable[[], Rotate], dtype: torch.dtype, rope_dim: int, layout: str
) -> None:
    x = HEADS[layout]().to(DEVICE, dtype).requires_grad_()
    turns = tables(x, rope_dim, dtype)
    y = rotate(x, turns, way())
    pairs, between = rope_dim // 2, [1] * (x.ndim - 3)
    cos, sin = (table.double().view(*x.shape[:2], *between, rope_dim)[..., pairs:] for table in turns)
    wide = x.detach().double()
    first, second, passing = wide.split([pairs, pairs, x.shape[-1] - rope_dim], -1)
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin, passing], -1)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert error(y, wanted) < BOUND[dtype]
    probe = torch.randn(x.shape).to(DEVICE, dtype)
    (back,) = torch.autograd.grad(y, x, probe)
    assert error(rotate(back.detach(), turns, way()), probe) < 2 * BOUND[dtype]  # there and back again


@pytest.mark.parametrize("way", TURNS)
def test_rows_of_a_batch_may_share_their_tables(way: Callable[[], Rotate]) -> None:
    x = torch.randn(3, 5, 2, 8, device=DEVICE)
    turns = tables(x[:1], 8, torch.float32)
    wanted = torch.cat([rotary.PLAIN(one, *turns, 1) for one in x.split(1)])
    assert error(way()(x, *turns, 1), wanted) < 3e-6


def test_rows_are_where_their_vectors_lie() -> None:
    for make in LAYOUTS.values():
        x = make()
        rows = rows_of(x)
        flat = x.flatten(0, -2)
        assert rows.number == len(flat)
        outer, middle, inner = rows.strides
        for number, vector in enumerate(flat[:200]):
            at = number // (rows.middle * rows.inner) * outer
            at += number // rows.inner % rows.middle * middle + number % rows.inner * inner
            found = rows.x.as_strided((x.shape[-1],), (1,), rows.x.storage_offset() + at)
            assert torch.equal(found, vector)


def test_vectors_within_a_projection_are_not_copied() -> None:
    q = torch.randn(2, 5, 3, 64)[..., :48].unflatten(-1, (3, 16))
    assert rows_of(q).x.data_ptr() == q.data_ptr()


def test_choices_name_their_reasons() -> None:
    cpu = torch.device("cpu")
    assert rms_norm.choose(cpu, torch.float32).name == "reference"
    assert "cpu" in rms_norm.choose(cpu, torch.float32).reason
    assert "float64" in rms_norm.choose(ON_A_GPU, torch.float64).reason
    assert "float64" in rotary.choose(ON_A_GPU, torch.float64).reason
    if find_spec("triton"):
        assert rms_norm.choose(ON_A_GPU, torch.bfloat16).name == "fused"
        assert rotary.choose(ON_A_GPU, torch.bfloat16).name == "fused"
