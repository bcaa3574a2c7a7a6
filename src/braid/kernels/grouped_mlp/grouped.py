"""The experts' MLP through `F.grouped_mm`: one call per projection for all experts, no host synchronisation.

`grouped_mm` leaves rows past the last offset uninitialised, in its output and in its input gradient; here the
counts sum to the number of rows, so there are none. It takes no float64, no bias, and strides of whole 16
bytes only.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate

ALIGNMENT = 16
"""Bytes of which every row of every operand must be a multiple."""


def grouped_mlp(
    x_NC: Tensor,
    probs_N: Tensor,
    counts_E: Tensor,
    w_in_EFGC: Tensor,
    w_down_ECF: Tensor,
    activation: Activation,
    *,
    glu: Glu = SWIGLU,
    b_in_EFG: Tensor | None = None,
    b_down_EC: Tensor | None = None,
) -> Tensor:
    """What each row's expert makes of it, times the row's probability: as `reference.grouped_mlp`."""
    _, ffn, projections, _ = w_in_EFGC.shape
    ends_E = counts_E.cumsum(0).to(torch.int32)
    projected = F.grouped_mm(x_NC, w_in_EFGC.flatten(1, 2).transpose(1, 2), offs=ends_E)
    if b_in_EFG is not None:
        projected = projected + _OfRows.apply(b_in_EFG.flatten(1), counts_E, len(x_NC))
    hidden_NF = activate(activation, *projected.unflatten(-1, (ffn, projections)).unbind(-1), glu=glu)
    y_NC = F.grouped_mm(hidden_NF, w_down_ECF.transpose(1, 2), offs=ends_E)
    if b_down_EC is not None:
        y_NC = y_NC + _OfRows.apply(b_down_EC, counts_E, len(x_NC))
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)


class _OfRows(torch.autograd.Function):
    """Each row's bias. Its gradient is a product with ones, which adds the rows of an expert in a fixed order;
    the gradient of an indexed read would add them atomically."""

    @staticmethod
    def forward(ctx: Any, b_EC: Tensor, counts_E: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(counts_E)
        return b_EC.repeat_interleave(counts_E, dim=0, output_size=rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (counts_E,) = ctx.saved_tensors
        grad_NC = grads[0].contiguous()
        ones_NA = grad_NC.new_ones(len(grad_NC), ALIGNMENT // grad_NC.element_size())
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(ones_NA.t(), grad_NC, offs=ends_E)[:, 0], None, None
