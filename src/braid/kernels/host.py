"""From the host to a device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU reads it by itself, from memory that nobody moves: a copy from other memory
    would first wait until the GPU has done all that it was given."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)
