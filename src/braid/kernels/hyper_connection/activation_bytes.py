"""What hyper-connections keep for their backward, in bytes: closed forms.

`narrow` and `wide` are bytes of an activation and of what is float32 or better.
"""

from __future__ import annotations


def fused(tokens: int, streams: int, channels: int, *, narrow: int, wide: int) -> int:
    """Streams, the branch's result, and numbers of a token: its projections and their scale, its mappings."""
    numbers = 2 * streams * (streams + 2) + 1
    return tokens * ((streams + 1) * channels * narrow + numbers * wide)


def fused_exit(tokens: int, streams: int, channels: int, *, narrow: int, wide: int) -> int:
    """The same without a branch to return from."""
    return tokens * (streams * channels * narrow + (2 * streams + 1) * wide)


def plain(tokens: int, streams: int, channels: int, steps: int, *, narrow: int, wide: int) -> int:
    """`reference`: three wide copies of the streams, of which the third is for the way out, one of the branch's
    result; every Sinkhorn step keeps a matrix and the sums that divide it. `channels` is at least 2."""
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
