"""Triton kernels of the router: the best experts of each token, and float32 numbers as sums of narrow ones.

`top_k`: a score and its expert become one 64-bit integer, whose order is that of a stable sort: by score, then
by lower index. The largest is taken `SLOTS` times.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**63))
"""Less than any score."""
NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["tokens"])
def top_k(
    scores,
    experts,
    tokens,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLS)
    inside = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    score = tl.load(scores + token[:, None] * EXPERTS + expert[None, :], mask=inside, other=0.0)
    key = tl.where(inside, _key(score, EXPERTS - 1 - expert[None, :]), LEAST)
    for slot in tl.static_range(SLOTS):
        best = tl.max(key, 1)
        chosen = EXPERTS - 1 - (best & 0xFFFFFFFF)
        tl.store(experts + token * SLOTS + slot, chosen, mask=token < tokens)
        key = tl.where(key == best[:, None], LEAST, key)


@triton.jit
def _key(score, rank):
    """An integer that orders scores, then ranks. -0 equals 0, and every NaN is above infinity."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score == 0.0, 0, ordered)
    ordered = tl.where(score != score, NAN_KEY, ordered)
    return (ordered.to(tl.int64) << 32) | rank.to(tl.int64)


@triton.jit(do_not_specialize=["entries"])
def split_into_slots(
    numbers,
    parts,
    entries,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    SECOND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `router.fused.slots`: writes the parts 2, 0, 1, 0 of each number, or 2, 1, 0, 0."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    rest = tl.load(numbers + entry, mask=inside, other=0.0)
    first = rest.to(tl.bfloat16)
    rest = rest - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    at = parts + (entry // WIDTH) * ROW_STRIDE + entry % WIDTH
    tl.store(at, third, mask=inside)
    tl.store(at + SLOT_STRIDE, second if SECOND_FIRST else first, mask=inside)
    tl.store(at + 2 * SLOT_STRIDE, first if SECOND_FIRST else second, mask=inside)
    tl.store(at + 3 * SLOT_STRIDE, first, mask=inside)
