"""Hyper-connections in Triton: results and every gradient near float64, for odd sizes, any number of streams.

Without a GPU the same kernels are interpreted, in a process of their own: Triton asks whether to interpret when
it is first imported. Interpreted bfloat16 is wrong, so there the parts of a weight are checked by themselves.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from braid.kernels import hyper_connection
from braid.kernels.hyper_connection import ConnectionForm, Parameters, reference
from braid.kernels.hyper_connection import activation_bytes as closed_forms
from braid.nn.delayed_wgrad import DelayedWgrad
from tests.kernels.interpreting import GPU, INTERPRETED, needs_kernels
from tests.nn.test_hyper_connection import Doubled

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

if GPU or INTERPRETED:
    from braid.kernels.hyper_connection.device.gradients import GradientVariant, WgradVariant
    from braid.kernels.hyper_connection.device.mapping import MapVariant
    from braid.kernels.hyper_connection.device.projection import ProjectionVariant, cut
    from braid.kernels.hyper_connection.device.streams import StreamVariant
    from braid.kernels.hyper_connection.fused import FusedHyperConnection
    from braid.kernels.launch import Launcher

    STREAMS = StreamVariant(tokens=4, channels=16)
    TILES = FusedHyperConnection(
        project=ProjectionVariant(tokens=16, depth=16, splits=3),
        map=MapVariant(),
        aggregate=STREAMS,
        mix=STREAMS,
        mix_backward=STREAMS,
        aggregate_backward=STREAMS,
        map_backward=MapVariant(tokens=4),
        gradients=GradientVariant(tokens=16, channels=16, splits=2),
        weight_gradient=WgradVariant(depth=16, channels=32, per_sm=1),
    )
    """Tiles that are small beside the cases, so that there are several of each."""

    class Counting(Launcher):
        """Knows what it has launched."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __call__(self, *given: Any, **options: Any) -> None:
            self.count += 1
            super().__call__(*given, **options)


DEVICE = torch.device("cuda" if GPU else "cpu")
FORM = ConnectionForm(steps=20 if GPU else 3, eps=1e-6, norm_eps=1e-5)
"""Twenty steps are most of what the interpreter does; there one test takes them."""
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
ROUNDING = {torch.float32: 3e-5 if GPU else 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL = ((5, 1, 9), (17, 2, 18), (3, 3, 17), (2, 4, 24))
LARGE = ((300, 1, 9), (131, 2, 72), (67, 4, 200), (33, 3, 61), (1, 4, 24))
CASES = (
    [(*size, dtype) for size in LARGE for dtype in DTYPES]
    if GPU
    else [
        *(pytest.param(*size, torch.float32, marks=pytest.mark.long) for size in SMALL if size != (3, 3, 17)),
        (3, 3, 17, torch.float32),
        (2, 4, 24, torch.float16),
    ]
)


SLOW = () if GPU else (pytest.mark.long,)
"""Cases that the interpreter takes seconds for."""


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

    def both_ways(
        self,
        implementation: Any,
        *,
        form: ConnectionForm = FORM,
        wide: bool = False,
        wgrad_store: DelayedWgrad | None = None,
    ) -> list[Tensor]:
        """Results and gradients, of float64 where asked to."""
        leaves = [(g.double() if wide else g.detach()).requires_grad_() for g in self.given]
        results, loss = _loss(
            implementation, form, leaves[1:], leaves[0], self.to_streams, self.to_exit, wgrad_store
        )
        return [*results, *torch.autograd.grad(loss, leaves)]

    def expected(self, form: ConnectionForm = FORM) -> list[Wanted]:
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
    implementation: Any,
    form: ConnectionForm,
    shared: list[Tensor],
    x: Tensor,
    to_streams: Tensor,
    to_exit: Tensor,
    wgrad_store: DelayedWgrad | None = None,
) -> tuple[list[Tensor], Tensor]:
    """A sublayer and an exit behind it: what they give, and one number of that."""
    bias, *numbers = shared
    entered = implementation.pre(x, Parameters(*numbers[:3]), form, wgrad_store)
    out = implementation.post(entered.post_inputs, torch.tanh(entered.branch_NC), bias)
    exit_ = implementation.contract(out, Parameters(*numbers[3:]), form, wgrad_store)
    loss = (out * to_streams.to(out.dtype)).sum() + (exit_ * to_exit.to(out.dtype)).sum()
    return [entered.branch_NC, entered.post_inputs.post_NS, entered.post_inputs.res_NSS, out, exit_], loss


def assert_near(actual: list[Tensor], expected: list[Wanted], bound: float) -> None:
    """Each within the bound, of the length of what is expected."""
    for number, (found, (wanted, length)) in enumerate(zip(actual, expected, strict=True)):
        assert found.shape == wanted.shape
        assert (found.double() - wanted).norm().item() <= bound * length, f"number {number}"


