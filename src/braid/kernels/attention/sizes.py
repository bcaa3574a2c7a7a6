"""Head sizes that the fused kernels support; without Triton, so that a plan can ask."""

from __future__ import annotations

MAX_HEAD_DIM = 256
"""Wider heads do not fit into shared memory."""
CHANNELS = 8
"""Channels of a head come in multiples of this, 16 bytes of 16-bit numbers."""


def supports(head_dim: int) -> bool:
    """Whether the fused kernels support heads of so many channels."""
    return head_dim <= MAX_HEAD_DIM and head_dim % CHANNELS == 0
