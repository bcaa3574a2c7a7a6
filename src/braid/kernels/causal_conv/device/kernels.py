"""Triton kernels of the causal convolution with SiLU, forward and backward.

A thread holds a few channels and walks over the tokens of a block, which are unrolled. All inputs of a block
are loaded, in their own dtype, before the first result is stored: the compiler would not move a load before a
store, and every token would wait for memory. Backward recomputes the convolution, and the gradients of K - 1
tokens beyond its block.

Names: K taps, BT tokens of a block, BC channels of a block, V channels of a group, SIZE those of the part that
is computed, FIRST its offset in the group, UNIT a divisor of all strides of x, which are given in this unit:
Triton asks of an argument only whether it is a multiple of 16, and a multiple of 8 allows wide loads too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def conv_forward(
    x, weight, bias, documents, y, tokens, x_row, x_token, x_group,
    DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, G: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tokens, BT)
    row, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BT
    group = tl.program_id(1) // tl.cdiv(SIZE, BC)
    c = tl.program_id(1) % tl.cdiv(SIZE, BC) * BC + tl.arange(0, BC)
    here = c < SIZE
    x += (row * x_row + group * x_group) * UNIT + FIRST
    if DOCUMENTS:
        documents += row * tokens
    y += (row * tokens * G + group) * SIZE
    taps, shift = _weights(weight, bias, group * V + FIRST + c, here, G * V, BIAS, K, BC)
    inputs = _load(x, x_token * UNIT, start - K + 1, tokens, c, here, BT + K - 1)
    reaches = _reaches(documents, start - K + 1, tokens, DOCUMENTS, BT + K - 1)
    for i in tl.static_range(BT):
        t = start + i
        z = _convolve(taps, shift, inputs, reaches, i, DOCUMENTS, K)
        out = z * tl.sigmoid(z)
        tl.store(y + t.to(tl.int64) * G * SIZE + c, out.to(y.dtype.element_ty), mask=here & (t < tokens))


@triton.jit(do_not_specialize=["tokens", "steps"])
def conv_backward(
    x, weight, bias, documents, dy, dx, sums, tokens, steps, x_row, x_token, x_group,
    DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, G: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of x, and to `sums` the program's part of those of the K taps and the bias."""
    spans = tl.cdiv(tokens, BT * steps)
    row, first = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans * BT * steps
    group = tl.program_id(1) // tl.cdiv(SIZE, BC)
    c = tl.program_id(1) % tl.cdiv(SIZE, BC) * BC + tl.arange(0, BC)
    here, channel = c < SIZE, group * V + FIRST + c
    x += (row * x_row + group * x_group) * UNIT + FIRST
    if DOCUMENTS:
        documents += row * tokens
    dy += (row * tokens * G + group) * SIZE
    dx += row * tokens * G * V
    taps, shift = _weights(weight, bias, channel, here, G * V, BIAS, K, BC)
    totals = ()
    for _ in tl.static_range(K + 1):
        totals += (tl.zeros((BC,), dtype=tl.float32),)
    for step in range(0, steps):
        start = first + step * BT
        inputs = _load(x, x_token * UNIT, start - K + 1, tokens, c, here, BT + 2 * (K - 1))
        out_grads = _load(dy, G * SIZE, start, tokens, c, here, BT + K - 1)
        reaches = _reaches(documents, start - K + 1, tokens, DOCUMENTS, BT + 2 * (K - 1))
        grads = ()
        for i in tl.static_range(BT + K - 1):
            z = _convolve(taps, shift, inputs, reaches, i, DOCUMENTS, K)
            gate = tl.sigmoid(z)
            grads += (out_grads[i].to(tl.float32) * gate * (1.0 + z * (1.0 - gate)),)
            if i < BT:
                totals = _add_to_totals(totals, grads, inputs, reaches, i, DOCUMENTS, K)
            if i >= K - 1:
                # The last token that this gradient reaches is the first for which all are known.
                found = _convolve_back(taps, grads, reaches, i, DOCUMENTS, K).to(dx.dtype.element_ty)
                reached = start + i - K + 1
                tl.store(dx + reached.to(tl.int64) * G * V + channel, found, mask=here & (reached < tokens))
    for k in tl.static_range(K + 1):
        place = (tl.program_id(0).to(tl.int64) * (K + 1) + k) * G * V + channel
        tl.store(sums + place, totals[k], mask=here)


