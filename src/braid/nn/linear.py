"""The linear map, the one place where dense weights meet activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.nn.canonical import Canonical, Fill


class Linear(nn.Module):
    """y = x · weightᵀ + bias. The output dims may be several; they are flattened into one channel dim."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int | tuple[int, ...],
        *,
        bias: bool = False,
        fill: Fill = "normal",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dims = (channels_out,) if isinstance(channels_out, int) else channels_out
        self.channels_in = channels_in
        self.channels_out = math.prod(dims)
        self.fill = fill
        self.weight = nn.Parameter(torch.empty(*dims, channels_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dims, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.view(self.channels_out, self.channels_in), bias)

    def apart(self, x: Tensor) -> list[Tensor]:
        """The outputs as one tensor per entry of the last output dim. Each product reads its rows of the
        weight in place, which on a CPU is much faster than taking a product with all of them apart."""
        weights = self.weight.unbind(-2)
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind(-1)
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def part(self, index: tuple[int | slice, ...]) -> dict[str, Canonical]:
        """The canonical tensors of some of the outputs, chosen by their output dims."""
        outputs = math.prod(torch.empty(self.weight.shape[:-1], device="meta")[index].shape)
        weight = Canonical(parameter="weight", shape=(outputs, self.channels_in), fill=self.fill, index=index)
        bias = Canonical(parameter="bias", shape=(outputs,), fill="zeros", index=index)
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": bias}

    def canonical(self) -> dict[str, Canonical]:
        return self.part(())

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels_in * self.channels_out
