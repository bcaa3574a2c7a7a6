"""The experts' MLP as a plain loop over experts: any dtype, any sizes, any device.

Shapes: N rows, sorted by expert; E experts; C hidden channels; F ffn channels; G projections into the ffn
(gate and up, or up alone).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU, activate


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
    """What each row's expert makes of it, its last bias included, times the row's probability.

    `counts_E` says how many of the sorted rows belong to each expert, and sums to N. An expert without rows
    takes part with none, which gives it gradients that are exactly zero.
    """
    nothing = [None] * len(counts_E)
    experts = zip(
        x_NC.split(counts_E.tolist()),
        w_in_EFGC.unbind(0),
        nothing if b_in_EFG is None else b_in_EFG.unbind(0),
        w_down_ECF.unbind(0),
        nothing if b_down_EC is None else b_down_EC.unbind(0),
        strict=True,
    )
    y_NC = torch.cat([_mlp(*expert, activation, glu) for expert in experts])
    return y_NC * probs_N.to(y_NC.dtype).unsqueeze(-1)


def _mlp(
    x_nC: Tensor,
    w_in_FGC: Tensor,
    b_in_FG: Tensor | None,
    w_down_CF: Tensor,
    b_down_C: Tensor | None,
    activation: Activation,
    glu: Glu,
) -> Tensor:
    weights = w_in_FGC.unbind(1)
    biases = [None] * len(weights) if b_in_FG is None else b_in_FG.unbind(1)
    projected = [F.linear(x_nC, w_FC, b_F) for w_FC, b_F in zip(weights, biases, strict=True)]
    return F.linear(activate(activation, *projected, glu=glu), w_down_CF, b_down_C)