@triton.jit
def _weights(
    weight, bias, channel, here, C: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr, BC: tl.constexpr
):
    """The K taps and the bias of the channels; taps are stored as weight_KC."""
    taps = ()
    for k in tl.static_range(K):
        taps += (tl.load(weight + k * C + channel, mask=here, other=0.0).to(tl.float32),)
    if BIAS:
        shift = tl.load(bias + channel, mask=here, other=0.0).to(tl.float32)
    else:
        shift = tl.zeros((BC,), dtype=tl.float32)
    return taps, shift


@triton.jit
def _load(x, stride, first, tokens, c, here, COUNT: tl.constexpr):
    """Channels of COUNT tokens from `first`, zero outside the row."""
    loaded = ()
    for i in tl.static_range(COUNT):
        t = first + i
        inside = here & (t >= 0) & (t < tokens)
        loaded += (tl.load(x + t.to(tl.int64) * stride + c, mask=inside, other=0.0),)
    return loaded


@triton.jit
def _reaches(documents, first, tokens, DOCUMENTS: tl.constexpr, COUNT: tl.constexpr):
    """For every token of a window, the number of those before it in the window that belong to its document."""
    reaches = ()
    if DOCUMENTS:
        reach, before = 0, tl.load(documents + first, mask=(first >= 0) & (first < tokens), other=0)
        reaches += (reach,)
        for i in tl.static_range(1, COUNT):
            t = first + i
            own = tl.load(documents + t, mask=(t >= 0) & (t < tokens), other=0)
            # What lies before the row is zero, so it does not matter whether it counts.
            reach = tl.where(own == before, reach + 1, 0)
            reaches += (reach,)
            before = own
    return reaches


@triton.jit
def _convolve(taps, shift, inputs, reaches, at: tl.constexpr, DOCUMENTS: tl.constexpr, K: tl.constexpr):
    """The convolution whose window begins `at`."""
    z = shift + taps[K - 1] * inputs[at + K - 1].to(tl.float32)
    for j in tl.static_range(1, K):
        term = taps[K - 1 - j] * inputs[at + K - 1 - j].to(tl.float32)
        if DOCUMENTS:
            # Not a product: what is not finite in another document must not get here.
            term = tl.where(reaches[at + K - 1] >= j, term, 0.0)
        z += term
    return z


@triton.jit
def _convolve_back(taps, grads, reaches, at: tl.constexpr, DOCUMENTS: tl.constexpr, K: tl.constexpr):
    """The gradient of the input K - 1 tokens before the gradient `at`, which is the last that it receives."""
    begin: tl.constexpr = at - K + 1
    found = taps[K - 1] * grads[begin]
    for j in tl.static_range(1, K):
        term = taps[K - 1 - j] * grads[begin + j]
        if DOCUMENTS:
            term = tl.where(reaches[at + j] >= j, term, 0.0)
        found += term
    return found


@triton.jit
def _add_to_totals(totals, grads, inputs, reaches, at: tl.constexpr, DOCUMENTS: tl.constexpr, K: tl.constexpr):
    """Sums for the K taps and the bias, with the gradient `at` added."""
    added = ()
    for k in tl.static_range(K):
        term = grads[at] * inputs[at + k].to(tl.float32)
        if DOCUMENTS:
            term = tl.where(reaches[at + K - 1] >= K - 1 - k, term, 0.0)
        added += (totals[k] + term,)
    added += (totals[K] + grads[at],)
    return added
