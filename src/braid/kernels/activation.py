"""Activation functions of MLPs and experts.

    swiglu  gate · sigmoid(alpha · gate) · (up + offset), with optional clamping (Shazeer, 2020; GPT-OSS)
    relu2   relu(up)² (So et al., 2021)
    gelu    exact GELU of up, with erf; gelu_tanh: its approximation with tanh (Hendrycks and Gimpel, 2016)

Shapes: F ffn channels, `_` any leading dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu

SWIGLU = Glu()
"""Plain SwiGLU."""


def projections(activation: Activation) -> tuple[str, ...]:
    """Input projections of an activation, in the order in which weights are stored."""
    return ("gate", "up") if activation == "swiglu" else ("up",)


def activate(activation: Activation, *projected__F: Tensor, glu: Glu = SWIGLU) -> Tensor:
    """Apply an activation to its `projections`."""
    match activation:
        case "swiglu":
            gate__F, up__F = projected__F
            if glu.limit is not None:
                gate__F = gate__F.clamp(max=glu.limit)
                up__F = up__F.clamp(-glu.limit, glu.limit)
            gated__F = F.silu(gate__F) if glu.alpha == 1 else gate__F * torch.sigmoid(glu.alpha * gate__F)
            return gated__F * (up__F + glu.offset if glu.offset else up__F)
        case "relu2":
            (up__F,) = projected__F
            return torch.relu(up__F).square()
        case "gelu":
            (up__F,) = projected__F
            return F.gelu(up__F)
        case "gelu_tanh":
            (up__F,) = projected__F
            return F.gelu(up__F, approximate="tanh")
