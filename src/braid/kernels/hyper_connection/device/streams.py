"""Weighted sums over streams (H_pre, H_post, H_res), forward and backward: memory-bound kernels.

Every program handles a few tokens with all of their channels, so that sums over channels stay within a program.
`aggregate` starts with the last tokens: the projection read their streams last, so they may still be in L2.

Shapes: N tokens, S streams, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of


@dataclass(frozen=True, kw_only=True)
class StreamVariant:
    """Tile sizes of a kernel over tokens."""

    tokens: int = 4
    channels: int = 256
    warps: int = 4
    stages: int = 1
    """Software-pipeline stages of the loop over channels."""

    def run(self, launch: Launcher, kernel: Any, x_NSC: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch a kernel with one program per `tokens` tokens."""
        tokens, streams, channels = x_NSC.shape
        launch(
            kernel,
            (parts_of(tokens, self.tokens), 1),
            tensors,
            (tokens,),
            {
                "S": streams, "C": channels, "BT": self.tokens, "BC": self.channels,
                "EVEN": channels % self.channels == 0, "STAGES": self.stages,
            },
            warps=self.warps,
        )  # fmt: skip


def aggregate(launch: Launcher, x_NSC: Tensor, pre_NS: Tensor, variant: StreamVariant) -> Tensor:
    """The branch input: the sum of the streams, weighted by H_pre."""
    tokens, _, channels = x_NSC.shape
    out_NC = x_NSC.new_empty(tokens, channels)
    variant.run(launch, _aggregate, x_NSC, (x_NSC, pre_NS, out_NC))
    return out_NC


def aggregate_backward(launch: Launcher, d_NC: Tensor, x_NSC: Tensor, variant: StreamVariant) -> Tensor:
    """Gradient of H_pre."""
    tokens, streams, _ = x_NSC.shape
    d_pre_NS = x_NSC.new_empty(tokens, streams, dtype=torch.float32)
    variant.run(launch, _aggregate_backward, x_NSC, (d_NC, x_NSC, d_pre_NS))
    return d_pre_NS


def mix(
    launch: Launcher,
    x_NSC: Tensor,
    y_NC: Tensor,
    bias_C: Tensor | None,
    post_NS: Tensor,
    res_NSS: Tensor,
    variant: StreamVariant,
) -> Tensor:
    """The new streams, H_resᵀ · x + H_post · (y + bias)."""
    out_NSC = torch.empty_like(x_NSC)
    variant.run(launch, _mix, x_NSC, (x_NSC, y_NC, bias_C, post_NS, res_NSS, out_NSC))
    return out_NSC


