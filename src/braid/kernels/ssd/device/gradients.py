"""Gradients of one chunk and group of heads, from the state at its start and the gradient of that at its end.

With w_qs = (c_q · b_s) decay_qs, of one head, and dx̃ the gradient of dt · x:

    dx̃_s = Σ_q w_qs dy_q + to_end_s · dS b_s              dx = dt · dx̃ + skip · dy
    dc_q = Σ_h Σ_s dscore_qs b_s + since_start_q · Sᵀ dy_q      dscore_qs = decay_qs dt_s (x_s · dy_q)
    db_s = Σ_h Σ_q dscore_qs c_q + to_end_s · dSᵀ dt_s x_s

The gradient of a cumulative log decay is what the decays out of it receive less those into it. A program adds
up all heads of a group (or a fixed part of them) in order, so db and dc need no atomics, and the products of
dscore with b and c are computed once for all of them. Pairs are held as [s, q], which is how dx̃ needs them.
Three kernels, because the accumulators of db and dc do not fit into registers beside the rest: the first leaves
dscore, summed over heads, to the other two.

Shapes: B rows, T tokens, H heads, G groups, P parts of the heads of a group, L chunks, Q tokens of a chunk (S
as the earlier of a pair), D head channels, N state channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher
from braid.kernels.ssd.device.decays import ChunkDecays
from braid.kernels.ssd.device.tiles import between, load_state, load_tokens, store_state, store_tokens


class SsdGradientVariant(NamedTuple):
    """Tile sizes; a program holds all channels of a head and of its state."""

    parts: int = 1
    """Programs that share the heads of a group."""
    warps: int = 4
    stages: int = 2


class ChunkGradients(NamedTuple):
    """Gradients of the inputs, and of the decays' vectors."""

    dx_BTHD: Tensor
    db_BTGN: Tensor
    dc_BTGN: Tensor
    d_skip_H: Tensor
    d_total_BHLQ: Tensor
    """Of the cumulative log decays."""
    d_step_BHLQ: Tensor
    """Of dt as a factor of x."""


def chunk_gradients(
    launch: Launcher,
    x_BTHD: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    skip_H: Tensor,
    dy_BTHD: Tensor,
    decays: ChunkDecays,
    states_BHLDN: Tensor,
    d_states_BHLDN: Tensor,
    variant: SsdGradientVariant,
) -> ChunkGradients:
    """Gradients from the states at the start, and their gradients at the end, of every chunk."""
    rows, tokens, heads, head_dim = x_BTHD.shape
    groups, state = b_BTGN.shape[2:]
    *_, chunks, chunk = decays.high_BHLQ.shape
    whole = variant.parts == 1
    dx_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    partial = (variant.parts, rows, tokens, groups, state)
    db, dc = (x_BTHD.new_empty(partial, dtype=x_BTHD.dtype if whole else torch.float32) for _ in range(2))
    d_scores = x_BTHD.new_empty(rows * chunks, groups * variant.parts, chunk, chunk)
    d_skip_LH = x_BTHD.new_empty(rows * chunks, heads, dtype=torch.float32)
    d_total, d_step = torch.empty_like(decays.dt_BHLQ), torch.empty_like(decays.dt_BHLQ)
    grid, numbers = (rows * chunks, groups * variant.parts), (rows, tokens, heads, chunks)
    x_strides, b_strides, c_strides, y_strides = (t.stride()[:3] for t in (x_BTHD, b_BTGN, c_BTGN, dy_BTHD))
    constants = {
        "EXACT": decays.exact, "G": groups, "R": heads // groups, "PARTS": variant.parts,
        "D": head_dim, "N": state, "Q": chunk, "BD": max(triton.next_power_of_2(head_dim), 16),
        "BN": max(triton.next_power_of_2(state), 16), "PRECISION": "tf32x3", "STAGES": variant.stages,
    }  # fmt: skip
    launch(
        _value_gradients,
        grid,
        (
            x_BTHD, b_BTGN, c_BTGN, skip_H, dy_BTHD, *decays.tensors, d_states_BHLDN,
            dx_BTHD, d_scores, d_skip_LH, d_total, d_step,
        ),
        (*numbers, *x_strides, *b_strides, *c_strides, *y_strides),
        constants,
        warps=variant.warps,
    )  # fmt: skip
    launch(
        _key_gradients,
        grid,
        (x_BTHD, c_BTGN, *decays.tensors, d_states_BHLDN, d_scores, db),
        (*numbers, *x_strides, *c_strides),
        constants,
        warps=variant.warps,
    )
    launch(
        _query_gradients,
        grid,
        (b_BTGN, c_BTGN, dy_BTHD, decays.high_BHLQ, states_BHLDN, d_states_BHLDN, d_scores, dc, d_total),
        (*numbers, *b_strides, *c_strides, *y_strides),
        constants,
        warps=variant.warps,
    )
    db_BTGN, dc_BTGN = (part[0] if whole else part.sum(0).to(x_BTHD.dtype) for part in (db, dc))
    return ChunkGradients(dx_BTHD, db_BTGN, dc_BTGN, d_skip_LH.sum(0).to(skip_H.dtype), d_total, d_step)


