"""Norms over the last dim. Statistics are float32 or better, whatever the dtype of the activations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group
from braid.kernels import rms_norm
from braid.kernels.rms_norm import Normalize
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Portion


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight."""

    def __init__(
        self,
        channels: int,
        eps: float,
        *,
        normalize: Normalize = rms_norm.PLAIN,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.copies = copies
        self.eps = eps
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.eps)

    def canonical(self) -> dict[str, Canonical]:
        return {
            "weight": Canonical(parameter="weight", shape=(self.channels,), fill="ones", copies=self.copies)
        }

    def widens(self, portion: Portion) -> bool:
        """Whether it keeps a wide copy of what it is given, and not that itself."""
        return portion.mixed and not rms_norm.fuses(portion.device, portion.dtype, self.channels)

    def cost(self, portion: Portion, vectors: int, *, wide: bool = False) -> Cost:
        """Of so many vectors, as wide as activations or wider. A CPU keeps them normed as well, before the
        weight; kernels keep them as they are."""
        if rms_norm.fuses(portion.device, portion.dtype, self.channels):
            given = vectors * self.channels * (portion.wide if wide else portion.narrow)
            return Cost(kept=given + vectors * portion.wide, passing=given)
        entries = vectors * (self.channels * (2 if portion.device == "cpu" else 1) + 1)
        weight = self.channels if portion.mixed else 0
        passing = vectors * self.channels * (2 * portion.wide + portion.narrow)
        return Cost(kept=(entries + weight) * portion.wide, passing=passing)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias."""

    def __init__(
        self,
        channels: int,
        eps: float,
        *,
        copies: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.copies = copies
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), (self.channels,), weight, bias, self.eps).to(x.dtype)

    def canonical(self) -> dict[str, Canonical]:
        return {
            "weight": Canonical(parameter="weight", shape=(self.channels,), fill="ones", copies=self.copies),
            "bias": Canonical(parameter="bias", shape=(self.channels,), fill="zeros", copies=self.copies),
        }

    def widens(self, portion: Portion) -> bool:
        """Whether it keeps a wide copy of what it is given, and not that itself."""
        return portion.mixed

    def cost(self, portion: Portion, vectors: int) -> Cost:
        """Of so many vectors."""
        weights = 2 * self.channels if portion.mixed else 0
        passing = vectors * self.channels * (2 * portion.wide + portion.narrow)
        return Cost(kept=(vectors * (self.channels + 2) + weights) * portion.wide, passing=passing)


def norm(
    kind: Literal["rms", "layer"],
    channels: int,
    eps: float,
    normalize: Normalize = rms_norm.PLAIN,
    *,
    copies: Group = ALONE,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> RmsNorm | LayerNorm:
    """The norm that a model asks for. `copies` are the ranks that hold its weight and see other tokens."""
    if kind == "layer":
        return LayerNorm(channels, eps, copies=copies, device=device, dtype=dtype)
    return RmsNorm(channels, eps, normalize=normalize, copies=copies, device=device, dtype=dtype)
