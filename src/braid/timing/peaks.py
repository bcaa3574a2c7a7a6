"""Peaks of GPUs, from the vendors' data sheets: what measurements are compared with, never a prediction."""

from __future__ import annotations

from types import MappingProxyType

PEAK_BF16_FLOPS = MappingProxyType(
    {"H100": 989e12, "H200": 989e12, "H20": 148e12, "A100": 312e12, "B200": 2250e12, "GB200": 2500e12}
)
"""Dense bf16 peak, by a word of the device name. MFU needs an entry here."""
PEAK_BANDWIDTH = MappingProxyType(
    {"H100": 3.35e12, "H200": 4.8e12, "H20": 4.0e12, "A100": 2.0e12, "B200": 8.0e12, "GB200": 8.0e12}
)
"""Bytes per second of memory."""


def known_word(name: str) -> str | None:
    """The word of a device name that has a peak: `H200` of `NVIDIA H200`."""
    words = name.upper().replace("-", " ").split()
    return next((word for word in words if word in PEAK_BF16_FLOPS), None)


def device_name(name: str) -> str:
    """`NVIDIA H200` as the name of a file: h200."""
    return (known_word(name) or name.replace("-", " ").split()[-1]).lower()
