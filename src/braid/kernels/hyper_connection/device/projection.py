"""Projections of all streams of a token, and the sum of their squares, in one pass over the streams.

Tensor cores multiply bfloat16 without loss, and so a float32 weight is cut into bfloat16 parts whose sum it is:
three of them hold all 24 bits. Activations of other dtypes are multiplied as float32, by three products of
tf32.

Shapes: N tokens, K = streams · channels, M rows of the projection, P parts of the weight, Z parts of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ProjectionVariant:
    """One way to run the projection."""

    tokens: int = 128
    depth: int = 64
    """Channels that are multiplied at a time."""
    splits: int = 4
    """Programs that share a token, each with its part of the channels."""
    warps: int = 4
    stages: int = 4
    parts: int = 3
    """Of the weight, where activations are bfloat16."""


class Projected(NamedTuple):
    """Partial sums, still to be added up."""

    sums_ZNM: Tensor
    squares_ZN: Tensor


def project(x_NK: Tensor, weight_MK: Tensor, variant: ProjectionVariant) -> Projected:
    """The products of every token with the weight, and the squares of its channels."""
    tokens, channels = x_NK.shape
    rows, v = len(weight_MK), variant
    steps = triton.cdiv(triton.cdiv(channels, v.depth), v.splits)
    splits = triton.cdiv(channels, steps * v.depth)
    found = Projected(weight_MK.new_empty(splits, tokens, rows), weight_MK.new_empty(splits, tokens))
    in_parts = x_NK.dtype == torch.bfloat16
    weight = cut(weight_MK, v.parts) if in_parts else weight_MK
    _project[(triton.cdiv(tokens, v.tokens), splits)](
        x_NK, weight, *found, tokens, channels, steps,
        PARTS=v.parts if in_parts else 0, M=rows, WIDTH=width(rows), EVEN=channels % (steps * v.depth) == 0,
        BT=v.tokens, BK=v.depth, num_warps=v.warps, num_stages=v.stages,
    )  # fmt: skip
    return found


def cut(weight_MK: Tensor, parts: int) -> Tensor:
    """A float32 weight as bfloat16 parts P, M, K, largest first, that add up to it."""
    parts_PMK = torch.empty(parts, *weight_MK.shape, dtype=torch.bfloat16, device=weight_MK.device)
    entries, block = weight_MK.numel(), 2048
    _cut[(triton.cdiv(entries, block),)](weight_MK, parts_PMK, entries, PARTS=parts, BLOCK=block, num_warps=4)
    return parts_PMK


def width(rows: int) -> int:
    """How wide a tile that holds so many rows of the projection is."""
    return max(16, triton.next_power_of_2(rows))


@triton.jit
def _cut(weight, parts, entries, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < entries
    left = tl.load(weight + place, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        high = left.to(parts.dtype.element_ty)
        tl.store(parts + part * entries + place, high, mask=inside)
        left -= high.to(tl.float32)


@triton.jit
def _project(
    x,
    weight,
    sums,
    squares,
    tokens,
    channels,
    steps,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    m = tl.arange(0, WIDTH)
    split = tl.program_id(1)
    here = t < tokens
    first = t.to(tl.int64) * channels
    result = tl.zeros((BT, WIDTH), dtype=tl.float32)
    square = tl.zeros((BT, BK), dtype=tl.float32)
    for step in range(split * steps, (split + 1) * steps):
        k = step * BK + tl.arange(0, BK)
        of_x = here[:, None]
        of_weight = (m < M)[None, :]
        if not EVEN:
            of_x = of_x & (k < channels)[None, :]
            of_weight = of_weight & (k < channels)[:, None]
        tile = tl.load(x + first[:, None] + k[None, :], mask=of_x, other=0.0)
        entries = weight + m[None, :] * channels + k[:, None]
        added = tl.zeros((BT, WIDTH), dtype=tl.float32)
        if PARTS > 0:
            for part in tl.static_range(PARTS):
                w = tl.load(entries + part * M * channels, mask=of_weight, other=0.0)
                added = tl.dot(tile, w, added)
        else:
            w = tl.load(entries, mask=of_weight, other=0.0)
            added = tl.dot(tile.to(tl.float32), w, added, input_precision="tf32x3")
        # Added by itself, so that a step waits for its product: a tile that registers want too has no buffer to
        # spare, and a product still under way would read what comes next. Triton makes a plain sum part of the
        # product, which then goes on after the step.
        result = tl.fma(added, 1.0, result)
        wide = tile.to(tl.float32)
        square += wide * wide
    row = split.to(tl.int64) * tokens + t
    tl.store(sums + row[:, None] * M + m[None, :], result, mask=here[:, None] & (m < M)[None, :])
    tl.store(squares + row, tl.sum(square, 1), mask=here)
