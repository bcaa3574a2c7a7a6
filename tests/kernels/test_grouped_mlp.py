"""The experts' MLP: what each implementation computes, for any spread of rows over experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation
from braid.kernels import grouped_mlp
from braid.kernels.activation import activate, projections
from braid.kernels.grouped_mlp import grouped, reference
from braid.kernels.grouped_mlp.product import LowRank

CPU = torch.device("cpu")
ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "relu2", "gelu")


def plain(activation: Activation, x: Tensor, w_in: Tensor, w_down: Tensor) -> Tensor:
    """One row through one expert, with the activations written out."""
    if activation == "swiglu":
        gate, up = w_in[:, 0] @ x, w_in[:, 1] @ x
        inner = gate / (1 + torch.exp(-gate)) * up
    elif activation == "relu2":
        inner = (w_in[:, 0] @ x).clamp(min=0) ** 2
    else:
        up = w_in[:, 0] @ x
        inner = up * (1 + torch.erf(up / 2**0.5)) / 2
    return w_down @ inner


def inputs(
    counts: list[int], hidden: int, ffn: int, activation: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + hidden)
    gates = len(projections(activation))
    shapes = (
        (sum(counts), hidden),
        (sum(counts),),
        (len(counts), ffn, gates, hidden),
        (len(counts), hidden, ffn),
    )
    x, probs, w_in, w_down = (
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes
    )
    return x, probs, w_in, w_down


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 7], [1], [0, 0]])
def test_reference_equals_one_row_at_a_time(activation: Activation, counts: list[int]) -> None:
    x, probs, w_in, w_down = inputs(counts, 7, 5, activation, torch.float64)
    actual = reference.grouped_mlp(x, probs, torch.tensor(counts), w_in, w_down, activation)
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = [plain(activation, x[n], w_in[e], w_down[e]) * probs[n] for n, e in enumerate(expert)]
    expected = torch.stack(rows) if rows else x * 0
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected**2).sum(), (x, probs, w_in, w_down), materialize_grads=True)
    grads = torch.autograd.grad((actual**2).sum(), (x, probs, w_in, w_down), materialize_grads=True)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-12)
    for e, count in enumerate(counts):
        if not count:
            assert not grads[2][e].any()
            assert not grads[3][e].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", [[5, 0, 9, 0, 18], [0, 0, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_equals_float64(activation: Activation, counts: list[int], dtype: torch.dtype) -> None:
    tensors = inputs(counts, 24, 40, activation, dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    (x, probs, *weights), (wide_x, wide_probs, *wide_weights) = tensors, wide
    expected = reference.grouped_mlp(wide_x, wide_probs, torch.tensor(counts), *wide_weights, activation)
    actual = grouped.grouped_mlp(x, probs, torch.tensor(counts), *weights, activation)
    bound = 40 * torch.finfo(dtype).eps
    assert relative(actual, expected) < bound
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad(actual, tensors, probe.to(dtype))
    wanted = torch.autograd.grad(expected, wide, probe.to(dtype).double())
    for grad, want in zip(grads, wanted, strict=True):
        assert relative(grad, want) < bound
    for e, count in enumerate(counts):
        if not count:
            assert not grads[2][e].any()
            assert not grads[3][e].any()


def low_rank(weight: Tensor, rank: int) -> LowRank:
    """Of a weight of experts, E, O, I."""
    experts, outputs, channels = weight.shape
    generator = torch.Generator().manual_seed(outputs)
    down = torch.randn(experts, rank, channels, generator=generator).to(weight.dtype)
    up = torch.randn(experts, outputs, rank, generator=generator).to(weight.dtype)
    return LowRank(down.requires_grad_(), up.requires_grad_(), 0.7)


@pytest.mark.parametrize(
    ("activation", "adapted"), [("swiglu", "gate up down"), ("swiglu", "up"), ("gelu", "down")]
)
@pytest.mark.parametrize("kernel", ["reference", "grouped"])
def test_adapters_equal_weights_that_they_are_merged_into(
    activation: Activation, adapted: str, kernel: str
) -> None:
    """In float64, where the loop is exact; grouped products have no float64, and their sums are rounded."""
    counts, exact = [5, 0, 9, 2], kernel == "reference"
    tensors = inputs(counts, 12, 20, activation, torch.float64 if exact else torch.float32)
    x, probs, w_in, w_down = (each.detach().double().requires_grad_() for each in tensors)
    projected = {**dict(zip(projections(activation), tensors[2].unbind(2), strict=True)), "down": tensors[3]}
    adapters = {name: low_rank(projected[name], 4) for name in adapted.split()}
    wide = {
        name: LowRank(*(each.detach().double().requires_grad_() for each in adapter[:2]), adapter.scale)
        for name, adapter in adapters.items()
    }
    added = {name: 0.7 * adapter.up_EOR @ adapter.down_ERI for name, adapter in wide.items()}
    merged_in = torch.stack(
        [w_in[:, :, place] + added.get(name, 0) for place, name in enumerate(projections(activation))], 2
    )
    merged = w_in.new_tensor(counts).long(), merged_in, w_down + added.get("down", 0)
    expected = reference.grouped_mlp(x, probs, *merged, activation)
    function = reference.grouped_mlp if exact else grouped.grouped_mlp
    actual = function(tensors[0], tensors[1], torch.tensor(counts), *tensors[2:], activation, adapters=adapters)
    learned = [each for adapter in adapters.values() for each in adapter[:2]]
    wanted = [each for adapter in wide.values() for each in adapter[:2]]
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad(actual, [*tensors, *learned], probe.to(actual.dtype))
    wants = torch.autograd.grad(expected, [x, probs, w_in, w_down, *wanted], probe)
    for grad, want in zip((actual, *grads), (expected, *wants), strict=True):
        assert relative(grad, want) < (1e-13 if exact else 1e-5)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("device", "dtype", "hidden", "experts", "name", "word"),
    [
        ("cpu", torch.float64, 64, 64, "reference", "float64"),
        ("cpu", torch.float32, 64, 4, "reference", "loop over 4 experts"),
        ("cpu", torch.float32, 64, 64, "grouped", "64 experts"),
        ("cpu", torch.float32, 66, 64, "reference", "16 bytes"),
        ("cuda", torch.bfloat16, 64, 4, "fused", "bfloat16 on cuda"),
        ("cuda", torch.bfloat16, 66, 4, "reference", "16 bytes"),
        ("cuda", torch.float32, 64, 4, "reference", "float32 on cuda"),
    ],
)
def test_choice_names_its_reason(
    device: str, dtype: torch.dtype, hidden: int, experts: int, name: str, word: str
) -> None:
    choice = grouped_mlp.choose(torch.device(device), dtype, hidden=hidden, ffn=32, experts=experts)
    assert choice.name == name
    assert word in choice.reason


@pytest.mark.parametrize(
    ("device", "rank", "name", "reason"),
    [
        ("cuda", 8, "grouped", "fused, which is faster, has no adapters"),
        ("cuda", 12, "reference", "adapters of whole 16 bytes, not of rank 12"),
        ("cpu", 8, "grouped", "64 experts"),
    ],
)
def test_experts_with_adapters_run_on_grouped_products(device: str, rank: int, name: str, reason: str) -> None:
    given = {"hidden": 64, "ffn": 32, "experts": 64, "rank": rank}
    choice = grouped_mlp.choose(torch.device(device), torch.bfloat16, **given)
    assert choice.name == name
    assert reason in choice.reason


def test_what_fused_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needs = (("torch", "torch"), ("one-part", "torch.nowhere"), ("another", "nowhere.at_all"))
    monkeypatch.setattr(grouped_mlp, "NEEDS", needs)
    choice = grouped_mlp.choose(torch.device("cuda"), torch.bfloat16, hidden=64, ffn=32, experts=4)
    assert choice.name == "grouped"
    assert "needs one-part and another: " in choice.reason
    assert choice.reason.endswith("pip install one-part another")


def test_activations() -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    torch.testing.assert_close(activate("swiglu", x, x + 1), x * torch.sigmoid(x) * (x + 1))
    torch.testing.assert_close(activate("relu2", x), F.relu(x) ** 2)
    torch.testing.assert_close(activate("gelu", x), x * torch.distributions.Normal(0, 1).cdf(x))
