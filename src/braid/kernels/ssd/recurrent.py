"""SSD recurrence for one token, for generation.

Shapes: B rows, G groups, R heads per group, H = G · R heads, D head channels, N state channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(
    x_BHD: Tensor,
    dt_BH: Tensor,
    a_H: Tensor,
    b_BGN: Tensor,
    c_BGN: Tensor,
    skip_H: Tensor,
    state_BHDN: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and new state. Computes in float32 or wider; the output has the dtype of `x_BHD`."""
    wide = torch.promote_types(x_BHD.dtype, torch.float32)
    repeats = x_BHD.shape[1] // b_BGN.shape[1]
    x_wide_BHD, dt_BH = x_BHD.to(wide), dt_BH.to(wide)
    b_BHN, c_BHN = (tensor.to(wide).repeat_interleave(repeats, 1) for tensor in (b_BGN, c_BGN))
    decayed_BHDN = state_BHDN.to(wide) * (dt_BH * a_H.to(wide)).exp()[..., None, None]
    state_BHDN = decayed_BHDN + (x_wide_BHD * dt_BH.unsqueeze(-1)).unsqueeze(-1) * b_BHN.unsqueeze(-2)
    y_BHD = torch.einsum("bhdn,bhn->bhd", state_BHDN, c_BHN) + skip_H.to(wide).unsqueeze(-1) * x_wide_BHD
    return y_BHD.to(x_BHD.dtype), state_BHDN
