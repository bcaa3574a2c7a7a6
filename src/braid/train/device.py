"""The device of a run: selection, peak FLOPs and MFU, memory, and torch's numerics settings."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from braid.errors import ConfigError
from braid.timing.peaks import PEAK_BF16_FLOPS, known_word

DeviceName = Literal["auto", "cpu", "cuda"]
"""`auto` selects a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A compute device and its properties."""

    torch: torch.device
    name: str
    peak_bf16_flops: float | None
    """None if unknown."""

    def mfu(self, flops: float, seconds: float, dtype: str) -> float | None:
        """Model FLOPs utilisation; None if the peak of this device and dtype is unknown."""
        if self.peak_bf16_flops is None or dtype != "bf16" or seconds <= 0:
            return None
        return flops / seconds / self.peak_bf16_flops

    def memory_bytes(self) -> int:
        """Peak memory so far: of the caching allocator on a GPU, resident set size on a CPU."""
        if self.torch.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch)
        unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def memory_total(self) -> int:
        """Total memory of the device."""
        if self.torch.type == "cuda":
            return torch.cuda.get_device_properties(self.torch).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def synchronize(self) -> None:
        """Wait for all queued work, so that wall-clock times include it."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)


def choose_device(requested: DeviceName) -> Device:
    """The requested device; `auto` selects a GPU if there is one."""
    if requested not in get_args(DeviceName):
        raise ConfigError(f"device {requested}: must be one of {', '.join(get_args(DeviceName))}")
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU here; set --device cpu or auto")
    if requested == "cpu" or not torch.cuda.is_available():
        threads = torch.get_num_threads()
        name = f"cpu, {threads} {'thread' if threads == 1 else 'threads'}"
        return Device(torch=torch.device("cpu"), name=name, peak_bf16_flops=None)
    name = torch.cuda.get_device_name()
    word = known_word(name)
    peak = None if word is None else PEAK_BF16_FLOPS[word]
    return Device(torch=torch.device("cuda", torch.cuda.current_device()), name=name, peak_bf16_flops=peak)


def set_arithmetic(*, deterministic: bool) -> None:
    """Set torch's global numerics: full fp32 matmuls (no TF32), and deterministic kernels only if requested."""
    torch.set_float32_matmul_precision("highest")
    # Fast-decaying recurrent states underflow to denormals, which a CPU computes many times slower.
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(deterministic)
