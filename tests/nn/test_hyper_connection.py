"""Hyper-connections around layers: as in DeepSeek-V4, and as a plain residual net where alpha is 0."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from braid.architecture import HyperConnections
from braid.kernels import hyper_connection as op
from braid.nn.cost import Workload
from braid.nn.delayed_wgrad import DelayedWgrad, set_wgrad_store
from braid.nn.hyper_connection import HyperConnection, HyperExit, HyperMean, deviation, expand
from braid.nn.init import initialize
from tests.nn.delayed_cases import Case
from tests.nn.float64 import float32_means_float64
from tests.nn.test_delayed_wgrad import assert_bits, at_once, delayed

EPS = 1e-5
HIDDEN = 6
PLAIN = op.REFERENCE.function


def built(kind: type, streams: int, dtype: torch.dtype = torch.float64, **others: object) -> nn.Module:
    shape = HyperConnections(streams=streams, **others)
    module = kind(shape, HIDDEN, EPS, PLAIN, dtype=dtype)
    initialize(dict(module.named_parameters()), module.canonical(), seed=1, std=0.02, layers=1)
    return module


def drawn(module: nn.Module) -> nn.Module:
    """Weights that say something, instead of those that training starts from."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def streams_of(streams: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, streams, HIDDEN, dtype=dtype, requires_grad=True)


# --------------------------------------------------------------------------------------- DeepSeek-V4


def deepseek(streams: int) -> tuple[nn.Module, nn.Module]:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    configuration = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    config = configuration.DeepseekV4Config(hc_mult=streams, hidden_size=HIDDEN, rms_norm_eps=EPS)
    assert (config.hc_sinkhorn_iters, config.hc_eps) == (20, 1e-6)
    with float32_means_float64():
        return modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4HyperHead(config)


def copied(ours: nn.Module, theirs: tuple[Tensor, Tensor, Tensor]) -> None:
    with torch.no_grad():
        for parameter, other in zip((ours.weight, ours.alpha, ours.bias), theirs, strict=True):
            other.copy_(parameter)


