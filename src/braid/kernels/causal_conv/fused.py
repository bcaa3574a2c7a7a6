"""The causal convolution with SiLU in Triton: one pass over the input in forward, one over input and gradients
in backward.

Every part of the groups' channels becomes a contiguous tensor of its own, which is what the mixers read; the
input may be a slice. Arithmetic is float32, results are rounded once. Saves the input alone. Gradients of taps
and bias are sums of per-program partial sums in a fixed order.

Shapes: B rows, T tokens, G groups, V channels of a group, I those of a part, C = G · V channels, K taps, P
programs over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.kernels.causal_conv import MAX_TAPS, reference
from braid.kernels.causal_conv.device import kernels
from braid.kernels.launch import ALIGNED, Launcher, parts_of, power_of_two

BLOCK_TOKENS = 8
"""Tokens that a program unrolls."""
STEPS = 16
"""Blocks of tokens per program in backward, which bounds the number of partial sums."""
CHANNELS_PER_THREAD = 4


class FusedCausalConv:
    """`CausalConv` with Triton kernels."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(
        self,
        x_BTGV: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        documents_BT: Tensor | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Same as `reference.conv_parts`."""
        if weight_CK.shape[1] > MAX_TAPS or not x_BTGV.numel():
            return reference.conv_parts(x_BTGV, weight_CK, bias_C, documents_BT, sizes)
        parts: tuple[Tensor, ...] = _CausalConv.apply(
            self.launch, tuple(sizes), x_BTGV, weight_CK, bias_C, documents_BT
        )
        return parts


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        launch: Launcher,
        sizes: tuple[int, ...],
        x_BTGV: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        documents_BT: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BTGV, weight_CK, bias_C, documents_BT)
        ctx.launch, ctx.sizes = launch, sizes
        x, *others = _readable(x_BTGV, weight_CK, bias_C, documents_BT)
        rows, tokens, groups, _ = x.shape
        blocks = rows * parts_of(tokens, BLOCK_TOKENS)
        parts, first = [], 0
        for size in sizes:
            constants, columns, warps = _constants(x, *others, first=first, size=size)
            y_BTGI = x.new_empty(rows, tokens, groups, size)
            tensors = (x, *others, y_BTGI)
            numbers = (tokens, *_strides(x, constants["UNIT"]))
            launch(kernels.conv_forward, (blocks, columns), tensors, numbers, constants, warps=warps)
            parts.append(y_BTGI)
            first += size
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_parts: Tensor) -> tuple[Any, ...]:
        x, *others = _readable(*ctx.saved_tensors)
        weight_KC, bias_C, _ = others
        rows, tokens, groups, channels = x.shape
        steps = min(STEPS, parts_of(tokens, BLOCK_TOKENS))
        programs = rows * parts_of(tokens, BLOCK_TOKENS * steps)
        dx_BTGV = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        taps = len(weight_KC)
        sums_PKC = x.new_empty(programs, taps + 1, groups * channels, dtype=torch.float32)
        first = 0
        for size, dy_BTGI in zip(ctx.sizes, d_parts, strict=True):
            constants, columns, warps = _constants(x, *others, first=first, size=size)
            tensors = (x, *others, dy_BTGI.contiguous(), dx_BTGV, sums_PKC)
            numbers = (tokens, steps, *_strides(x, constants["UNIT"]))
            ctx.launch(kernels.conv_backward, (programs, columns), tensors, numbers, constants, warps=warps)
            first += size
        sums_KC = sums_PKC.sum(0)
        d_weight_CK = sums_KC[:taps].t().to(weight_KC.dtype)
        d_bias_C = None if bias_C is None else sums_KC[taps].to(bias_C.dtype)
        return None, None, dx_BTGV, d_weight_CK, d_bias_C, None


def _readable(
    x_BTGV: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents_BT: Tensor | None
) -> tuple[Any, ...]:
    """The tensors as kernels read them: contiguous, but for the outer strides of x; taps as weight_KC."""
    x = x_BTGV if x_BTGV.stride(-1) == 1 else x_BTGV.contiguous()
    return (
        x,
        weight_CK.t().contiguous(),
        *(None if t is None else t.contiguous() for t in (bias_C, documents_BT)),
    )


def _strides(x_BTGV: Tensor, unit: int) -> tuple[int, ...]:
    """The outer strides of x, in units."""
    return tuple(stride // unit for stride in x_BTGV.stride()[:3])


def _constants(
    x_BTGV: Tensor,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    documents_BT: Tensor | None,
    *,
    first: int,
    size: int,
) -> tuple[dict[str, Any], int, int]:
    """The constexprs of a kernel for one part, the number of its blocks of channels, and warps."""
    groups, channels = x_BTGV.shape[2:]
    block = min(power_of_two(size), 512)
    constants = {
        "DOCUMENTS": documents_BT is not None, "BIAS": bias_C is not None, "G": groups, "V": channels,
        "FIRST": first, "SIZE": size, "UNIT": gcd(*x_BTGV.stride()[:3], ALIGNED), "K": len(weight_KC),
        "BT": BLOCK_TOKENS, "BC": block,
    }  # fmt: skip
    return constants, groups * parts_of(size, block), max(block // (32 * CHANNELS_PER_THREAD), 1)
