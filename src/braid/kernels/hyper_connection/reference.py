"""Hyper-connections in plain torch: any dtype, any sizes, any device. This is what the others must give.

Mappings are float32 or better, and so are the sums over streams that they weigh; results are rounded once.

Shapes: N tokens, S streams, C channels, K = S · C, M rows of the projection: S for the way in, S for the way
out, S · S for the mixing (source, then destination). An exit has the first S alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from braid.kernels.grouped_mlp.product import WgradStore


class ConnectionForm(NamedTuple):
    """The numbers of the formulas."""

    steps: int
    """Normalisations of columns; one fewer of rows, after the softmax."""
    eps: float
    """Added to what is positive: weights of the way in, entries and sums of the mixing."""
    norm_eps: float
    """Added to the mean square of a token's streams."""


class Parameters(NamedTuple):
    """What one hyper-connection learns."""

    weight_MK: Tensor
    alpha_A: Tensor
    """How much of the projection reaches each mapping: way in, way out, mixing; of an exit, the first alone."""
    bias_M: Tensor


class Mappings(NamedTuple):
    """What a token's streams say about themselves."""

    pre_NS: Tensor
    post_NS: Tensor
    res_NSS: Tensor
    """From the first stream to the second."""


class Ways(NamedTuple):
    """What `post` needs beside the branch's result."""

    through_NSC: Tensor
    """The streams. For `post` alone, once: what comes back along them is no gradient by itself."""
    post_NS: Tensor
    res_NSS: Tensor


class Entered(NamedTuple):
    """What `pre` gives."""

    branch_NC: Tensor
    """What the branch works on."""
    ways: Ways


def pre(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> Entered:
    """The way into a branch: streams added up, each with its weight. With a wgrad store, backward leaves the
    product that gives the gradient of the projection's weight there."""
    pre_NS, post_NS, res_NSS = mappings(x_NSC, parameters, form, wgrad_store)
    return Entered(weighed(x_NSC, pre_NS), Ways(x_NSC, post_NS, res_NSS))


def post(ways: Ways, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """The way out of a branch: streams mixed, and to each its share of the branch's result."""
    x_NSC, post_NS, res_NSS = ways
    wide = wider(x_NSC.dtype)
    y_NC = y_NC.to(wide) if bias_C is None else y_NC.to(wide) + bias_C.to(wide)
    mixed_NSC = torch.matmul(res_NSS.transpose(1, 2), x_NSC.to(wide))
    return (mixed_NSC + post_NS.unsqueeze(-1) * y_NC.unsqueeze(1)).to(x_NSC.dtype)


def contract(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> Tensor:
    """One stream out of several, at the end: as the way into a branch."""
    streams = x_NSC.shape[1]
    wide = wider(x_NSC.dtype)
    assert len(parameters.weight_MK) == streams
    projected_NS = projected(x_NSC, parameters.weight_MK, form.norm_eps, wgrad_store)
    h_NS = projected_NS * parameters.alpha_A.to(wide) + parameters.bias_M.to(wide)
    return weighed(x_NSC, torch.sigmoid(h_NS) + form.eps)


def mappings(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> Mappings:
    """The three mappings of each token."""
    streams = x_NSC.shape[1]
    sizes = [streams, streams, streams * streams]
    wide = wider(x_NSC.dtype)
    strengths = parameters.alpha_A.to(wide).split(1)
    alpha_M = torch.cat([alpha.expand(size) for alpha, size in zip(strengths, sizes, strict=True)])
    projected_NM = projected(x_NSC, parameters.weight_MK, form.norm_eps, wgrad_store)
    h_NM = projected_NM * alpha_M + parameters.bias_M.to(wide)
    pre_NS, post_NS, res_NM = h_NM.split(sizes, dim=1)
    return Mappings(
        torch.sigmoid(pre_NS) + form.eps,
        2 * torch.sigmoid(post_NS),
        sinkhorn(res_NM.unflatten(1, (streams, streams)), form),
    )


def projected(
    x_NSC: Tensor, weight_MK: Tensor, norm_eps: float, wgrad_store: WgradStore | None = None
) -> Tensor:
    """The projection of a token's streams, all of them normed together; the norm is applied after it."""
    wide = wider(x_NSC.dtype)
    x_NK = x_NSC.flatten(1).to(wide)
    scale_N1 = torch.rsqrt(x_NK.square().mean(1, keepdim=True) + norm_eps)
    if wgrad_store is None:
        return F.linear(x_NK, weight_MK.to(wide)) * scale_N1
    sums_NM: Tensor = _Projected.apply(wgrad_store, weight_MK, x_NK)
    return sums_NM * scale_N1


class _Projected(torch.autograd.Function):
    """`F.linear`, and the gradients that autograd has for it; that of the weight is left with a wgrad store."""

    @staticmethod
    def forward(ctx: Any, wgrad_store: WgradStore, weight_MK: Tensor, x_NK: Tensor) -> Tensor:
        ctx.save_for_backward(weight_MK, x_NK)
        ctx.wgrad_store, ctx.weight = wgrad_store, weight_MK
        return F.linear(x_NK, weight_MK.to(x_NK.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NM: Tensor) -> tuple[Tensor | None, ...]:
        weight_MK, x_NK = ctx.saved_tensors
        _, weight_needs, x_needs = ctx.needs_input_grad
        # Without a past: what waits would keep all of its graph, and the gradients that arrived there.
        later = partial(_weight_gradient, d_NM, x_NK.detach(), weight_MK.dtype)
        return (
            None,
            ctx.wgrad_store.put(ctx.weight, later) if weight_needs else None,
            d_NM.mm(weight_MK.to(x_NK.dtype)) if x_needs else None,
        )


def _weight_gradient(d_NM: Tensor, x_NK: Tensor, dtype: torch.dtype) -> Tensor:
    return d_NM.t().mm(x_NK).to(dtype)


def sinkhorn(logits: Tensor, form: ConnectionForm) -> Tensor:
    """Matrices ..., S, S whose columns add up to 1 but for eps, and whose rows nearly do."""
    eps = form.eps
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(form.steps - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def weighed(x_NSC: Tensor, weights_NS: Tensor) -> Tensor:
    """The sum of streams, each with its weight."""
    return (x_NSC.to(weights_NS.dtype) * weights_NS.unsqueeze(-1)).sum(1).to(x_NSC.dtype)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Float32, or better where the activations are."""
    return torch.promote_types(dtype, torch.float32)
