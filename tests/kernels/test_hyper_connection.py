"""Hyper-connections, the ops: what every implementation computes, against formulas written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braid.kernels import hyper_connection
from braid.kernels.hyper_connection import ConnectionForm, Parameters, PostInputs, reference
from braid.nn.delayed_wgrad import DelayedWgrad

FORM = ConnectionForm(steps=20, eps=1e-6, norm_eps=1e-5)
PLAIN = hyper_connection.REFERENCE.function


def parameters(streams: int, channels: int, dtype: torch.dtype = torch.float64) -> Parameters:
    rows, width = streams * (streams + 2), streams * channels
    return Parameters(
        (torch.randn(rows, width, dtype=dtype) * width**-0.5).requires_grad_(),
        torch.tensor([0.7, 0.9, 1.1], dtype=dtype).requires_grad_(),
        (torch.randn(rows, dtype=dtype) * 0.5).requires_grad_(),
    )


def one_token(x_SC: Tensor, p: Parameters, form: ConnectionForm) -> tuple[Tensor, Tensor, Tensor]:
    """The mappings of a token, number by number."""
    streams, channels = x_SC.shape
    flat = x_SC.flatten()
    r = (flat.square().sum() / (streams * channels) + form.norm_eps) ** -0.5
    h = [
        (p.weight_MK[m] * flat).sum() * r * p.alpha_A[min(m // streams, 2)] + p.bias_M[m]
        for m in range(len(p.bias_M))
    ]
    pre = torch.stack([1 / (1 + torch.exp(-h[j])) + form.eps for j in range(streams)])
    post = torch.stack([2 / (1 + torch.exp(-h[streams + j])) for j in range(streams)])
    logits = torch.stack(h[2 * streams :]).view(streams, streams)
    rows = [torch.exp(row) / torch.exp(row).sum() + form.eps for row in logits]
    m = torch.stack(rows)
    m = torch.stack([m[:, k] / (m[:, k].sum() + form.eps) for k in range(streams)], 1)
    for _ in range(form.steps - 1):
        m = torch.stack([m[j] / (m[j].sum() + form.eps) for j in range(streams)])
        m = torch.stack([m[:, k] / (m[:, k].sum() + form.eps) for k in range(streams)], 1)
    return pre, post, m


@pytest.mark.parametrize(("tokens", "streams", "channels"), [(3, 1, 5), (2, 2, 7), (2, 4, 3), (1, 3, 6)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_reference_equals_one_number_at_a_time(
    tokens: int, streams: int, channels: int, with_bias: bool
) -> None:
    p = parameters(streams, channels)
    x = torch.randn(tokens, streams, channels, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True) if with_bias else None
    entered = reference.pre(x, p, FORM)
    actual = reference.post(entered.post_inputs, torch.tanh(entered.branch_NC), bias)
    branches, rows = [], []
    for token in x:
        pre, post, res = one_token(token, p, FORM)
        branch = sum(pre[j] * token[j] for j in range(streams))
        result = torch.tanh(branch) + (0 if bias is None else bias)
        out = [sum(res[j, k] * token[j] for j in range(streams)) + post[k] * result for k in range(streams)]
        branches.append(branch)
        rows.append(torch.stack(out))
    expected = torch.stack(rows)
    torch.testing.assert_close(entered.branch_NC, torch.stack(branches), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, *p, *([] if bias is None else [bias])]
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((actual * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-11)


def test_the_first_index_of_the_mixing_is_the_source() -> None:
    x = torch.eye(2).unsqueeze(0)
    res = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    zeros = torch.zeros(1, 2)
    out = reference.post(PostInputs(x, zeros, res), zeros)
    assert torch.equal(out[0], res[0].t())


def test_columns_of_the_mixing_add_up_to_one_and_rows_nearly_do() -> None:
    for spread, bound in ((0.0, 3e-6), (1.0, 5e-3), (3.0, 0.3)):
        m = reference.sinkhorn(torch.randn(4096, 4, 4) * spread, FORM)
        assert (m >= 0).all()
        assert (m.sum(1) - 1).abs().max() <= 4e-6
        assert (m.sum(2) - 1).abs().max() <= bound


def test_every_stream_that_leaves_is_a_convex_sum_of_those_that_entered() -> None:
    p = parameters(4, 6, torch.float32)
    x = torch.randn(64, 4, 6)
    entered = reference.pre(x, p, FORM)
    out = reference.post(entered.post_inputs, torch.zeros(64, 6))
    assert (out <= x.amax(1, keepdim=True) + 1e-5).all()
    assert (out >= x.amin(1, keepdim=True) - 1e-5).all()


def test_the_gradient_of_the_mixing_is_that_of_finite_differences() -> None:
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for steps in (1, 2, 20):
        form = FORM._replace(steps=steps)
        assert torch.autograd.gradcheck(lambda given, form=form: reference.sinkhorn(given, form), (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streams_keep_their_dtype_and_mappings_are_float32(dtype: torch.dtype) -> None:
    p = parameters(2, 8, torch.float32)
    entered = reference.pre(torch.randn(3, 2, 8).to(dtype), p, FORM)
    out = reference.post(entered.post_inputs, entered.branch_NC)
    exit_ = Parameters(p.weight_MK[:2], p.alpha_A[:1], p.bias_M[:2])
    assert out.dtype == entered.branch_NC.dtype == reference.contract(out, exit_, FORM).dtype == dtype
    assert entered.post_inputs.post_NS.dtype == entered.post_inputs.res_NSS.dtype == torch.float32


def test_large_float16_streams_do_not_overflow() -> None:
    """The squares of 300 would not fit into float16, and neither would their sum."""
    p = parameters(4, 64, torch.float32)
    x = (300 * torch.randn(5, 4, 64)).half()
    made = reference.mappings(x, p, FORM)
    wanted = reference.mappings(x.double(), Parameters(*(each.double() for each in p)), FORM)
    for actual, expected in zip(made, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_mappings_of_bfloat16_streams_are_as_good_as_float32() -> None:
    p = parameters(4, 256, torch.float32)
    x = torch.randn(64, 4, 256).bfloat16()
    made = reference.mappings(x, p, FORM)
    wanted = reference.mappings(x.double(), Parameters(*(each.double() for each in p)), FORM)
    for actual, expected in zip(made, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_tokens_of_zeros_have_finite_gradients(streams: int) -> None:
    p = parameters(streams, 5)
    x = torch.zeros(2, streams, 5, dtype=torch.float64, requires_grad=True)
    entered = reference.pre(x, p, FORM)
    out = reference.post(entered.post_inputs, entered.branch_NC + 1)
    for grad in torch.autograd.grad(out.square().sum(), (x, *p)):
        assert grad.isfinite().all()


def test_no_tokens_at_all() -> None:
    p = parameters(2, 5)
    x = torch.zeros(0, 2, 5, dtype=torch.float64, requires_grad=True)
    entered = reference.pre(x, p, FORM)
    out = reference.post(entered.post_inputs, entered.branch_NC)
    assert out.shape == (0, 2, 5)
    for grad, leaf in zip(torch.autograd.grad(out.sum(), (x, *p)), (x, *p), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


def test_a_single_stream_mixes_with_itself() -> None:
    p = parameters(1, 5)
    x = torch.randn(3, 1, 5, dtype=torch.float64)
    entered = reference.pre(x, p, FORM)
    assert (entered.post_inputs.res_NSS - 1).abs().max() < 3e-6
    torch.testing.assert_close(
        reference.post(entered.post_inputs, torch.zeros(3, 5).double()), x, rtol=3e-6, atol=0
    )


# ------------------------------------------------------------------------------ weights that wait


def sublayer_and_exit(x: Tensor, p: Parameters, exit_: Parameters, wgrad_store: DelayedWgrad | None) -> Tensor:
    entered = reference.pre(x, p, FORM, wgrad_store)
    return reference.contract(
        reference.post(entered.post_inputs, torch.tanh(entered.branch_NC)), exit_, FORM, wgrad_store
    )


def parameters_of_exit(p: Parameters, streams: int) -> Parameters:
    return Parameters(
        *(each.detach().clone().requires_grad_() for each in (p[0][:streams], p[1][:1], p[2][:streams]))
    )


@pytest.mark.parametrize(("tokens", "streams", "channels"), [(5, 1, 9), (37, 3, 7), (1, 4, 3), (0, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_with_a_sink_gradients_are_autograds_to_the_last_bit(
    tokens: int, streams: int, channels: int, dtype: torch.dtype
) -> None:
    """Those of the weights alone wait; nothing else is changed by it."""
    p = parameters(streams, channels, torch.promote_types(dtype, torch.float32))
    exit_, x = parameters_of_exit(p, streams), torch.randn(tokens, streams, channels).to(dtype)
    x.requires_grad_()
    weights = torch.randn(tokens, channels).to(dtype)
    plain = sublayer_and_exit(x, p, exit_, None)
    wanted = torch.autograd.grad(plain, (x, *p, *exit_), weights)
    wgrad_store = DelayedWgrad()
    out = sublayer_and_exit(x, p, exit_, wgrad_store)
    assert torch.equal(out, plain)
    with wgrad_store.node("b"):
        out.backward(weights)
    assert wgrad_store.pending("b") == 2
    assert [leaf.grad is None for leaf in (x, *p, *exit_)] == [False, *(True, False, False) * 2]
    wgrad_store.drain("b")
    for leaf, grad in zip((x, *p, *exit_), wanted, strict=True):
        assert torch.equal(leaf.grad, grad)
        assert leaf.grad.stride() == grad.stride()


def test_the_gradient_of_a_weight_that_waited_has_its_dtype() -> None:
    """Also where the streams are wider."""
    p, wgrad_store = parameters(2, 5, torch.float32), DelayedWgrad()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(reference.pre(x, p, FORM).branch_NC.sum(), p.weight_MK)
    with wgrad_store.node("b"):
        reference.pre(x, p, FORM, wgrad_store).branch_NC.sum().backward()
    wgrad_store.drain("b")
    assert p.weight_MK.grad.dtype == torch.float32
    assert torch.equal(p.weight_MK.grad, wanted)


def test_a_weight_that_is_not_trained_leaves_nothing() -> None:
    p, wgrad_store = parameters(2, 5), DelayedWgrad()
    p.weight_MK.requires_grad_(False)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(reference.pre(x, p, FORM).branch_NC.sum(), x)
    with wgrad_store.node("b"):
        reference.pre(x, p, FORM, wgrad_store).branch_NC.sum().backward()
    assert wgrad_store.pending("b") == 0
    assert torch.equal(x.grad, *wanted)
    assert p.weight_MK.grad is None


def test_the_choice_says_why() -> None:
    cpu = hyper_connection.choose(torch.device("cpu"), torch.float32, streams=4)
    assert str(cpu) == "hyper_connection: reference, because fused needs a GPU, not cpu"
    wide = hyper_connection.choose(torch.device("cuda"), torch.float64, streams=4)
    assert str(wide) == "hyper_connection: reference, because fused does not support float64"
    assert hyper_connection.fuses("cuda", torch.bfloat16)
    assert not hyper_connection.fuses("cpu", torch.bfloat16)
