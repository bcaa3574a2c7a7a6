"""The experts' MLP as a plain loop over experts: any dtype, any sizes, any device.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn
(gate and up, or up alone).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation
from braid.kernels.activation import activate


def grouped_mlp(
    x_NC: Tensor,
    probs_N: Tensor,
    counts_E: Tensor,
    w_in_EFGC: Tensor,
    w_down_ECF: Tensor,
    activation: Activation,
) -> Tensor:
    """What each row's expert makes of it, times the row's probability.

    `counts_E` says how many of the sorted rows belong to each expert, and sums to N. An expert without rows
    takes part with none, which gives it gradients that are exactly zero.
    """
    counts = counts_E.tolist()
    experts = zip(x_NC.split(counts), w_in_EFGC.unbind(0), w_down_ECF.unbind(0), strict=True)
    y_NC = torch.cat([_mlp(x_nC, w_in_FGC, w_down_CF, activation) for x_nC, w_in_FGC, w_down_CF in experts])
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)


def _mlp(x_nC: Tensor, w_in_FGC: Tensor, w_down_CF: Tensor, activation: Activation) -> Tensor:
    projected = [F.linear(x_nC, w_FC) for w_FC in w_in_FGC.unbind(1)]
    return F.linear(activate(activation, *projected), w_down_CF)
