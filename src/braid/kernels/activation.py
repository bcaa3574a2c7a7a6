"""The activations of dense MLPs and of experts.

A gated activation takes two projections of its input, gate and up; the others take up alone.

Shapes: F ffn channels, `_` any leading dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.architecture import Activation, Glu

SWIGLU = Glu()
"""The gated activation without a limit or an offset."""


def projections(activation: Activation) -> tuple[str, ...]:
    """The projections that an activation takes, in the order in which weights are stored."""
    return ("gate", "up") if activation == "swiglu" else ("up",)


def activate(activation: Activation, *projected__F: Tensor, glu: Glu = SWIGLU) -> Tensor:
    """The ffn channels, from the projections that `projections` names. `gelu` is the exact one, with erf."""
    match activation:
        case "swiglu":
            gate__F, up__F = projected__F
            return _gated(gate__F, up__F, glu)
        case "relu2":
            (up__F,) = projected__F
            return torch.relu(up__F).square()
        case "gelu":
            (up__F,) = projected__F
            return F.gelu(up__F)


def _gated(gate__F: Tensor, up__F: Tensor, glu: Glu) -> Tensor:
    if glu.limit is not None:
        gate__F = gate__F.clamp(max=glu.limit)
        up__F = up__F.clamp(-glu.limit, glu.limit)
    opened__F = F.silu(gate__F) if glu.alpha == 1 else gate__F * torch.sigmoid(glu.alpha * gate__F)
    return opened__F * (up__F + glu.offset if glu.offset else up__F)
