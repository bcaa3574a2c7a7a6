"""Triton kernels of cross-entropy over a chunk of logits: one program per token.

A token's logits are read twice, for their logsumexp and for their gradient; the second time they come from the
L2 cache. The gradient overwrites them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits, label, counts, top, total, chosen, logsumexp, upstream, pitch, width, held,
    SCALE: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`SUMS` writes the maximum of a token's logits, the sum of their exponentials relative to it, and the
    logit of the label, each over the `held` columns; zero where another rank holds the label.

    `GRADIENT` overwrites the `width` columns with (softmax - onehot) / SCALE · upstream; with the logsumexp of
    these logits if `SUMS` is set too, else with the one given. `upstream` may be None, for 1.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * pitch
    if tl.load(counts + token) == 0:
        # Whatever the logits of such a token are, they may be neither in the loss nor in the gradient.
        if SUMS:
            tl.store(top + token, 0.0)
            tl.store(total + token, 1.0)
            tl.store(chosen + token, 0.0)
        if GRADIENT:
            for first in range(0, width, BLOCK):
                n = first + tl.arange(0, BLOCK)
                tl.store(row + n, tl.zeros((BLOCK,), dtype=logits.dtype.element_ty), mask=n < width)
    else:
        target = tl.load(label + token)
        if SUMS:
            highest, sum_exp = _sums(row, held, SCALE, BLOCK)
            here = target < held
            own = tl.load(row + tl.where(here, target, 0), mask=here, other=0.0).to(tl.float32) / SCALE
            tl.store(top + token, highest)
            tl.store(total + token, sum_exp)
            tl.store(chosen + token, own)
            # Nothing may be overwritten before all threads have read their logits.
            tl.debug_barrier()
            normalizer = highest + tl.log(sum_exp)
        else:
            normalizer = tl.load(logsumexp + token)
        if GRADIENT:
            factor = 1.0 / SCALE
            if upstream is not None:
                factor *= tl.load(upstream).to(tl.float32)
            for first in range(0, width, BLOCK):
                n = first + tl.arange(0, BLOCK)
                x = tl.load(row + n, mask=n < held, other=float("-inf")).to(tl.float32) / SCALE
                grad = tl.exp(x - normalizer) - (n == target).to(tl.float32)
                # Padding has no logits; a NaN or infinite normalizer may not reach its gradient.
                grad = tl.where(n < held, grad * factor, 0.0)
                tl.store(row + n, grad.to(logits.dtype.element_ty), mask=n < width)


@triton.jit
def _sums(row, held, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum, and the sum of exponentials relative to it; -inf and 0 of no columns. Each thread has maxima
    and sums of its own (one for eight logits that it loads together), so that no step waits for all threads."""
    LANES: tl.constexpr = BLOCK // 8
    highest = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for first in range(0, held, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(row + n, mask=n < held, other=float("-inf")).to(tl.float32) / SCALE
        x = x.reshape(LANES, 8)
        higher = tl.maximum(highest, tl.max(x, 1))
        # Before the first finite logit there is nothing to scale, and inf - inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(highest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        highest = higher
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp(highest - base), 0)


@triton.jit
def scaled(x, factor, y, entries, BLOCK: tl.constexpr):
    """y = x · factor, with the factor in float32: torch would round it to the dtype of x first."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + n, mask=n < entries, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(y + n, value.to(y.dtype.element_ty), mask=n < entries)
