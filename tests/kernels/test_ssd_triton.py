"""The fused scan is near float64, gradients included, for odd sizes, short documents and any strides.

Without a GPU the same kernels are interpreted, in a process of their own; interpreted bfloat16 is wrong, so
there float16 stands in for it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.kernels import causal_conv, gated_norm, ssd
from braid.kernels.ssd import reference
from braid.nn.cost import Workload
from braid.nn.mamba2 import Mamba2
from tests.kernels.interpreting import DEVICE, GPU, INTERPRETED, needs_kernels
from tests.kernels.test_ssd import documents
from tests.planning.estimate.reality import kept

pytest.importorskip("triton")
pytestmark = needs_kernels

if GPU or INTERPRETED:
    from braid.kernels.ssd.fused import FusedSsd

NAMES = ("y", "final", "x", "dt", "a", "b", "c", "skip", "initial")
NARROW = torch.bfloat16 if GPU else torch.float16
BOUND = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}


class Case(NamedTuple):
    """Sizes of a problem."""

    rows: int
    tokens: int
    groups: int
    repeats: int
    head_dim: int
    state: int


def draw(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """x, dt, a, b, c, skip and an initial state; x, b and c are slices of one tensor, as a layer has them."""
    generator = torch.Generator().manual_seed(sum(case))
    rows, tokens, groups, repeats, head_dim, state = case
    heads = groups * repeats

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    sizes = [heads * head_dim, groups * state, groups * state]
    x, b, c = normal(rows, tokens, sum(sizes)).to(dtype).split(sizes, -1)
    return [
        x.unflatten(-1, (heads, head_dim)), normal(rows, tokens, heads).exp() / 4, -normal(heads).exp(),
        b.unflatten(-1, (groups, state)), c.unflatten(-1, (groups, state)), normal(heads),
        normal(rows, heads, head_dim, state),
    ]  # fmt: skip


def both_ways(scan: ssd.Ssd, inputs: list[Tensor], documents_BT: Tensor | None) -> list[Tensor]:
    """Outputs, final state, and the gradients of all inputs; without an initial state if there are six."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = scan(*leaves[:6], documents_BT, *leaves[6:])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(y.shape, generator=generator).to(NARROW).to(y) for y in results]
    return [*results, *torch.autograd.grad(results, leaves, probes)]


def assert_near_float64(inputs: list[Tensor], documents_BT: Tensor | None) -> None:
    documents_BT = None if documents_BT is None else documents_BT.to(DEVICE)
    bound = BOUND[inputs[0].dtype]
    ours = both_ways(FusedSsd(), inputs, documents_BT)
    truth = both_ways(reference.ssd, [tensor.double() for tensor in inputs], documents_BT)
    for name, found, wanted in zip(NAMES, ours, truth, strict=False):
        error = ((found.double() - wanted).norm() / wanted.norm()).item()
        assert error < bound, (name, error)


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        (Case(2, 9, 1, 2, 3, 2), [[9], [3, 5, 1]]),
        (Case(1, 34, 2, 1, 20, 24), [[1, 1, 1, 30, 1]]),
        (Case(1, 140, 1, 1, 16, 16), [[50, 90]]),
    ],
    ids=str,
)
def test_documents_and_initial_states(case: Case, lengths: list[list[int]]) -> None:
    assert_near_float64(draw(case, torch.float32), documents(lengths))


def test_16_bits_and_whole_rows() -> None:
    assert_near_float64(draw(Case(1, 70, 1, 2, 16, 16), NARROW)[:6], None)


def test_nothing_crosses_a_boundary() -> None:
    """However large: not a bit of the next document changes, nor of any gradient."""
    inputs, boundary = draw(Case(1, 20, 1, 1, 16, 16), torch.float32)[:6], documents([[7, 13]]).to(DEVICE)
    poisoned = [tensor.clone() for tensor in inputs]
    for index in (0, 3, 4):
        poisoned[index][:, :7] = 1e18
    clean, dirty = (both_ways(FusedSsd(), given, boundary) for given in (inputs, poisoned))
    for index in (0, 2, 5, 6):
        assert torch.equal(clean[index][:, 7:], dirty[index][:, 7:])
    assert torch.equal(clean[1], dirty[1])


def test_nan_and_inf_reach_the_outputs() -> None:
    inputs = draw(Case(1, 20, 1, 1, 16, 16), torch.float32)[:6]
    inputs[0] = inputs[0].clone()
    inputs[0][0, 3, 0, 2], inputs[0][0, 5, 0, 4] = torch.nan, torch.inf
    y_BTHD, final = FusedSsd()(*inputs)
    assert y_BTHD[0, 3:, 0, 2].isnan().all()
    assert not y_BTHD[0, 5:, 0, 4].isfinite().any()
    assert final[0, 0, 2].isnan().all()


def test_states_that_do_not_fit_go_to_the_reference() -> None:
    inputs = draw(Case(1, 5, 1, 1, 130, 3), torch.float32)[:6]
    assert torch.equal(FusedSsd()(*inputs)[0], reference.ssd(*inputs)[0])
    none = draw(Case(0, 5, 1, 1, 16, 3), torch.float32)[:6]
    assert FusedSsd()(*none)[0].shape == (0, 5, 1, 16)


@pytest.mark.skipif(not GPU, reason="large sizes need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 300, 2, 3, 64, 128), Case(1, 1000, 1, 5, 32, 16), Case(1, 513, 1, 4, 128, 128),
        Case(1, 300, 1, 2, 64, 256), Case(2, 65, 1, 2, 80, 96), Case(1, 1, 2, 3, 64, 128),
        Case(1, 777, 2, 2, 128, 256), Case(1, 2100, 4, 1, 64, 64),
    ],
    ids=str,
)  # fmt: skip
def test_published_sizes_twice_with_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    inputs = draw(case, dtype)
    lengths = [case.tokens] if case.tokens < 60 else [1, 1, 50, case.tokens - 52]
    boundary = documents([lengths] * case.rows).to(DEVICE)
    assert_near_float64(inputs, boundary)
    first, second = (both_ways(FusedSsd(), inputs, boundary) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("norm_per_group", [True, False])
def test_a_fused_layer_keeps_what_it_says(groups: int, norm_per_group: bool) -> None:
    """To the byte: convolution, scan and gated norm save no more than their inputs and a few scalars."""
    shape = architecture.Mamba2(heads=2, head_dim=4, state=4, groups=groups, norm_per_group=norm_per_group)
    conv, gate = (op.choose(torch.device("cuda"), NARROW).function for op in (causal_conv, gated_norm))
    layer = Mamba2(shape, 12, 1e-5, FusedSsd(), conv=conv, gate=gate, device=DEVICE, dtype=NARROW)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BTC = torch.randn(1, 5, 12).to(NARROW).to(DEVICE).requires_grad_()
    cost = layer.cost(Workload(rows=1, tokens=5, dtype=NARROW, device="cuda"))
    assert cost.kept == kept(lambda: layer(x_BTC), layer.parameters())


def test_the_choice_says_why() -> None:
    choice = ssd.choose(torch.device("cuda"), torch.bfloat16)
    assert str(choice).startswith("ssd: fused, because ")
    assert "float64" in str(ssd.choose(torch.device("cuda"), torch.float64))
