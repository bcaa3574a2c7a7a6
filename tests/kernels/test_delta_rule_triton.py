"""The delta rule in Triton: outputs, states and every gradient near float64, at odd sizes, packed documents.

Interpreted bfloat16 is wrong, so without a GPU the kernels are checked in float32, where they are exact but for
rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from braid.kernels import delta_rule as op
from braid.kernels.activation_bytes import fused_delta_rule_bytes
from braid.kernels.delta_rule import reference
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels
from tests.planning.estimate.reality import kept

pytest.importorskip("triton")

if GPU or INTERPRETED:
    from braid.kernels.delta_rule.fused import FusedDeltaRule

DTYPE = torch.bfloat16 if GPU else torch.float32
BOUND = 2e-2 if GPU else 5e-6
LONG = () if GPU else (pytest.mark.long,)
"""Cases that the interpreter takes seconds for."""


class Sizes(NamedTuple):
    tokens: int
    key_heads: int = 1
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    starts: tuple[int, ...] = ()
    """First tokens of documents after the first, in the first row."""
    initial: bool = False
    rows: int = 1


CASES = [
    Sizes(70, 1, 2, 20, 24, starts=(3, 63, 64, 65), initial=True),
    *(
        pytest.param(sizes, marks=LONG)
        for sizes in (
            Sizes(3, 2, 2),
            Sizes(1, initial=True, rows=2),
            Sizes(64, 1, 1, 64, 80, starts=(1, 2, 63)),
            Sizes(128, 2, 4, 96, 64, starts=(64,), initial=True, rows=2),
            Sizes(200, 1, 3, 33, 130, starts=(60, 61, 199), rows=2),
            Sizes(150, 2, 2, 128, 256, starts=(100,), initial=True),
            Sizes(130, 1, 2, 256, 128, rows=2),
        )
    ),
]


class Case:
    """Random inputs, and gradients of outputs and final state."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype = DTYPE) -> None:
        rows, tokens, heads = sizes.rows, sizes.tokens, sizes.heads
        generator = torch.Generator().manual_seed(tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, generator=generator)

        q, k = (draw(tokens, sizes.key_heads, sizes.key_dim).to(dtype) for _ in range(2))
        v, beta = draw(tokens, heads, sizes.value_dim).to(dtype), draw(tokens, heads).sigmoid().to(dtype)
        rates = torch.logspace(-4, 1, heads)
        log_decay = -rates * torch.nn.functional.softplus(draw(tokens, heads))
        state = (draw(heads, sizes.key_dim, sizes.value_dim),) if sizes.initial else ()
        self.leaves = [x.to(DEVICE) for x in (q, k, v, log_decay, beta, *state)]
        self.documents: Tensor | None = None
        if sizes.starts:
            self.documents = torch.zeros(rows, tokens, dtype=torch.int64, device=DEVICE)
            for start in sizes.starts:
                self.documents[0, start:] += 1
        self.dy = draw(tokens, heads, sizes.value_dim).to(DEVICE, dtype)
        self.d_final = draw(heads, sizes.key_dim, sizes.value_dim).to(DEVICE)

    def both_ways(self, rule: op.DeltaRule, dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in self.leaves]
        y, final = rule(*leaves[:5], self.documents, *leaves[5:])
        grads = (self.dy.to(y.dtype), self.d_final.to(final.dtype))
        return [y.detach(), final.detach(), *torch.autograd.grad((y, final), leaves, grads)]


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float = BOUND) -> None:
    names = ("outputs", "state", "dq", "dk", "dv", "d log decay", "dβ", "d state")
    for name, x, wanted in zip(names, found, expected, strict=False):
        error = (x.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)
        assert error < bound, f"{name}: relative error {error:.1e}"


@needs_kernels
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_near_float64(sizes: Sizes) -> None:
    case = Case(sizes)
    found = case.both_ways(FusedDeltaRule())
    assert_near(found, case.both_ways(reference.delta_rule, torch.float64))
    assert [x.dtype for x in found[2:]] == [x.dtype for x in case.leaves]


