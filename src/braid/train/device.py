"""The device a run is computed on: which, in what arithmetic, how fast at best, how much memory it holds."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from braid.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
"""`auto` takes a GPU where there is one."""

PEAK_BF16_FLOPS = MappingProxyType(
    {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12, "B200": 2250e12, "GB200": 2500e12}
)
"""Dense bf16 peak by the makers' data sheets, by the word in the device's name. No entry, no MFU."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, as the run's header shows it."""

    torch: torch.device
    name: str
    """What a person calls it."""
    peak_bf16_flops: float | None
    """None where nobody has told us."""

    def mfu(self, flops: float, seconds: float, dtype: str) -> float | None:
        """Share of the peak that these model FLOPs in this time are; None where the peak is not known."""
        if self.peak_bf16_flops is None or dtype != "bf16" or seconds <= 0:
            return None
        return flops / seconds / self.peak_bf16_flops

    def memory_bytes(self) -> int:
        """The most that was held at once: by the allocator on a GPU, by the process on a CPU."""
        if self.torch.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch)
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def memory_total(self) -> int:
        """All that the device has."""
        if self.torch.type == "cuda":
            return torch.cuda.get_device_properties(self.torch).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done, so that a clock means something."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)


def choose_device(wanted: DeviceName) -> Device:
    """The device that was asked for; `auto` takes a GPU where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU here; set --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        threads = torch.get_num_threads()
        name = f"cpu, {threads} {'thread' if threads == 1 else 'threads'}"
        return Device(torch=torch.device("cpu"), name=name, peak_bf16_flops=None)
    name = torch.cuda.get_device_name()
    words = name.replace("-", " ").split()
    peak = next((flops for word, flops in PEAK_BF16_FLOPS.items() if word in words), None)
    return Device(torch=torch.device("cuda", torch.cuda.current_device()), name=name, peak_bf16_flops=peak)


def set_arithmetic(*, deterministic: bool) -> None:
    """Settings of torch as a whole: full float32 products, and where asked only kernels that repeat exactly."""
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(True)  # mixers that forget fast make numbers on which a CPU is many times slower
    torch.use_deterministic_algorithms(deterministic)