@needs_kernels
@pytest.mark.parametrize(("tokens", "streams", "channels", "dtype"), CASES)
def test_results_and_gradients_are_near_float64(
    tokens: int, streams: int, channels: int, dtype: torch.dtype
) -> None:
    leaves = Leaves(tokens, streams, channels, dtype)
    actual = leaves.both_ways(TILES)
    expected = leaves.expected()
    assert_near(actual[1:3], expected[1:3], 2e-5)
    assert_near(actual, expected, ROUNDING[dtype])


@needs_kernels
@pytest.mark.parametrize(
    ("streams", "dtype"), [(2, torch.float16), (2, torch.float32), pytest.param(8, torch.float32, marks=SLOW)]
)
def test_the_usual_variants(streams: int, dtype: torch.dtype) -> None:
    leaves = Leaves(3, streams, 16, dtype)
    actual = leaves.both_ways(FusedHyperConnection.of(streams, dtype))
    assert_near(actual, leaves.expected(), ROUNDING[dtype])


@needs_kernels
def test_streams_may_begin_anywhere() -> None:
    """Also after others that began where memory is aligned, for which kernels have been compiled."""
    leaves, fused = Leaves(3, 2, 16, torch.float32), copy.deepcopy(TILES)
    if GPU:
        leaves.both_ways(fused)
    x = leaves.given[0]
    leaves.given[0] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert_near(leaves.both_ways(fused), leaves.expected(), ROUNDING[torch.float32])


@needs_kernels
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=SLOW), 20])
def test_few_and_many_sinkhorn_steps(steps: int) -> None:
    """Few from other constants than the usual ones."""
    leaves = Leaves(3, 3, 16, torch.float32)
    form = FORM._replace(steps=steps, **({} if steps == 20 else {"eps": 0.2, "norm_eps": 0.7}))
    actual = leaves.both_ways(TILES, form=form)
    assert_near(actual, leaves.expected(form), ROUNDING[torch.float32])


@needs_kernels
def test_a_weight_is_the_sum_of_its_parts() -> None:
    weight = torch.randn(5, 77, device=DEVICE) * 0.01
    if GPU:
        assert torch.equal(cut(Launcher(), weight, 3).double().sum(0), weight.double())
    else:  # interpreted bfloat16 is cut off instead of rounded, which leaves a part that is one bit larger
        torch.testing.assert_close(cut(Launcher(), weight, 3).float().sum(0), weight, rtol=1e-6, atol=0)


@needs_kernels
def test_large_float16_streams_do_not_overflow() -> None:
    leaves = Leaves(3, 2, 40, torch.float16, scale=300.0)
    actual, expected = leaves.both_ways(TILES), leaves.expected()
    assert_near(actual[:5], expected[:5], ROUNDING[torch.float16])
    assert all(found.isfinite().all() for found in actual)


@needs_kernels
def test_tokens_of_zeros_have_finite_gradients() -> None:
    leaves = Leaves(4, 2, 16, torch.float32)
    leaves.given[0][1:3] = 0
    actual = leaves.both_ways(TILES)
    assert all(found.isfinite().all() for found in actual)
    assert_near(actual[:5], leaves.expected()[:5], ROUNDING[torch.float32])


@needs_kernels
def test_the_first_index_of_the_mixing_is_the_source() -> None:
    x = torch.eye(2, device=DEVICE).repeat(1, 1, 1)
    res = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=DEVICE)
    zeros = torch.zeros(1, 2, device=DEVICE)
    out = TILES.post(hyper_connection.PostInputs(x, zeros, res), zeros)
    assert torch.equal(out[0], res[0].t())


@needs_kernels
def test_no_tokens_at_all() -> None:
    actual = Leaves(0, 2, 5, torch.float32).both_ways(TILES)
    assert not any(grad.any() for grad in actual[5:])


@needs_kernels
@pytest.mark.parametrize("trials", [pytest.param(2, marks=SLOW)])
def test_the_same_comes_every_time_to_the_last_bit(trials: int) -> None:
    """The interpreter repeats itself in any case; gradients that wait have the same bits in the test below."""
    leaves = Leaves(5, 2, 24 if GPU else 9, DTYPES[-1])
    for one, other in zip(*(leaves.both_ways(TILES) for _ in range(trials)), strict=True):
        assert torch.equal(one, other)


WAITING = [
    pytest.param(17 if GPU else 5, 1, 9, torch.float32, marks=SLOW),
    (2, 2, 17 if GPU else 9, torch.bfloat16),
]
"""Wrong bfloat16 is as good as any other, where bits are compared."""


