"""The experts' MLP through `F.grouped_mm`: one call per projection for all experts, no host synchronisation.

`grouped_mm` leaves rows past the last offset uninitialised, in its output and in its input gradient; here the
counts sum to the number of rows, so there are none. It takes no float64, and strides of whole 16 bytes only.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation
from braid.kernels.activation import activate

ALIGNMENT = 16
"""Bytes of which every row of every operand must be a multiple."""


def grouped_mlp(
    x_NC: Tensor,
    probs_N: Tensor,
    counts_E: Tensor,
    w_in_EFGC: Tensor,
    w_down_ECF: Tensor,
    activation: Activation,
) -> Tensor:
    """What each row's expert makes of it, times the row's probability: as `reference.grouped_mlp`."""
    _, ffn, projections, _ = w_in_EFGC.shape
    ends_E = counts_E.cumsum(0).to(torch.int32)
    projected = F.grouped_mm(x_NC, w_in_EFGC.flatten(1, 2).transpose(1, 2), offs=ends_E)
    hidden_NF = activate(activation, *projected.unflatten(-1, (ffn, projections)).unbind(-1))
    y_NC = F.grouped_mm(hidden_NF, w_down_ECF.transpose(1, 2), offs=ends_E)
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)
