"""Weight gradient of a linear layer, gradᵀ · x, written or accumulated where it is wanted.

On a GPU the product itself accumulates: tensor cores sum in float32 anyway, and cuBLAS adds a float32 output to
what it has summed (beta = 1). A narrow gradient, its cast and its addition would move 14 bytes per weight more,
and round. A CPU has no such product.

Shapes: N tokens, I channels in, O channels out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_product(out_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, *, accumulate: bool) -> None:
    """Write gradᵀ · x, or add it. `out_OI` may be strided, and wider than the factors."""
    grad_ON = grad_NO.t()
    if out_OI.dtype != x_NI.dtype and out_OI.is_cuda and out_OI.dtype == torch.float32:
        if accumulate:
            torch.addmm(out_OI, grad_ON, x_NI, out_dtype=torch.float32, out=out_OI)
        else:
            torch.mm(grad_ON, x_NI, out_dtype=torch.float32, out=out_OI)
    elif accumulate:
        out_OI.add_(grad_ON.mm(x_NI))
    elif out_OI.dtype == x_NI.dtype and out_OI.is_contiguous():
        torch.mm(grad_ON, x_NI, out=out_OI)
    else:
        out_OI.copy_(grad_ON.mm(x_NI))
