"""MoE permute and unpermute in Triton: every row is read once and written once.

Without gaps, permute reads each token once and writes it to its rows: 604 MB for 16,384 tokens of 2,048 bf16
channels and 8 slots. Row by row it would read a token once per slot, 1,074 MB, as all tokens exceed the L2
cache. With gaps, rows without a slot must become zero, so it goes row by row.

Kernels are not specialized on the numbers of tokens and rows, which change with every micro-batch.

Shapes: N tokens, S slots of a token, M rows, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.permute.device import rows as kernels

COLUMNS = 2048
"""Maximum channels per program."""
ENTRIES = 8192
"""Elements per program of the permute, over several tokens or rows."""


def permute(launch: Launcher, x_NC: Tensor, token_M: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
    """Same as `reference.permute`."""
    x_NC = x_NC.contiguous()
    (rows,), (tokens, channels) = token_M.shape, x_NC.shape
    out_MC = x_NC.new_empty(rows, channels)
    columns = min(COLUMNS, power_of_two(channels))
    height = max(ENTRIES // columns, 1)
    constants = {"CHANNELS": channels, "ROWS": height, "COLS": columns}
    if rows and gaps:
        grid = (parts_of(rows, height), parts_of(channels, columns))
        launch(kernels.permute_rows, grid, (x_NC, token_M, out_MC), (rows, tokens), constants, warps=4)
    elif rows:
        grid = (parts_of(tokens, height), parts_of(channels, columns))
        constants = {"SLOTS": row_NS.shape[1], **constants}
        given = (x_NC, row_NS.contiguous(), out_MC)
        launch(kernels.permute_tokens, grid, given, (tokens,), constants, warps=4)
    return out_MC


def unpermute(launch: Launcher, y_MC: Tensor, row_NS: Tensor, *, gaps: bool) -> Tensor:
    """Same as `reference.unpermute`; sums the slots in order."""
    y_MC, row_NS = y_MC.contiguous(), row_NS.contiguous()
    (rows, channels), (tokens, slots) = y_MC.shape, row_NS.shape
    out_NC = y_MC.new_empty(tokens, channels)
    columns = min(COLUMNS, power_of_two(channels))
    if tokens:
        grid = (tokens, parts_of(channels, columns))
        wide = y_MC.dtype == torch.float64
        constants = {"CHANNELS": channels, "SLOTS": slots, "COLS": columns, "GAPS": gaps, "WIDE": wide}
        launch(kernels.unpermute, grid, (y_MC, row_NS, out_NC), (rows,), constants, warps=4)
    return out_NC
