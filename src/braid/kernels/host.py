"""Asynchronous host-to-device copies."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. Host tensors are pinned first: a copy from pageable memory would block the
    host until the GPU has finished all queued work."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)
