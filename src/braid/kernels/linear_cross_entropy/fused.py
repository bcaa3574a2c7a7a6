"""Cross-entropy of a chunk of logits in Triton: one pass writes the sums of the loss and overwrites the logits
with their gradient. Arithmetic is float32. A program adds the blocks of a token's logits in order, so the
result is deterministic.

Shapes: n tokens of one chunk, R rows of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of, power_of_two
from braid.kernels.linear_cross_entropy.chunked import LogitChunk, Sums
from braid.kernels.linear_cross_entropy.device import kernels

BLOCK = 8192
"""Logits per step of a program."""
WARPS = 8
SCALED_BLOCK = 2048


class FusedPasses:
    """`Passes` with Triton kernels."""

    def __init__(self) -> None:
        self.launch = Launcher()

    def sums(self, chunk: LogitChunk, sums: Sums, *, gradient: bool) -> None:
        """Same as `PlainPasses.sums`."""
        self._launch(chunk, (*sums, None, None), SUMS=True, GRADIENT=gradient)

    def gradient(self, chunk: LogitChunk, logsumexp_n: Tensor, upstream: Tensor | None) -> None:
        """Same as `PlainPasses.gradient`."""
        self._launch(chunk, (None, None, None, logsumexp_n, upstream), SUMS=False, GRADIENT=True)

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        """Same as `PlainPasses.scaled`."""
        y = torch.empty_like(x)
        if x.numel():
            grid = (parts_of(x.numel(), SCALED_BLOCK), 1)
            constants = {"BLOCK": SCALED_BLOCK}
            self.launch(kernels.scaled, grid, (x, factor, y), (x.numel(),), constants, warps=4)
        return y

    def _launch(self, chunk: LogitChunk, tensors: tuple[Tensor | None, ...], **passes: Any) -> None:
        logits_nR, row_n, mask_n, held, scale = chunk
        tokens, width = logits_nR.shape
        if tokens:
            block = max(min(BLOCK, power_of_two(width)), 8)
            constants = {"SCALE": scale, **passes, "BLOCK": block}
            numbers = (logits_nR.stride(0), width, held)
            given = (logits_nR, row_n, mask_n, *tensors)
            self.launch(kernels.cross_entropy, (tokens, 1), given, numbers, constants, warps=WARPS)