def mix_backward(
    launch: Launcher,
    d_NSC: Tensor,
    x_NSC: Tensor,
    y_NC: Tensor,
    bias_C: Tensor | None,
    post_NS: Tensor,
    variant: StreamVariant,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the branch output, H_post and H_res. The gradient of the streams is computed in `gradients`,
    together with its other contributions."""
    tokens, streams, _ = x_NSC.shape
    d_y_NC = torch.empty_like(y_NC)
    d_post_NS, d_res_NSS = torch.empty_like(post_NS), post_NS.new_empty(tokens, streams, streams)
    tensors = (d_NSC, x_NSC, y_NC, bias_C, post_NS, d_y_NC, d_post_NS, d_res_NSS)
    variant.run(launch, _mix_backward, x_NSC, tensors)
    return d_y_NC, d_post_NS, d_res_NSS


# --------------------------------------------------------------------------------------------- kernels


@triton.jit
def _load_tile(entries, t, c, here, C: tl.constexpr, stride: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile of tokens and channels in float32; tokens are `stride` elements apart."""
    inside = here[:, None]
    if not EVEN:
        inside = inside & (c < C)[None, :]
    place = t.to(tl.int64)[:, None] * stride + c[None, :]
    return tl.load(entries + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(entries, t, c, here, C: tl.constexpr, stride: tl.constexpr, tile, EVEN: tl.constexpr):
    """Store a tile of tokens and channels; tokens are `stride` elements apart."""
    inside = here[:, None]
    if not EVEN:
        inside = inside & (c < C)[None, :]
    place = t.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(entries + place, tile.to(entries.dtype.element_ty), mask=inside)


@triton.jit
def _sum_eights(product, BT: tl.constexpr, BC: tl.constexpr):
    """Sums of eight adjacent channels, which one thread holds, so that they need no shuffles."""
    return tl.sum(product.reshape(BT, BC // 8, 8), 2)


@triton.jit(do_not_specialize=["tokens"])
def _aggregate(
    x,
    pre,
    out,
    tokens,
    S: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT + tl.arange(0, BT)
    here = t < tokens
    weights = ()
    for j in tl.static_range(S):
        weights += (tl.load(pre + t * S + j, mask=here, other=0.0),)
    for channel in tl.range(0, C, BC, num_stages=STAGES):
        c = channel + tl.arange(0, BC)
        total = tl.zeros((BT, BC), dtype=tl.float32)
        for j in tl.static_range(S):
            total += weights[j][:, None] * _load_tile(x + j * C, t, c, here, C, S * C, EVEN)
        _store_tile(out, t, c, here, C, C, total, EVEN)


@triton.jit(do_not_specialize=["tokens"])
def _aggregate_backward(
    d,
    x,
    d_pre,
    tokens,
    S: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < tokens
    sums = ()
    for _ in tl.static_range(S):
        sums += (tl.zeros((BT, BC // 8), dtype=tl.float32),)
    for channel in tl.range(0, C, BC, num_stages=STAGES):
        c = channel + tl.arange(0, BC)
        grad = _load_tile(d, t, c, here, C, C, EVEN)
        added = ()
        for j in tl.static_range(S):
            stream = _load_tile(x + j * C, t, c, here, C, S * C, EVEN)
            added += (sums[j] + _sum_eights(grad * stream, BT, BC),)
        sums = added
    for j in tl.static_range(S):
        tl.store(d_pre + t * S + j, tl.sum(sums[j], 1), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def _mix(
    x,
    y,
    bias,
    post,
    res,
    out,
    tokens,
    S: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < tokens
    shares = ()
    for k in tl.static_range(S):
        shares += (tl.load(post + t * S + k, mask=here, other=0.0),)
    weights = ()
    for jk in tl.static_range(S * S):
        weights += (tl.load(res + t * S * S + jk, mask=here, other=0.0),)
    for channel in tl.range(0, C, BC, num_stages=STAGES):
        c = channel + tl.arange(0, BC)
        result = _load_tile(y, t, c, here, C, C, EVEN)
        if bias is not None:
            result += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        streams = ()
        for j in tl.static_range(S):
            streams += (_load_tile(x + j * C, t, c, here, C, S * C, EVEN),)
        for k in tl.static_range(S):
            total = shares[k][:, None] * result
            for j in tl.static_range(S):
                total += weights[j * S + k][:, None] * streams[j]
            _store_tile(out + k * C, t, c, here, C, S * C, total, EVEN)


@triton.jit(do_not_specialize=["tokens"])
def _mix_backward(
    d,
    x,
    y,
    bias,
    post,
    d_y,
    d_post,
    d_res,
    tokens,
    S: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < tokens
    shares = ()
    to_shares = ()
    for k in tl.static_range(S):
        shares += (tl.load(post + t * S + k, mask=here, other=0.0),)
        to_shares += (tl.zeros((BT, BC // 8), dtype=tl.float32),)
    to_weights = ()
    for _ in tl.static_range(S * S):
        to_weights += (tl.zeros((BT, BC // 8), dtype=tl.float32),)
    for channel in tl.range(0, C, BC, num_stages=STAGES):
        c = channel + tl.arange(0, BC)
        result = _load_tile(y, t, c, here, C, C, EVEN)
        if bias is not None:
            result += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        grads = ()
        to_result = tl.zeros((BT, BC), dtype=tl.float32)
        added = ()
        for k in tl.static_range(S):
            grad = _load_tile(d + k * C, t, c, here, C, S * C, EVEN)
            to_result += shares[k][:, None] * grad
            added += (to_shares[k] + _sum_eights(grad * result, BT, BC),)
            grads += (grad,)
        to_shares = added
        _store_tile(d_y, t, c, here, C, C, to_result, EVEN)
        added = ()
        for j in tl.static_range(S):
            stream = _load_tile(x + j * C, t, c, here, C, S * C, EVEN)
            for k in tl.static_range(S):
                added += (to_weights[j * S + k] + _sum_eights(stream * grads[k], BT, BC),)
        to_weights = added
    for k in tl.static_range(S):
        tl.store(d_post + t * S + k, tl.sum(to_shares[k], 1), mask=here)
    for jk in tl.static_range(S * S):
        tl.store(d_res + t * S * S + jk, tl.sum(to_weights[jk], 1), mask=here)