@needs_kernels
@pytest.mark.parametrize("log_decay", [0.0, pytest.param(-200.0, marks=LONG)])
def test_equal_keys_that_overwrite_each_other(log_decay: float) -> None:
    """The inverse of a chunk is far from its Neumann series; nothing or everything is forgotten."""
    case = Case(Sizes(67 if GPU else 64, heads=1))
    _, k, _, decay, beta = case.leaves
    k.copy_(k[:, :1].expand_as(k))
    k[:, 40:45] = 0
    decay.fill_(log_decay)
    beta.fill_(1)
    found, expected = case.both_ways(FusedDeltaRule()), case.both_ways(reference.delta_rule, torch.float64)
    assert all(x.isfinite().all() for x in found)
    assert_near(found[:2], expected[:2], bound=BOUND if GPU else 1e-4)


@needs_kernels
def test_inputs_may_be_slices_and_gradients_missing() -> None:
    """As in the layer: slices of one tensor. Only some outputs and inputs take part."""
    case = Case(Sizes(5, heads=1, key_heads=1))
    q, k, v, *scalars = case.leaves
    q, k, v = torch.cat([q, k, v], 3).requires_grad_().split([16, 16, 16], 3)
    fused = FusedDeltaRule()
    y, final = fused(q, k, v, *scalars)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_final = reference.delta_rule(*wide, *(x.double() for x in scalars))
    d_final = case.d_final.double()
    assert_near(
        [
            *torch.autograd.grad(y, (q, k), case.dy, retain_graph=True),
            *torch.autograd.grad(final, v, case.d_final),
        ],
        [
            *torch.autograd.grad(expected, wide[:2], case.dy.double(), retain_graph=True),
            *torch.autograd.grad(expected_final, wide[2], d_final),
        ],
    )


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=LONG)])
@pytest.mark.parametrize("which", [2, *(pytest.param(i, marks=LONG) for i in (0, 1, 4))])
def test_what_is_not_finite_stays_so(which: int, value: float) -> None:
    """Outputs of its token and all later states are not finite; chunks before it are untouched."""
    case = Case(Sizes(66, heads=1))
    case.leaves[which][:, 65] = value
    y, final, *_ = case.both_ways(FusedDeltaRule())
    assert y[:, :64].isfinite().all()
    assert not y[:, 65].isfinite().any()
    assert which == 0 or not final.isfinite().all()  # a query changes no state


@needs_kernels
def test_rows_of_no_tokens_and_heads_too_large_take_the_reference() -> None:
    case = Case(Sizes(3, heads=1, key_dim=op.MAX_CHANNELS + 1))
    found, expected = case.both_ways(FusedDeltaRule()), case.both_ways(reference.delta_rule)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    y, _ = FusedDeltaRule()(*(x[:0] for x in case.leaves))
    assert y.shape == (0, 3, 1, 16)


@needs_kernels
@pytest.mark.parametrize("key_heads", [pytest.param(1, marks=LONG), 2])
def test_saved_bytes(key_heads: int) -> None:
    case = Case(Sizes(5, key_heads, 2, 16, 24))
    q, k, v, log_decay, beta = case.leaves
    qkv = torch.cat([q, k, v.reshape(1, 5, key_heads, -1)], 3).requires_grad_()
    sizes = [16, 16, 48 // key_heads]

    def forward() -> tuple[Tensor, Tensor]:
        q, k, v = qkv.split(sizes, 3)
        return FusedDeltaRule()(q, k, v.flatten(2).unflatten(2, (2, 24)), log_decay, beta)

    wide = 4
    expected = fused_delta_rule_bytes(1, 5, 2, key_heads, 16, 24, narrow=DTYPE.itemsize, wide=wide)
    assert kept(forward, [beta]) == expected


def test_choice_and_support() -> None:
    assert op.fuses("cuda", torch.bfloat16, 128, 256)
    assert not op.fuses("cuda", torch.bfloat16, 128, 512)
    assert not op.fuses("cuda", torch.float32, 128)
    assert not op.fuses("cpu", torch.bfloat16, 128)
    assert "needs a GPU" in op.choose(torch.device("cpu"), torch.bfloat16).reason
