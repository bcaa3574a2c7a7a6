"""Triton kernels over many tensors in one launch: each program takes one chunk of one tensor.

`owner` and `chunk` say which chunk of which tensor a program has. Tensors are given by their distances from
some `base` tensor, in units of so many elements as a wide load takes (`WIDE`): the compiler then knows what a
pointer is a multiple of, which it does not of an address that is loaded. For the same reason full chunks have
no mask. Where a tensor is not aligned, the unit is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(base, distances, index, first, WIDE: tl.constexpr):
    """Pointer to element `first` of a tensor."""
    return base + tl.load(distances + index) * WIDE + first


@triton.jit
def square_sums(
    base, distances, owner, chunk, sizes, sums,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of each chunk."""
    program = tl.program_id(0)
    index, first = tl.load(owner + program), tl.load(chunk + program) * CHUNK
    left = tl.minimum(tl.load(sizes + index) - first, CHUNK).to(tl.int32)
    x = _pointer(base, distances, index, first, WIDE)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if left == CHUNK:
        for start in tl.static_range(0, CHUNK, BLOCK):
            value = tl.load(x + start + tl.arange(0, BLOCK))
            total += value * value
    else:
        for start in range(0, left, BLOCK):
            n = start + tl.arange(0, BLOCK)
            value = tl.load(x + n, mask=n < left, other=0.0)
            total += value * value
    tl.store(sums + program, tl.sum(total, 0))


@triton.jit
def tensor_sums(sums, firsts, squares, BLOCK: tl.constexpr):
    """The sum of the chunks of each tensor, in float64, by a program each."""
    index = tl.program_id(0)
    start, stop = tl.load(firsts + index), tl.load(firsts + index + 1)
    found = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(start, stop, BLOCK):
        n = first + tl.arange(0, BLOCK)
        found += tl.load(sums + n, mask=n < stop, other=0.0).to(tl.float64)
    tl.store(squares + index, tl.sum(found, 0))


@triton.jit
def adamw(
    base, narrow_base, distances, narrows, decays, owner, chunk, sizes, corrections, scale, skip, count, rate,
    BETA1: tl.constexpr, REST1: tl.constexpr, BETA2: tl.constexpr, REST2: tl.constexpr, EPS: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of AdamW on each chunk, with gradients times `scale`; nothing if `skip` is set. `distances` are
    those of `count` main parameters, gradients, first and second moments. Unless `NARROW`, the unit of
    distances of narrow copies, is 0, each parameter has such a copy."""
    skipped = False
    if skip is not None:
        skipped = tl.load(skip) != 0
    if not skipped:
        program = tl.program_id(0)
        index, first = tl.load(owner + program), tl.load(chunk + program) * CHUNK
        left = tl.minimum(tl.load(sizes + index) - first, CHUNK).to(tl.int32)
        main = _pointer(base, distances, index, first, WIDE)
        grad = _pointer(base, distances, index + count, first, WIDE)
        exp_avg = _pointer(base, distances, index + 2 * count, first, WIDE)
        exp_avg_sq = _pointer(base, distances, index + 3 * count, first, WIDE)
        narrow = main
        if NARROW:
            narrow = _pointer(narrow_base, narrows, index, first, NARROW)
        step = rate / tl.load(corrections).to(tl.float32)
        widening = 1.0 / tl.sqrt(tl.load(corrections + 1).to(tl.float32))
        kept = 1.0 - rate * tl.load(decays + index)
        factor = 1.0
        if scale is not None:
            factor = tl.load(scale).to(tl.float32)
        if left == CHUNK:
            for start in range(0, CHUNK, BLOCK):
                n = start + tl.arange(0, BLOCK)
                _update(
                    main + n, grad + n, exp_avg + n, exp_avg_sq + n, narrow + n, None,
                    step, widening, kept, factor, BETA1, REST1, BETA2, REST2, EPS, NARROW,
                )  # fmt: skip
        else:
            for start in range(0, left, BLOCK):
                n = start + tl.arange(0, BLOCK)
                _update(
                    main + n, grad + n, exp_avg + n, exp_avg_sq + n, narrow + n, n < left,
                    step, widening, kept, factor, BETA1, REST1, BETA2, REST2, EPS, NARROW,
                )  # fmt: skip


@triton.jit
def _update(
    main, grad, exp_avg, exp_avg_sq, narrow, inside, step, widening, kept, factor,
    BETA1: tl.constexpr, REST1: tl.constexpr, BETA2: tl.constexpr, REST2: tl.constexpr, EPS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    g = tl.load(grad, mask=inside) * factor
    m = BETA1 * tl.load(exp_avg, mask=inside) + REST1 * g
    v = BETA2 * tl.load(exp_avg_sq, mask=inside) + REST2 * g * g
    weight = tl.load(main, mask=inside) * kept - step * m / (tl.sqrt(v) * widening + EPS)
    tl.store(main, weight, mask=inside)
    tl.store(exp_avg, m, mask=inside)
    tl.store(exp_avg_sq, v, mask=inside)
    if NARROW:
        tl.store(narrow, weight.to(narrow.dtype.element_ty), mask=inside)
