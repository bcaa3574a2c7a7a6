"""Outputs of the scan in one pass over the tokens.

    y_q = Σ_{s ≤ q} (c_q · b_s) decay_qs dt_s x_s + since_start_q · S c_q + skip · x_q

A program walks over the chunks of a segment with the state of one head in registers: x is read and y written
once, the state never leaves the chip. B and C are read by every head of their group at about the same time, so
they come from L2. Rows are cut into several segments only where there are too few heads to fill the GPU; the
states between segments then come from `states`.

Shapes: B rows, T tokens, H heads, G groups, L chunks, D head channels, N state channels, Z segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of
from braid.kernels.ssd.device.decays import ChunkDecays
from braid.kernels.ssd.device.tiles import between, load_state, load_tokens, store_state, store_tokens


class OutputVariant(NamedTuple):
    """Tile sizes; a program holds all channels of the state."""

    head_dim: int
    warps: int = 4
    stages: int = 2


def scan_outputs(
    launch: Launcher,
    x_BTHD: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    skip_H: Tensor,
    decays: ChunkDecays,
    entering_BHZDN: Tensor | None,
    variant: OutputVariant,
    *,
    segment: int,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state, from the states that enter every segment of `segment` chunks; None if there is
    one segment, which starts from zero."""
    rows, tokens, heads, head_dim = x_BTHD.shape
    groups, state = b_BTGN.shape[2:]
    *_, chunks, chunk = decays.high_BHLQ.shape
    y_BTHD = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    final_BHDN = x_BTHD.new_empty(rows, heads, head_dim, state, dtype=torch.float32)
    segments, tiles = parts_of(chunks, segment), parts_of(head_dim, variant.head_dim)
    launch(
        _scan_outputs,
        (rows * heads, segments * tiles),
        (x_BTHD, b_BTGN, c_BTGN, skip_H, *decays.tensors, entering_BHZDN, y_BTHD, final_BHDN),
        (
            tokens, heads, chunks, segments, segment,
            *x_BTHD.stride()[:3], *b_BTGN.stride()[:3], *c_BTGN.stride()[:3],
        ),
        {
            "EXACT": decays.exact, "ENTERING": entering_BHZDN is not None,
            "R": heads // groups, "D": head_dim, "N": state, "Q": chunk, "BD": variant.head_dim,
            "BN": max(triton.next_power_of_2(state), 16), "PRECISION": "tf32x3", "STAGES": variant.stages,
        },
        warps=variant.warps,
    )  # fmt: skip
    return y_BTHD, final_BHDN


# --------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["tokens", "chunks", "segments", "segment"])
def _scan_outputs(
    x, b, c, skip, high, low, dt, entering, y, final, tokens, heads, chunks, segments, segment,
    x_row, x_token, x_head, b_row, b_token, b_group, c_row, c_token, c_group,
    EXACT: tl.constexpr, ENTERING: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    of_head = tl.program_id(0).to(tl.int64)
    piece, d_begin = tl.program_id(1) % segments, tl.program_id(1) // segments * BD
    x += row * x_row + head * x_head
    b += row * b_row + head // R * b_group
    c += row * c_row + head // R * c_group
    y += (row * tokens * heads + head) * D
    vectors = of_head * chunks * Q
    q = tl.arange(0, Q)
    scale = tl.load(skip + head).to(tl.float32)
    if ENTERING:
        state = load_state(entering + (of_head * segments + piece) * D * N, D, N, BD, BN, d_begin).to(
            tl.float32
        )
    else:
        state = tl.zeros((BD, BN), dtype=tl.float32)
    for chunk in tl.range(piece * segment, tl.minimum(piece * segment + segment, chunks), num_stages=STAGES):
        start = chunk * Q
        value = load_tokens(x, x_token, start, tokens, D, Q, BD, d_begin)
        key = load_tokens(b, b_token, start, tokens, N, Q, BN)
        query = load_tokens(c, c_token, start, tokens, N, Q, BN)
        here = vectors + start
        total, end = tl.load(high + here + q), tl.load(high + here + Q - 1)
        step = tl.load(dt + here + q)
        rest, end_rest, rest_q, rest_s = 0.0, 0.0, 0.0, 0.0
        if EXACT:
            rest, end_rest = tl.load(low + here + q), tl.load(low + here + Q - 1)
            rest_q, rest_s = rest[:, None], rest[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        decay = between(total[None, :], total[:, None], rest_s, rest_q, EXACT)
        weights = tl.where(q[:, None] >= q[None, :], scores * decay * step[None, :], 0.0).to(value.dtype)
        out = tl.dot(query, tl.trans(state.to(query.dtype)), input_precision=PRECISION)
        out = tl.dot(weights, value, out * tl.exp2(total)[:, None], input_precision=PRECISION)
        wide = value.to(tl.float32)
        store_tokens(y, heads * D, start, tokens, out + scale * wide, D, Q, BD, d_begin)
        written = (wide * (between(total, end, rest, end_rest, EXACT) * step)[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(written), key, state * tl.exp2(end), input_precision=PRECISION)
    if piece == segments - 1:
        store_state(final + of_head * D * N, state, D, N, BD, BN, d_begin)
