"""Split-K projection of all streams of a token, with their sum of squares, in one pass over the streams.

Tensor cores multiply bfloat16 exactly, so a float32 weight is split into bfloat16 parts that sum to it: three
parts hold all 24 bits. Activations of other dtypes are multiplied as float32, with three TF32 products
(tf32x3).

Shapes: N tokens, K = streams · channels, M rows of the projection, W at least M + 1 (padded), P parts of the
weight, Z slices of K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of, power_of_two


@dataclass(frozen=True, kw_only=True)
class ProjectionVariant:
    """Tile sizes of the projection."""

    tokens: int = 128
    depth: int = 64
    """Channels per product."""
    splits: int = 4
    """Programs per token, each with a slice of the channels."""
    warps: int = 4
    stages: int = 4
    parts: int = 3
    """bfloat16 parts of the weight, if activations are bfloat16."""


def project(launch: Launcher, x_NK: Tensor, weight_MK: Tensor, variant: ProjectionVariant) -> Tensor:
    """Partial sums (Z, N, W), which the caller reduces over Z: M products with the weight, then the sum of
    squares."""
    tokens, channels = x_NK.shape
    rows, v = weight_MK.shape[0], variant
    steps = parts_of(parts_of(channels, v.depth), v.splits)
    splits = parts_of(channels, steps * v.depth)
    wide, parts = width(rows), v.parts if x_NK.dtype == torch.bfloat16 else 0
    sums_ZNW = weight_MK.new_empty(splits, tokens, wide)
    launch(
        _project,
        (parts_of(tokens, v.tokens), splits),
        (x_NK, cut(launch, weight_MK, parts) if parts else weight_MK, sums_ZNW),
        (tokens, steps),
        {
            "K": channels, "M": rows, "WIDTH": wide, "PARTS": parts,
            "EVEN": channels % v.depth == 0, "BT": v.tokens, "BK": v.depth,
        },
        warps=v.warps,
        stages=v.stages,
    )  # fmt: skip
    return sums_ZNW


def cut(launch: Launcher, weight_MK: Tensor, parts: int) -> Tensor:
    """A float32 weight as a sum of bfloat16 parts (P, M, K), largest first."""
    parts_PMK = torch.empty(parts, *weight_MK.shape, dtype=torch.bfloat16, device=weight_MK.device)
    entries, block = weight_MK.numel(), 2048
    grid, constants = (parts_of(entries, block), 1), {"PARTS": parts, "BLOCK": block}
    launch(_cut, grid, (weight_MK, parts_PMK), (entries,), constants, warps=4)
    return parts_PMK


def width(rows: int) -> int:
    """Tile width for the rows of the projection and the sum of squares."""
    return max(16, power_of_two(rows + 1))


@triton.jit(do_not_specialize=["entries"])
def _cut(weight, parts, entries, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < entries
    rest = tl.load(weight + place, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        high = rest.to(parts.dtype.element_ty)
        tl.store(parts + part * entries + place, high, mask=inside)
        rest -= high.to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "steps"])
def _project(
    x,
    weight,
    sums,
    tokens,
    steps,
    K: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    m = tl.arange(0, WIDTH)
    split = tl.program_id(1)
    here = t < tokens
    first = t.to(tl.int64) * K
    result = tl.zeros((BT, WIDTH), dtype=tl.float32)
    square = tl.zeros((BT, BK // 8), dtype=tl.float32)
    for step in range(split * steps, min((split + 1) * steps, tl.cdiv(K, BK))):
        k = step * BK + tl.arange(0, BK)
        of_x = here[:, None]
        of_weight = (m < M)[None, :]
        if not EVEN:
            of_x = of_x & (k < K)[None, :]
            of_weight = of_weight & (k < K)[:, None]
        tile = tl.load(x + first[:, None] + k[None, :], mask=of_x, other=0.0)
        entries = weight + m[None, :] * K + k[:, None]
        added = tl.zeros((BT, WIDTH), dtype=tl.float32)
        if PARTS > 0:
            for part in tl.static_range(PARTS):
                w = tl.load(entries + part * M * K, mask=of_weight, other=0.0)
                added = tl.dot(tile, w, added)
        else:
            w = tl.load(entries, mask=of_weight, other=0.0)
            added = tl.dot(tile.to(tl.float32), w, added, input_precision="tf32x3")
        wide = tile.to(tl.float32)
        square += tl.sum((wide * wide).reshape(BT, BK // 8, 8), 2)
        # An explicit FMA makes every step wait for its product. Triton would fold a plain `+=` into the
        # asynchronous product, which then outlives the step; the tile is also read from registers (for the
        # squares) and has no spare pipeline buffer, so the product could read the next tile.
        result = tl.fma(added, 1.0, result)
    result = tl.where((m == M)[None, :], tl.sum(square, 1)[:, None], result)
    row = split.to(tl.int64) * tokens + t
    tl.store(sums + row[:, None] * WIDTH + m[None, :], result, mask=here[:, None])
