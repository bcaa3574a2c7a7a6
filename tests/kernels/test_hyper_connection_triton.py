"""Hyper-connections in Triton: results and every gradient near float64, for odd sizes, any number of streams.

Without a GPU the same kernels are interpreted, in a process of their own: Triton asks whether to interpret when
it is first imported. Interpreted bfloat16 is wrong, so there the parts of a weight are checked by themselves.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from braid.kernels import hyper_connection
from braid.kernels.hyper_connection import Form, Parameters, reference
from braid.kernels.hyper_connection import kept as closed_forms

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
here = pytest.mark.skipif(not (GPU or INTERPRETED), reason="kernels need a GPU or the interpreter")

if INTERPRETED:
    from triton.runtime import interpreter

    set_attribute = interpreter._LangPatchScope.set_attr

    def set_and_mend(scope: Any, of: object, name: str, value: object) -> None:
        """Triton 3.6 makes an index of an array with one entry, which numpy 2.4 no longer does."""
        set_attribute(scope, of, name, (lambda x: x.handle.data.item()) if name == "__index__" else value)

    interpreter._LangPatchScope.set_attr = set_and_mend  # type: ignore[method-assign]

if GPU or INTERPRETED:
    from braid.kernels.hyper_connection.device.gradients import GradientVariant, WeightVariant
    from braid.kernels.hyper_connection.device.launch import Launcher
    from braid.kernels.hyper_connection.device.mapping import MapVariant
    from braid.kernels.hyper_connection.device.projection import ProjectionVariant, cut
    from braid.kernels.hyper_connection.device.streams import StreamVariant
    from braid.kernels.hyper_connection.fused import Fused

    STREAMS = StreamVariant(tokens=4, channels=16)
    TILES = Fused(
        project=ProjectionVariant(tokens=16, depth=16, splits=3),
        map=MapVariant(),
        aggregate=STREAMS,
        mix=STREAMS,
        mix_backward=STREAMS,
        aggregate_backward=STREAMS,
        map_backward=MapVariant(tokens=4),
        gradients=GradientVariant(tokens=16, channels=16, splits=2),
        weight_gradient=WeightVariant(depth=16, channels=32, per_sm=1),
    )
    """Tiles that are small beside the cases, so that there are several of each."""

DEVICE = torch.device("cuda" if GPU else "cpu")
FORM = Form(steps=20, eps=1e-6, norm_eps=1e-5)
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
ROUNDING = {torch.float32: 3e-5 if GPU else 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL = ((5, 1, 9), (17, 2, 18), (3, 3, 17), (2, 4, 24))
LARGE = ((300, 1, 9), (131, 2, 72), (67, 4, 200), (33, 3, 61), (1, 4, 24))
CASES = (
    [(*size, dtype) for size in LARGE for dtype in DTYPES]
    if GPU
    else [*((*size, torch.float32) for size in SMALL), (2, 4, 24, torch.float16)]
)


class Wanted(NamedTuple):
    """What should come, and how long that is."""

    value: Tensor
    length: float


class Leaves:
    """Random inputs of a sublayer and of an exit behind it."""

    def __init__(
        self, tokens: int, streams: int, channels: int, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        rows, width = streams * (streams + 2), streams * channels
        drawn = (
            scale * torch.randn(tokens, streams, channels),
            torch.randn(channels),
            torch.randn(rows, width) * width**-0.5,
            torch.tensor([0.7, 0.9, 1.1]),
            torch.randn(rows) * 0.3,
            torch.randn(streams, width) * width**-0.5,
            torch.ones(1),
            torch.randn(streams),
        )
        narrow = [dtype, dtype, *(torch.float32,) * 6]
        self.given = [each.to(DEVICE, kind) for each, kind in zip(drawn, narrow, strict=True)]
        self.to_streams = torch.randn(tokens, streams, channels).to(DEVICE, dtype)
        self.to_exit = torch.randn(tokens, channels).to(DEVICE, dtype)

    def both_ways(self, implementation: Any, *, form: Form = FORM, wide: bool = False) -> list[Tensor]:
        """Results and gradients, of float64 where asked to."""
        leaves = [(g.double() if wide else g.detach()).requires_grad_() for g in self.given]
        results, loss = _loss(implementation, form, leaves[1:], leaves[0], self.to_streams, self.to_exit)
        return [*results, *torch.autograd.grad(loss, leaves)]

    def expected(self, form: Form = FORM) -> list[Wanted]:
        """In float64. Gradients that are sums over tokens may be next to nothing where their terms are not, and
        are as long as the terms together."""
        found = self.both_ways(reference, form=form, wide=True)
        x, *shared = (g.double() for g in self.given)

        def of_token(leaves: list[Tensor], *token: Tensor) -> Tensor:
            return _loss(reference, form, leaves, *(each.unsqueeze(0) for each in token))[1]

        per_token = torch.func.vmap(torch.func.grad(of_token), in_dims=(None, 0, 0, 0))
        terms = per_token(shared, x, self.to_streams.double(), self.to_exit.double())
        together = [*found[: -len(terms)], *terms]
        lengths = [max(each.norm().item(), 1.0) for each in together]
        return [
            Wanted(wanted, max(wanted.norm().item(), length))
            for wanted, length in zip(found, lengths, strict=True)
        ]


def _loss(
    implementation: Any, form: Form, shared: list[Tensor], x: Tensor, to_streams: Tensor, to_exit: Tensor
) -> tuple[list[Tensor], Tensor]:
    """A sublayer and an exit behind it: what they give, and one number of that."""
    bias, *numbers = shared
    entered = implementation.pre(x, Parameters(*numbers[:3]), form)
    out = implementation.post(entered.ways, torch.tanh(entered.branch_NC), bias)
    exit_ = implementation.contract(out, Parameters(*numbers[3:]), form)
    loss = (out * to_streams.to(out.dtype)).sum() + (exit_ * to_exit.to(out.dtype)).sum()
    return [entered.branch_NC, entered.ways.post_NS, entered.ways.res_NSS, out, exit_], loss


def assert_near(actual: list[Tensor], expected: list[Wanted], bound: float) -> None:
    """Each within the bound, of the length of what is expected."""
    for number, (found, (wanted, length)) in enumerate(zip(actual, expected, strict=True)):
        assert found.shape == wanted.shape
        assert (found.double() - wanted).norm().item() <= bound * length, f"number {number}"


@here
@pytest.mark.parametrize(("tokens", "streams", "channels", "dtype"), CASES)
def test_results_and_gradients_are_near_float64(
    tokens: int, streams: int, channels: int, dtype: torch.dtype
) -> None:
    leaves = Leaves(tokens, streams, channels, dtype)
    actual = leaves.both_ways(TILES)
    expected = leaves.expected()
    assert_near(actual[1:3], expected[1:3], 2e-5)
    assert_near(actual, expected, ROUNDING[dtype])


@here
@pytest.mark.parametrize(("streams", "dtype"), [(2, torch.float16), (2, torch.float32), (8, torch.float32)])
def test_the_usual_variants(streams: int, dtype: torch.dtype) -> None:
    leaves = Leaves(3, streams, 16, dtype)
    actual = leaves.both_ways(Fused.of(streams, dtype))
    assert_near(actual, leaves.expected(), ROUNDING[dtype])


@here
def test_streams_may_begin_anywhere() -> None:
    """Also after others that began where memory is aligned, for which kernels have been compiled."""
    leaves, fused = Leaves(3, 2, 16, torch.float32), copy.deepcopy(TILES)
    leaves.both_ways(fused)
    x = leaves.given[0]
    leaves.given[0] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert_near(leaves.both_ways(fused), leaves.expected(), ROUNDING[torch.float32])


@here
@pytest.mark.parametrize("steps", [1, 2])
def test_few_sinkhorn_steps(steps: int) -> None:
    leaves, form = Leaves(3, 2, 16, torch.float32), FORM._replace(steps=steps, eps=0.2, norm_eps=0.7)
    actual = leaves.both_ways(TILES, form=form)
    assert_near(actual, leaves.expected(form), ROUNDING[torch.float32])


@here
def test_a_weight_is_the_sum_of_its_parts() -> None:
    weight = torch.randn(5, 77, device=DEVICE) * 0.01
    if GPU:
        assert torch.equal(cut(Launcher(), weight, 3).double().sum(0), weight.double())
    else:  # interpreted bfloat16 is cut off instead of rounded, which leaves a part that is one bit larger
        torch.testing.assert_close(cut(Launcher(), weight, 3).float().sum(0), weight, rtol=1e-6, atol=0)


@here
def test_large_float16_streams_do_not_overflow() -> None:
    leaves = Leaves(3, 2, 40, torch.float16, scale=300.0)
    actual, expected = leaves.both_ways(TILES), leaves.expected()
    assert_near(actual[:5], expected[:5], ROUNDING[torch.float16])
    assert all(found.isfinite().all() for found in actual)


@here
def test_tokens_of_zeros_have_finite_gradients() -> None:
    leaves = Leaves(4, 2, 16, torch.float32)
    leaves.given[0][1:3] = 0
    actual = leaves.both_ways(TILES)
    assert all(found.isfinite().all() for found in actual)
    assert_near(actual[:5], leaves.expected()[:5], ROUNDING[torch.float32])


@here
def test_the_first_index_of_the_mixing_is_the_source() -> None:
    x = torch.eye(2, device=DEVICE).repeat(1, 1, 1)
    res = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=DEVICE)
    zeros = torch.zeros(1, 2, device=DEVICE)
    out = TILES.post(hyper_connection.Ways(x, zeros, res), zeros)
    assert torch.equal(out[0], res[0].t())


@here
def test_no_tokens_at_all() -> None:
    actual = Leaves(0, 2, 5, torch.float32).both_ways(TILES)
    assert not any(grad.any() for grad in actual[5:])


@here
def test_the_same_comes_every_time_to_the_last_bit() -> None:
    leaves = Leaves(5, 2, 24, DTYPES[-1])
    for one, other in zip(*(leaves.both_ways(TILES) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not GPU, reason="the interpreter does one thing after the other")
@pytest.mark.parametrize(("tokens", "streams", "channels"), [(19, 8, 96), (67, 4, 200), (70, 5, 104)])
def test_no_tile_is_overwritten_while_it_is_read(tokens: int, streams: int, channels: int) -> None:
    """A product still under way as its tile is replaced would give other bits now and then."""
    leaves, usual = Leaves(tokens, streams, channels, torch.bfloat16), Fused.of(streams, torch.bfloat16)
    first, *others = (leaves.both_ways(usual) for _ in range(6))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@here
def test_backward_keeps_nothing_wider_than_the_streams() -> None:
    """Of tensors as large as the streams, forward keeps the streams alone."""
    tokens, streams, channels = 8, 4, 64
    leaves = Leaves(tokens, streams, channels, torch.float16)
    x, bias, *numbers = (each.requires_grad_() for each in leaves.given)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        entered = TILES.pre(x, Parameters(*numbers[:3]), FORM)
        TILES.post(entered.ways, entered.branch_NC, bias)
    for parameter in (bias, *numbers):
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == closed_forms.fused(tokens, streams, channels, narrow=2, wide=4)


@pytest.mark.skipif(GPU or INTERPRETED, reason="runs where kernels cannot")
def test_all_of_this_under_the_interpreter() -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *plugins, __file__],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
