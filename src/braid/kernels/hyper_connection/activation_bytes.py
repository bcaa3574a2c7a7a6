"""Activation memory of hyper-connections: bytes saved for backward, in closed form.

`narrow` is the item size of activations, `wide` that of tensors in float32 or wider.
"""

from __future__ import annotations


def fused(tokens: int, streams: int, channels: int, *, narrow: int, wide: int) -> int:
    """The streams, the branch output, and per token the projections, their RMS scale and the mappings."""
    scalars = 2 * streams * (streams + 2) + 1
    return tokens * ((streams + 1) * channels * narrow + scalars * wide)


def fused_exit(tokens: int, streams: int, channels: int, *, narrow: int, wide: int) -> int:
    """`contract` of the fused implementation."""
    return tokens * (streams * channels * narrow + (2 * streams + 1) * wide)


def plain(tokens: int, streams: int, channels: int, steps: int, *, narrow: int, wide: int) -> int:
    """`reference`: three wide copies of the streams (two in `pre`, one in `post`) and one of the branch output;
    every Sinkhorn step saves a matrix and its row or column sums. `channels` is at least 2."""
    entries = streams * channels
    copies = 3 if narrow != wide else 1
    rows = streams * (streams + 2)
    mappings = 2 * rows + 1 + 2 * 2 * streams
    sinkhorn = 2 * steps * streams * streams + streams * streams + (2 * steps - 1) * streams
    return tokens * wide * (copies * entries + channels + mappings + sinkhorn) + rows * wide


def plain_exit(tokens: int, streams: int, channels: int, *, narrow: int, wide: int) -> int:
    """`reference.contract`: two wide copies of the streams."""
    copies = 2 if narrow != wide else 1
    return tokens * wide * (copies * streams * channels + 4 * streams + 1)
