"""Strided rows: the vectors along the last dim of a non-contiguous tensor, addressed by at most three
strides."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Row r starts at (r // (middle · inner)) · outer_stride + (r // inner % middle) · middle_stride
    + (r % inner) · inner_stride."""

    x: Tensor
    """Has stride 1 in its last dim."""
    number: int
    middle: int
    inner: int
    strides: tuple[int, int, int]
    """Outer, middle, inner."""


def rows_of(x: Tensor) -> Rows:
    """The rows of a tensor without a copy if three strides suffice, otherwise of a contiguous copy."""
    if not x.numel():
        return Rows(x, 0, 1, 1, (0, 0, 0))
    if x.is_contiguous():
        return Rows(x, x.numel() // x.shape[-1], 1, 1, (x.shape[-1], 0, 0))
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3:
        return rows_of(x.contiguous())
    number = x.numel() // x.shape[-1]
    if len(dims) < 3:
        first, *others = dims or [(1, x.shape[-1])]
        dims = [first, *[(1, 0)] * (3 - max(len(dims), 1)), *others]
    (_, outer), (middle, middle_stride), (inner, inner_stride) = dims
    return Rows(x, number, middle, inner, (outer, middle_stride, inner_stride))
