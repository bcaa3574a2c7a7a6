"""Asynchronous copies between host and device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. Host tensors are pinned first: a copy from pageable memory would block the
    host until the GPU has finished all queued work."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def copy_to_(out: Tensor, x: Tensor) -> None:
    """Copy a tensor of the host into memory of a device, without waiting for the device."""
    out.copy_(x.contiguous().pin_memory() if out.is_cuda else x, non_blocking=True)


class AsyncHostCopy:
    """A copy of a tensor on its way to the host. It is queued behind the work that computes the tensor, so the
    host waits for that much, and not for what was queued later."""

    def __init__(self, x: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = x
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
