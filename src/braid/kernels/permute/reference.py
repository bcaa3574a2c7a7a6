"""Tokens to rows and back in plain torch: any dtype, any device.

Shapes: N tokens, S slots of a token, M rows, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spread(x_NC: Tensor, token_M: Tensor, *, gaps: bool) -> Tensor:
    """Each row's token; zeros where there are `gaps` and a row's token is N, nobody."""
    return read(x_NC, token_M, gaps=gaps)


def collect(y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
    """Each token's sum over its rows, in at least float32; where there are `gaps`, row M adds nothing."""
    y_SC = read(y_MC, row_NS.flatten(), gaps=gaps)
    return y_SC if row_NS.shape[1] == 1 else y_SC.unflatten(0, row_NS.shape).sum(1)


def read(x: Tensor, index: Tensor, *, gaps: bool) -> Tensor:
    """Entries of x; zero where the index is past its end."""
    if gaps:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)
