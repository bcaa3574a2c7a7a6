"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450). Statistics are computed in at least float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.distributed.collectives import ALONE, Group
from braid.kernels import rms_norm
from braid.kernels.rms_norm import Normalize
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload
from braid.nn.work import Work, moved


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

    def upcasts(self, workload: Workload) -> bool:
        """Whether it saves an upcast copy of its input instead of the input itself."""
        return workload.mixed and not self._fuses(workload)

    def _fuses(self, workload: Workload) -> bool:
        available = rms_norm.fuses(workload.device, workload.dtype, self.channels)
        return available and workload.may_fuse("rms_norm")

    def cost(self, workload: Workload, vectors: int, *, wide: bool = False) -> Cost:
        """The cost for `vectors` inputs, of the activation dtype or `wide`. The fused kernel saves the input as
        it is; on a CPU the normalized input is saved too."""
        if self._fuses(workload):
            saved_input = vectors * self.channels * (workload.wide if wide else workload.narrow)
            return Cost(kept=saved_input + vectors * workload.wide, passing=saved_input)
        entries = vectors * (self.channels * (2 if workload.device == "cpu" else 1) + 1)
        weight = self.channels if workload.mixed else 0
        passing = vectors * self.channels * (2 * workload.wide + workload.narrow)
        return Cost(kept=(entries + weight) * workload.wide, passing=passing)

    def work(self, workload: Workload, vectors: int, region: str = "") -> Work:
        """One kernel in each direction; another sums what programs found of the weight's gradient."""
        if not rms_norm.fuses("cuda", workload.dtype, self.channels):
            return _upcast_work(workload, vectors * self.channels, region)
        entries, factors = vectors * self.channels * workload.narrow, vectors * workload.wide
        return moved(2 * entries + factors, 3 * entries + factors, launches=(1, 3), region=region)


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

    def upcasts(self, workload: Workload) -> bool:
        """Whether it saves an upcast copy of its input instead of the input itself."""
        return workload.mixed

    def cost(self, workload: Workload, vectors: int) -> Cost:
        weights = 2 * self.channels if workload.mixed else 0
        passing = vectors * self.channels * (2 * workload.wide + workload.narrow)
        return Cost(kept=(vectors * (self.channels + 2) + weights) * workload.wide, passing=passing)

    def work(self, workload: Workload, vectors: int, region: str = "") -> Work:
        return _upcast_work(workload, vectors * self.channels, region)


def _upcast_work(workload: Workload, entries: int, region: str) -> Work:
    """A norm of torch: casts of input, weights and output, and in backward another pass for the weights."""
    cast = (workload.narrow + workload.wide) if workload.mixed else 0
    forward, backward = 2 * (workload.wide + cast), 5 * workload.wide + 2 * cast
    launches = (5, 7) if workload.mixed else (1, 3)
    return moved(entries * forward, entries * backward, launches=launches, region=region)


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
    """Build a norm. `copies` are the ranks that replicate its weight and see other tokens."""
    if kind == "layer":
        return LayerNorm(channels, eps, copies=copies, device=device, dtype=dtype)
    return RmsNorm(channels, eps, normalize=normalize, copies=copies, device=device, dtype=dtype)
