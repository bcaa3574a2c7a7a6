"""MoE permute and unpermute in PyTorch. Any dtype, any device.

Shapes: N tokens, S slots of a token, M rows, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x_NC: Tensor, token_M: Tensor, *, gaps: bool) -> Tensor:
    """Permute: the token of each row. With `gaps`, rows with token index N are zero (padding)."""
    return read(x_NC, token_M, gaps=gaps)


def unpermute(y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
    """Unpermute: the sum of the rows of each token. With `gaps`, row index M contributes nothing (dropped)."""
    y_SC = read(y_MC, row_NS.flatten(), gaps=gaps)
    return y_SC if row_NS.shape[1] == 1 else y_SC.unflatten(0, row_NS.shape).sum(1)


def read(x: Tensor, index: Tensor, *, gaps: bool) -> Tensor:
    """x[index]; with `gaps`, zero where the index is len(x)."""
    if gaps:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)
