"""MLP activations in Triton: projections are read and the result is written once, in their own dtype, with
float32 arithmetic between. Backward reads projections and gradient and writes the gradient of the projections.

Saves the projections alone. Each entry is computed by itself, so the result is deterministic.

Shapes: F ffn channels, G projections into the ffn, `_` any leading dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.architecture import Activation, Glu
from braid.kernels.activation import SWIGLU
from braid.kernels.glu.device import kernels
from braid.kernels.grouped_mlp.device.activation import FusedActivation
from braid.kernels.launch import Launcher, parts_of

BLOCK = 1024
"""ffn channels per program."""
WARPS = 4


class FusedMlpActivation:
    """`MlpActivation` with Triton kernels."""

    joined = True

    def __init__(self) -> None:
        self.launch = Launcher()

    def __call__(self, activation: Activation, *projected: Tensor, glu: Glu = SWIGLU) -> Tensor:
        """The activation of projections `__FG`, with G innermost: gate and up of a channel are neighbours."""
        (h__FG,) = projected
        fused = FusedActivation(kind=activation, alpha=glu.alpha, limit=glu.limit, offset=glu.offset)
        a__F: Tensor = _Activation.apply(self.launch, fused, h__FG)
        return a__F


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: Launcher, activation: FusedActivation, h__FG: Tensor) -> Tensor:
        h__FG = h__FG.contiguous()
        *leading, channels = h__FG.shape
        a__F = h__FG.new_empty(*leading, channels // activation.projections)
        _launch(launch, kernels.activation_forward, activation, (h__FG, a__F), a__F.numel())
        ctx.save_for_backward(h__FG)
        ctx.launch, ctx.activation = launch, activation
        return a__F

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da__F: Tensor) -> tuple[None, None, Tensor]:
        (h__FG,) = ctx.saved_tensors
        dh__FG = torch.empty_like(h__FG)
        tensors = (h__FG, da__F.contiguous(), dh__FG)
        _launch(ctx.launch, kernels.activation_backward, ctx.activation, tensors, da__F.numel())
        return None, None, dh__FG


def _launch(
    launch: Launcher, kernel: Any, activation: FusedActivation, tensors: tuple[Tensor, ...], entries: int
) -> None:
    if entries:
        constants = {**activation.constants, "PROJECTIONS": activation.projections, "BLOCK": BLOCK}
        launch(kernel, (parts_of(entries, BLOCK), 1), tensors, (entries,), constants, warps=WARPS)