@needs_kernels
@pytest.mark.parametrize(("tokens", "streams", "channels", "dtype"), WAITING)
def test_gradients_of_parameters_wait_and_have_the_same_bits(
    tokens: int, streams: int, channels: int, dtype: torch.dtype
) -> None:
    """Also where the parameters are gone before. Of the sublayer and of the exit two launches each come later:
    they take none more together."""
    leaves, launch, wgrad_store = Leaves(tokens, streams, channels, dtype), Counting(), DelayedWgrad()
    fused = replace(TILES, launch=launch)
    wanted, at_once = leaves.both_ways(fused)[5:], launch.count
    x, bias, *numbers = (each.detach().clone().requires_grad_() for each in leaves.given)
    loss = _loss(fused, FORM, [bias, *numbers], x, leaves.to_streams, leaves.to_exit, wgrad_store)[1]
    with wgrad_store.node("b"):
        loss.backward()
    assert wgrad_store.pending("b") == len(numbers) == 6
    assert all(number.grad is None for number in numbers)
    assert launch.count == 2 * at_once - 4
    for number in numbers:
        number.untyped_storage().resize_(0)
    wgrad_store.drain("b")
    assert launch.count == 2 * at_once
    for leaf, grad in zip((x, bias, *numbers), wanted, strict=True):
        assert torch.equal(leaf.grad, grad)


@needs_kernels
def test_a_sink_outside_of_every_node_changes_nothing() -> None:
    leaves, launch = Leaves(2, 1, 9, torch.float32), Counting()
    fused = replace(TILES, launch=launch)
    wanted, launched = leaves.both_ways(fused), launch.count
    found = leaves.both_ways(fused, wgrad_store=DelayedWgrad())
    assert launch.count == 2 * launched
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@needs_kernels
def test_of_parameters_that_are_not_trained_nothing_waits() -> None:
    """Of the sublayer alpha alone is trained, of the exit the bias alone."""
    leaves, wgrad_store = Leaves(2, 1, 9, torch.float32), DelayedWgrad()
    wanted = leaves.both_ways(TILES)[7:]
    x, bias, *numbers = (each.detach().clone() for each in leaves.given)
    trained = [1, 5]
    for place in trained:
        numbers[place].requires_grad_()
    loss = _loss(TILES, FORM, [bias, *numbers], x, leaves.to_streams, leaves.to_exit, wgrad_store)[1]
    with wgrad_store.node("b"):
        loss.backward()
    assert wgrad_store.pending("b") == 2
    wgrad_store.drain("b")
    assert [place for place, number in enumerate(numbers) if number.grad is not None] == trained
    assert all(torch.equal(numbers[place].grad, wanted[place]) for place in trained)


@needs_kernels
def test_what_waits_holds_streams_and_no_graph() -> None:
    leaves, wgrad_store = Leaves(2, 1, 9, torch.float32), DelayedWgrad()
    given, _, *numbers = (each.detach().requires_grad_() for each in leaves.given)
    x = Doubled.apply(given)
    node, streams = weakref.ref(x.grad_fn), StorageWeakRef(x.untyped_storage())
    branch = TILES.pre(x, Parameters(*numbers[:3]), FORM, wgrad_store).branch_NC
    with wgrad_store.node("b"):
        branch.sum().backward()
    del x, branch
    assert node() is None
    assert not streams.expired()
    wgrad_store.drain("b")
    assert streams.expired()


@needs_kernels
def test_without_tokens_nothing_is_missing_in_the_sink() -> None:
    leaves, wgrad_store = Leaves(0, 2, 5, torch.float32), DelayedWgrad()
    x, bias, *numbers = (each.detach().requires_grad_() for each in leaves.given)
    loss = _loss(TILES, FORM, [bias, *numbers], x, leaves.to_streams, leaves.to_exit, wgrad_store)[1]
    with wgrad_store.node("b"):
        loss.backward()
    wgrad_store.drain("b")
    assert all(number.grad is not None and not number.grad.any() for number in numbers)


@pytest.mark.skipif(not GPU, reason="the interpreter does one thing after the other")
@pytest.mark.parametrize(("tokens", "streams", "channels"), [(19, 8, 96), (67, 4, 200), (70, 5, 104)])
def test_no_tile_is_overwritten_while_it_is_read(tokens: int, streams: int, channels: int) -> None:
    """A product still under way as its tile is replaced would give other bits now and then."""
    leaves, usual = (
        Leaves(tokens, streams, channels, torch.bfloat16),
        FusedHyperConnection.of(streams, torch.bfloat16),
    )
    first, *others = (leaves.both_ways(usual) for _ in range(6))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@needs_kernels
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
        TILES.post(entered.post_inputs, entered.branch_NC, bias)
    for parameter in (bias, *numbers):
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == closed_forms.fused(tokens, streams, channels, narrow=2, wide=4)