# --------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def _value_gradients(
    x, b, c, skip, dy, high, low, dt, d_states, dx, d_scores, d_skip, d_total, d_step,
    rows, tokens, heads, chunks,
    x_row, x_token, x_head, b_row, b_token, b_group, c_row, c_token, c_group, y_row, y_token, y_head,
    EXACT: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of x, skip, dt and the scores, and of the cumulative log decays but for what states hand on."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    group, part = tl.program_id(1) % G, tl.program_id(1) // G
    start, q = chunk * Q, tl.arange(0, Q)
    key = load_tokens(b + row * b_row + group * b_group, b_token, start, tokens, N, Q, BN)
    query = load_tokens(c + row * c_row + group * c_group, c_token, start, tokens, N, Q, BN)
    d_pairs = tl.zeros((Q, Q), dtype=tl.float32)
    for i in tl.range(0, R // PARTS, num_stages=STAGES):
        head = group * R + part * (R // PARTS) + i
        of_chunk = (row * heads + head) * chunks + chunk
        value = load_tokens(x + row * x_row + head * x_head, x_token, start, tokens, D, Q, BD)
        grad = load_tokens(dy + row * y_row + head * y_head, y_token, start, tokens, D, Q, BD)
        d_state = load_state(d_states + of_chunk * D * N, D, N, BD, BN)
        here = of_chunk * Q
        total, end = tl.load(high + here + q), tl.load(high + here + Q - 1)
        step = tl.load(dt + here + q)
        rest, end_rest, rest_q, rest_s = 0.0, 0.0, 0.0, 0.0
        if EXACT:
            rest, end_rest = tl.load(low + here + q), tl.load(low + here + Q - 1)
            rest_q, rest_s = rest[None, :], rest[:, None]

        # Scores are recomputed for every head: the tensor cores have time, and registers are short.
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        decay = between(total[:, None], total[None, :], rest_s, rest_q, EXACT)
        decay = tl.where(q[:, None] <= q[None, :], decay, 0.0)
        weights = scores * decay
        d_weights = tl.dot(value, tl.trans(grad), input_precision=PRECISION) * step[:, None]
        d_pairs += decay * d_weights
        # The decay of a token to itself is 1: leaving it out keeps its digits from cancelling in the sums.
        moved = tl.where(q[:, None] < q[None, :], weights * d_weights, 0.0)
        received = tl.sum(moved, 0) - tl.sum(moved, 1)
        d_written = tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)

        ending = between(total, end, rest, end_rest, EXACT)
        d_added = tl.dot(key, tl.trans(d_state), input_precision=PRECISION) * ending[:, None]
        wide = value.to(tl.float32)
        added = tl.sum(wide * d_added, 1) * step
        received += tl.where(q == Q - 1, tl.sum(added, 0), 0.0) - added
        tl.store(d_total + here + q, received)
        d_written += d_added
        tl.store(d_step + here + q, tl.sum(wide * d_written, 1))
        wide_grad = grad.to(tl.float32)
        tl.store(d_skip + (row * chunks + chunk) * heads + head, tl.sum(tl.sum(wide * wide_grad, 1), 0))
        scale = tl.load(skip + head).to(tl.float32)
        found = d_written * step[:, None] + scale * wide_grad
        store_tokens(dx + (row * tokens * heads + head) * D, heads * D, start, tokens, found, D, Q, BD)
    pairs = (tl.program_id(0).to(tl.int64) * G * PARTS + tl.program_id(1)) * Q * Q
    store_state(d_scores + pairs, d_pairs, Q, Q, Q, Q)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def _key_gradients(
    x, c, high, low, dt, d_states, d_scores, db, rows, tokens, heads, chunks,
    x_row, x_token, x_head, c_row, c_token, c_group,
    EXACT: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of b."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    group, part = tl.program_id(1) % G, tl.program_id(1) // G
    start, q = chunk * Q, tl.arange(0, Q)
    query = load_tokens(c + row * c_row + group * c_group, c_token, start, tokens, N, Q, BN)
    pairs = (tl.program_id(0).to(tl.int64) * G * PARTS + tl.program_id(1)) * Q * Q
    d_key = tl.dot(load_state(d_scores + pairs, Q, Q, Q, Q), query, input_precision=PRECISION)
    for i in tl.range(0, R // PARTS, num_stages=STAGES):
        head = group * R + part * (R // PARTS) + i
        of_chunk = (row * heads + head) * chunks + chunk
        value = load_tokens(x + row * x_row + head * x_head, x_token, start, tokens, D, Q, BD)
        d_state = load_state(d_states + of_chunk * D * N, D, N, BD, BN)
        here = of_chunk * Q
        total, end = tl.load(high + here + q), tl.load(high + here + Q - 1)
        rest, end_rest = 0.0, 0.0
        if EXACT:
            rest, end_rest = tl.load(low + here + q), tl.load(low + here + Q - 1)
        ending = between(total, end, rest, end_rest, EXACT) * tl.load(dt + here + q)
        written = (value.to(tl.float32) * ending[:, None]).to(value.dtype)
        d_key = tl.dot(written, d_state, d_key, input_precision=PRECISION)
    place = ((part * rows + row) * tokens * G + group) * N
    store_tokens(db + place, G * N, start, tokens, d_key, N, Q, BN)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def _query_gradients(
    b, c, dy, high, states, d_states, d_scores, dc, d_total, rows, tokens, heads, chunks,
    b_row, b_token, b_group, c_row, c_token, c_group, y_row, y_token, y_head,
    EXACT: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of c, and the rest of that of the cumulative log decays."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    group, part = tl.program_id(1) % G, tl.program_id(1) // G
    start, q = chunk * Q, tl.arange(0, Q)
    key = load_tokens(b + row * b_row + group * b_group, b_token, start, tokens, N, Q, BN)
    query = load_tokens(c + row * c_row + group * c_group, c_token, start, tokens, N, Q, BN)
    pairs = (tl.program_id(0).to(tl.int64) * G * PARTS + tl.program_id(1)) * Q * Q
    d_query = tl.dot(tl.trans(load_state(d_scores + pairs, Q, Q, Q, Q)), key, input_precision=PRECISION)
    for i in tl.range(0, R // PARTS, num_stages=STAGES):
        head = group * R + part * (R // PARTS) + i
        of_chunk = (row * heads + head) * chunks + chunk
        grad = load_tokens(dy + row * y_row + head * y_head, y_token, start, tokens, D, Q, BD)
        state = load_state(states + of_chunk * D * N, D, N, BD, BN)
        d_state = load_state(d_states + of_chunk * D * N, D, N, BD, BN)
        here = of_chunk * Q
        total, end = tl.load(high + here + q), tl.load(high + here + Q - 1)
        since = tl.exp2(total)
        read = (grad.to(tl.float32) * since[:, None]).to(grad.dtype)
        d_query = tl.dot(read, state, d_query, input_precision=PRECISION)
        far = tl.dot(query, tl.trans(state), input_precision=PRECISION)
        kept = tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0) * tl.exp2(end)
        received = tl.sum(far * grad.to(tl.float32), 1) * since + tl.where(q == Q - 1, kept, 0.0)
        tl.store(d_total + here + q, tl.load(d_total + here + q) + received)
    place = ((part * rows + row) * tokens * G + group) * N
    store_tokens(dc + place, G * N, start, tokens, d_query, N, Q, BN)
