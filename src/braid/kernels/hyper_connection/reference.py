"""Hyper-connections in PyTorch, the reference. Any dtype, any sizes, any device.

    h = alpha · (W · x / rms(x)) + bias        x: all streams of a token, flattened
    H_pre = sigmoid(h_pre) + eps        H_post = 2 · sigmoid(h_post)        H_res = sinkhorn(h_res)

Mappings and weighted sums over streams are float32 or wider; results are rounded once.

Shapes: N tokens, S streams, C channels, K = S · C, M rows of the projection: S for H_pre, S for H_post, S · S
for H_res (source, then destination). An exit has only the first S.
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
    """Constants of the formulas."""

    steps: int
    """Sinkhorn iterations: column normalizations; one fewer of rows, after the softmax."""
    eps: float
    """Added to H_pre, and to the entries and sums of H_res."""
    norm_eps: float
    """Added to the mean square of a token's streams."""


class Parameters(NamedTuple):
    """Parameters of one hyper-connection."""

    weight_MK: Tensor
    alpha_A: Tensor
    """Scales of the projection for H_pre, H_post and H_res; an exit has only the first."""
    bias_M: Tensor


class Mappings(NamedTuple):
    """H_pre, H_post and H_res of each token."""

    pre_NS: Tensor
    post_NS: Tensor
    res_NSS: Tensor
    """From the first stream index to the second."""


class PostInputs(NamedTuple):
    """Inputs of `post` other than the branch output."""

    streams_NSC: Tensor
    """The streams. Only `post` may use this tensor, and once: in the fused implementation, the gradient that
    flows back along it is complete only together with the others of `pre`."""
    post_NS: Tensor
    res_NSS: Tensor


class PreOutputs(NamedTuple):
    """Outputs of `pre`."""

    branch_NC: Tensor
    """Input of the branch."""
    post_inputs: PostInputs


def pre(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> PreOutputs:
    """The branch input, H_pre · x, and the inputs of `post`. With a wgrad store, backward delays the gradient
    of the projection weight."""
    pre_NS, post_NS, res_NSS = mappings(x_NSC, parameters, form, wgrad_store)
    return PreOutputs(weighed(x_NSC, pre_NS), PostInputs(x_NSC, post_NS, res_NSS))


def post(post_inputs: PostInputs, y_NC: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """The new streams, H_resᵀ · x + H_post · (y + bias)."""
    x_NSC, post_NS, res_NSS = post_inputs
    wide = wider(x_NSC.dtype)
    y_NC = y_NC.to(wide) if bias_C is None else y_NC.to(wide) + bias_C.to(wide)
    mixed_NSC = torch.matmul(res_NSS.transpose(1, 2), x_NSC.to(wide))
    return (mixed_NSC + post_NS.unsqueeze(-1) * y_NC.unsqueeze(1)).to(x_NSC.dtype)


def contract(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> Tensor:
    """Merge the streams into one before the head, with H_pre."""
    streams = x_NSC.shape[1]
    wide = wider(x_NSC.dtype)
    assert len(parameters.weight_MK) == streams
    projected_NS = projected(x_NSC, parameters.weight_MK, form.norm_eps, wgrad_store)
    h_NS = projected_NS * parameters.alpha_A.to(wide) + parameters.bias_M.to(wide)
    return weighed(x_NSC, torch.sigmoid(h_NS) + form.eps)


def mappings(
    x_NSC: Tensor, parameters: Parameters, form: ConnectionForm, wgrad_store: WgradStore | None = None
) -> Mappings:
    """H_pre, H_post and H_res of each token."""
    streams = x_NSC.shape[1]
    sizes = [streams, streams, streams * streams]
    wide = wider(x_NSC.dtype)
    alphas = parameters.alpha_A.to(wide).split(1)
    alpha_M = torch.cat([alpha.expand(size) for alpha, size in zip(alphas, sizes, strict=True)])
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
    """Projection of the RMS-normalized streams of a token. The scale is applied after the product."""
    wide = wider(x_NSC.dtype)
    x_NK = x_NSC.flatten(1).to(wide)
    scale_N1 = torch.rsqrt(x_NK.square().mean(1, keepdim=True) + norm_eps)
    if wgrad_store is None:
        return F.linear(x_NK, weight_MK.to(wide)) * scale_N1
    sums_NM: Tensor = _Projected.apply(wgrad_store, weight_MK, x_NK)
    return sums_NM * scale_N1


class _Projected(torch.autograd.Function):
    """`F.linear` with the weight gradient delayed to a wgrad store."""

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
        # detach: the delayed gradient would otherwise keep the graph of the streams alive, with its gradients.
        later = partial(_weight_gradient, d_NM, x_NK.detach(), weight_MK.dtype)
        return (
            None,
            ctx.wgrad_store.put(ctx.weight, later) if weight_needs else None,
            d_NM.mm(weight_MK.to(x_NK.dtype)) if x_needs else None,
        )


def _weight_gradient(d_NM: Tensor, x_NK: Tensor, dtype: torch.dtype) -> Tensor:
    return d_NM.t().mm(x_NK).to(dtype)


def sinkhorn(logits: Tensor, form: ConnectionForm) -> Tensor:
    """Approximately doubly stochastic matrices (..., S, S): columns sum to 1 up to eps, rows nearly."""
    eps = form.eps
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(form.steps - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def weighed(x_NSC: Tensor, weights_NS: Tensor) -> Tensor:
    """The weighted sum of the streams."""
    return (x_NSC.to(weights_NS.dtype) * weights_NS.unsqueeze(-1)).sum(1).to(x_NSC.dtype)


def wider(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself if wider."""
    return torch.promote_types(dtype, torch.float32)