@pytest.mark.parametrize("streams", [2, 4])
def test_a_layer_is_connected_as_in_deepseek_v4(streams: int) -> None:
    ours, (theirs, _) = drawn(built(HyperConnection, streams)), deepseek(streams)
    copied(ours, (theirs.fn, theirs.scale, theirs.base))
    x = streams_of(streams)
    branch = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    read, entered = ours(x)
    actual = ours.post(entered, torch.tanh(branch(read)))
    with float32_means_float64():
        post, comb, collapsed = theirs(x)
        result = torch.tanh(branch(collapsed))
        expected = post.unsqueeze(-1) * result.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    torch.testing.assert_close(read, collapsed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    loss = torch.randn_like(actual)
    grads = torch.autograd.grad((actual * loss).sum(), (x, *ours.parameters(), *branch.parameters()))
    leaves = (x, theirs.fn, theirs.scale, theirs.base, *branch.parameters())
    wanted = torch.autograd.grad((expected * loss).sum(), leaves)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("streams", [2, 4])
def test_streams_become_one_as_in_deepseek_v4(streams: int) -> None:
    ours, (_, theirs) = drawn(built(HyperExit, streams)), deepseek(streams)
    copied(ours, (theirs.hc_fn, theirs.hc_scale, theirs.hc_base))
    x = streams_of(streams)
    actual = ours(x)
    with float32_means_float64():
        expected = theirs(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    loss = torch.randn_like(actual)
    grads = torch.autograd.grad((actual * loss).sum(), (x, *ours.parameters()))
    leaves = (x, theirs.hc_fn, theirs.hc_scale, theirs.hc_base)
    for grad, want in zip(grads, torch.autograd.grad((expected * loss).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-11)


# --------------------------------------------------------------------------------------- a plain net


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("exit_", ["learned", "mean"])
def test_with_alpha_zero_it_is_a_plain_residual_net(streams: int, exit_: str) -> None:
    """But for the eps of norms, which see streams / 2 times the plain stream."""
    tiny = 1e-12
    layers = [nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(3)]
    connections = [built(HyperConnection, streams, eps=tiny) for _ in layers]
    leave = built(HyperExit, streams, eps=tiny)
    with torch.no_grad():
        for module in (*connections, leave):
            module.alpha.zero_()

    def branch(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(F.rms_norm(x, (HIDDEN,), eps=tiny)))

    plain = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    x = expand(plain, streams)
    for layer, connection in zip(layers, connections, strict=True):
        plain = plain + branch(layer, plain)
        read, entered = connection(x)
        x = connection.post(entered, branch(layer, read))
        torch.testing.assert_close(x, expand(plain, streams), rtol=1e-9, atol=1e-9)
    factor = streams / 2 if exit_ == "learned" else 1.0
    out = leave(x) if exit_ == "learned" else HyperMean(leave.shape, HIDDEN)(x)
    torch.testing.assert_close(out, factor * plain, rtol=1e-9, atol=1e-9)


def test_it_starts_near_that_plain_net() -> None:
    connection, leave = built(HyperConnection, 4), built(HyperExit, 4)
    assert connection.alpha.tolist() == pytest.approx([0.01] * 3)
    assert leave.alpha.tolist() == [1.0]
    assert not connection.bias.any()
    assert not leave.bias.any()
    bound = (6 / sum(connection.weight.shape)) ** 0.5
    assert 0.9 * bound < connection.weight.abs().max() <= bound
    _, entered = connection(expand(torch.randn(2, 3, HIDDEN, dtype=torch.float64), 4))
    assert (entered.post_NS - 1).abs().max() < 0.05
    assert (entered.res_NSS - 0.25).abs().max() < 0.02


def test_streams_begin_as_copies_that_are_apart_in_memory() -> None:
    x = torch.randn(2, 3, HIDDEN)
    out = expand(x, 4)
    assert out.is_contiguous()
    assert all(torch.equal(out[:, :, stream], x) for stream in range(4))


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_float32_or_better_and_streams_keep_their_dtype(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    connection, leave = built(HyperConnection, 2, dtype), built(HyperExit, 2, dtype)
    assert {p.dtype for p in (*connection.parameters(), *leave.parameters())} == {wide}
    read, entered = connection(streams_of(2, dtype))
    out = connection.post(entered, read)
    assert read.dtype == out.dtype == leave(out).dtype == HyperMean(leave.shape, HIDDEN)(out).dtype == dtype
    assert entered.post_NS.dtype == entered.res_NSS.dtype == wide


def test_every_weight_is_listed_and_gets_a_gradient() -> None:
    connection, leave = built(HyperConnection, 4), built(HyperExit, 4)
    for module, rows, strengths in ((connection, 24, 3), (leave, 4, 1)):
        names = {"weight": (rows, 4 * HIDDEN), "alpha": (strengths,), "bias": (rows,)}
        assert {name: tensor.shape for name, tensor in module.canonical().items()} == names
        assert {name: tuple(p.shape) for name, p in module.named_parameters()} == names
    x = streams_of(4)
    read, entered = connection(x)
    leave(connection.post(entered, torch.tanh(read))).square().sum().backward()
    for parameter in (*connection.parameters(), *leave.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.any()


def test_an_empty_sequence_goes_through() -> None:
    connection, leave = built(HyperConnection, 4), built(HyperExit, 4)
    x = torch.zeros(2, 0, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    read, entered = connection(x)
    out = leave(connection.post(entered, read))
    assert out.shape == (2, 0, HIDDEN)
    out.sum().backward()
    assert x.grad is not None
    assert all(not parameter.grad.any() for parameter in (*connection.parameters(), *leave.parameters()))
    assert deviation(entered.res_NSS) == 0


def test_deviation_is_the_worst_sum() -> None:
    even = torch.full((3, 2, 2), 0.5)
    assert deviation(even) == 0
    even[1] = torch.tensor([[0.5, 0.5], [0.75, 0.5]])
    assert deviation(even) == pytest.approx(0.25)
    res = drawn(built(HyperConnection, 4))(streams_of(4))[1].res_NSS
    assert not deviation(res).requires_grad


# ------------------------------------------------------------------------------ weights that wait


def both(streams: int, dtype: torch.dtype) -> Case:
    """A connection and an exit behind it, the same every time."""
    generator = torch.Generator().manual_seed(3)
    layer = nn.ModuleList([built(kind, streams, dtype) for kind in (HyperConnection, HyperExit)])
    connection, leave = layer
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(x: Tensor) -> Tensor:
        read, entered = connection(x.sin())
        return leave(connection.post(entered, torch.tanh(read)))

    return Case(layer, forward)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_waiting_changes_no_bit(streams: int, dtype: torch.dtype) -> None:
    """Also where the weights are gone before their gradients are asked for."""
    expected, actual = both(streams, dtype), both(streams, dtype)
    xs = [streams_of(streams, dtype) for _ in range(3)]
    later = [x.detach().clone().requires_grad_() for x in xs]
    at_once(expected, xs)
    delayed(actual, later)
    assert_bits(actual.layer, expected.layer)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(later, xs, strict=True))


def test_gradients_of_projections_wait() -> None:
    made, wgrad_store, x = both(2, torch.float32), DelayedWgrad(), streams_of(2, torch.float32)
    set_wgrad_store(made.layer, wgrad_store)
    y = made.forward(x)
    with wgrad_store.node("b"):
        y.sum().backward()
    assert wgrad_store.pending("b") == 2
    assert [name for name, p in made.layer.named_parameters() if p.grad is None] == ["0.weight", "1.weight"]
    wgrad_store.drain("b")
    assert all(p.grad is not None for p in made.layer.parameters())


class Doubled(torch.autograd.Function):
    """Its node lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_what_waits_holds_streams_and_no_graph() -> None:
    """A graph may hold gradients that have arrived at its other end."""
    connection, wgrad_store = built(HyperConnection, 2, torch.float32), DelayedWgrad()
    set_wgrad_store(connection, wgrad_store)
    x = Doubled.apply(streams_of(2, torch.float32))
    node, streams = weakref.ref(x.grad_fn), StorageWeakRef(x.untyped_storage())
    y = connection(x)[0]
    with wgrad_store.node("b"):
        y.sum().backward()
    del x, y
    assert node() is None
    assert not streams.expired()
    wgrad_store.drain("b")
    assert streams.expired()


# --------------------------------------------------------------------------------- cost and problems


@pytest.mark.parametrize("wgrad_store", [None, DelayedWgrad()], ids=["plain", "delayed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_cost_is_what_autograd_keeps(
    streams: int, dtype: torch.dtype, wgrad_store: DelayedWgrad | None
) -> None:
    connection, leave = built(HyperConnection, streams, dtype), built(HyperExit, streams, dtype)
    set_wgrad_store(nn.ModuleList([connection, leave]), wgrad_store)
    workload = Workload(rows=2, tokens=3, dtype=dtype, device="cpu")
    x = streams_of(streams, dtype)
    y = torch.randn(2, 3, HIDDEN, dtype=dtype, requires_grad=True)

    def through() -> object:
        _, entered = connection(x)
        return connection.post(entered, y)

    assert held(through, connection) == connection.cost(workload).kept
    assert held(lambda: leave(x), leave) == leave.cost(workload).kept


def held(function: object, module: nn.Module) -> int:
    """Bytes of the storages that autograd keeps, without weights."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    del result
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


def test_flops_count_the_projection_and_every_weighed_channel() -> None:
    connection, leave = built(HyperConnection, 4), built(HyperExit, 4)
    assert connection.flops(10) == 2 * 10 * (24 * 4 * HIDDEN + 24 * HIDDEN)
    assert leave.flops(10) == 2 * 10 * (4 * 4 * HIDDEN + 4 * HIDDEN)


def test_what_cannot_be_is_a_problem() -> None:
    def fields(**given: object) -> list[str]:
        return [problem.field for problem in HyperConnections(**given).problems("hyper")]

    assert fields() == []
    assert fields(streams=1, sinkhorn_steps=1) == []
    assert fields(streams=0) == ["hyper.streams"]
    assert fields(sinkhorn_steps=0) == ["hyper.sinkhorn_steps"]
    assert fields(eps=0.0) == ["hyper.eps"]
