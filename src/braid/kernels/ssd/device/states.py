"""The state at the start of every chunk and, for backward, the gradient of the state at the end of each.

    S_{l+1} = carried_l · S_l + Σ_s to_end_s · dt_s · x_s b_sᵀ
    dS_{l-1} = carried_l · dS_l + Σ_q since_start_q · dy_q c_qᵀ

Both recurrences have the same form. A program holds a tile of one head's state in registers and walks over the
chunks, in either direction; the two directions are independent and share a launch.

Shapes: B rows, T tokens, H heads, G groups, L chunks, D head channels, N state channels, Z states that are kept
of each head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.launch import Launcher, parts_of
from braid.kernels.ssd.device.decays import ChunkDecays
from braid.kernels.ssd.device.tiles import between, load_state, load_tokens, store_state


class StateVariant(NamedTuple):
    """Tile sizes."""

    head_dim: int
    state: int
    warps: int = 4
    stages: int = 3


class StateGradient(NamedTuple):
    """What the gradients of the states are computed from."""

    dy_BTHD: Tensor
    c_BTGN: Tensor
    d_final_BHDN: Tensor | None


def scan_states(
    launch: Launcher,
    x_BTHD: Tensor,
    b_BTGN: Tensor,
    decays: ChunkDecays,
    initial_BHDN: Tensor | None,
    variant: StateVariant,
    *,
    every: int,
    dtype: torch.dtype,
    gradient: StateGradient | None = None,
    d_initial_BHDN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state at the start of every `every`-th chunk, and the gradients of those at the end of every chunk,
    both in `dtype`; the second is empty without `gradient`. Writes the gradient of the initial state to
    `d_initial_BHDN`."""
    rows, tokens, heads, head_dim = x_BTHD.shape
    groups, state = b_BTGN.shape[2:]
    *_, chunks, chunk = decays.high_BHLQ.shape
    states = x_BTHD.new_empty(rows, heads, parts_of(chunks, every), head_dim, state, dtype=dtype)
    d_states = states.new_empty((rows, heads, chunks, head_dim, state) if gradient else (0,))
    dy, c, d_final = gradient or StateGradient(x_BTHD, b_BTGN, None)
    tiles = parts_of(head_dim, variant.head_dim) * parts_of(state, variant.state)
    strides = (*x_BTHD.stride()[:3], *b_BTGN.stride()[:3], *dy.stride()[:3], *c.stride()[:3])
    launch(
        _scan_states,
        (rows * heads, tiles * (2 if gradient else 1)),
        (x_BTHD, b_BTGN, dy, c, *decays.tensors, initial_BHDN, d_final, states, d_states, d_initial_BHDN),
        (tokens, heads, chunks, every, *strides),
        {
            "REVERSE": gradient is not None, "EXACT": decays.exact,
            "INITIAL": initial_BHDN is not None, "D_FINAL": d_final is not None,
            "D_INITIAL": d_initial_BHDN is not None, "R": heads // groups, "D": head_dim, "N": state,
            "Q": chunk, "BD": variant.head_dim, "BN": variant.state,
            "PRECISION": "tf32x3", "STAGES": variant.stages,
        },
        warps=variant.warps,
    )  # fmt: skip
    return states, d_states


# --------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["tokens", "chunks", "every"])
def _scan_states(
    x, b, dy, c, high, low, dt, initial, d_final, states, d_states, d_initial,
    tokens, heads, chunks, every,
    x_row, x_token, x_head, b_row, b_token, b_group, y_row, y_token, y_head, c_row, c_token, c_group,
    REVERSE: tl.constexpr, EXACT: tl.constexpr, INITIAL: tl.constexpr, D_FINAL: tl.constexpr,
    D_INITIAL: tl.constexpr, R: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    of_head = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = tl.cdiv(N, BN) * tl.cdiv(D, BD)
    tile = tl.program_id(1) % tiles
    begins = (tile // tl.cdiv(N, BN) * BD, tile % tl.cdiv(N, BN) * BN)
    vectors = of_head * chunks * Q
    rest = low + vectors if EXACT else None
    whole = of_head * D * N
    if not REVERSE or tl.program_id(1) < tiles:
        _walk(
            x + row * x_row + head * x_head, x_token, b + row * b_row + head // R * b_group, b_token,
            high + vectors, rest, dt + vectors,
            initial + whole if INITIAL else None, states + whole * tl.cdiv(chunks, every), None,
            tokens, chunks, every, begins, INITIAL, False, False, EXACT, D, N, Q, BD, BN, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _walk(
            dy + row * y_row + head * y_head, y_token, c + row * c_row + head // R * c_group, c_token,
            high + vectors, rest, dt + vectors,
            d_final + whole if D_FINAL else None, d_states + whole * chunks,
            d_initial + whole if D_INITIAL else None,
            tokens, chunks, 1, begins, D_FINAL, D_INITIAL, True, EXACT, D, N, Q, BD, BN, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _walk(
    values, value_stride, keys, key_stride, high, low, dt, first, kept, last, tokens, chunks, every, begins,
    FIRST: tl.constexpr, LAST: tl.constexpr, BACK: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keep the state before every `every`-th chunk, from `first` (or zero) to `last`; from the end if BACK."""
    q = tl.arange(0, Q)
    if FIRST:
        state = load_state(first, D, N, BD, BN, begins[0], begins[1]).to(tl.float32)
    else:
        state = tl.zeros((BD, BN), dtype=tl.float32)
    for i in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - i if BACK else i
        if chunk % every == 0:
            here = kept + (chunk // every).to(tl.int64) * D * N
            store_state(here, state, D, N, BD, BN, begins[0], begins[1])
        start = chunk * Q
        value = load_tokens(values, value_stride, start, tokens, D, Q, BD, begins[0])
        key = load_tokens(keys, key_stride, start, tokens, N, Q, BN, begins[1])
        total, end = tl.load(high + start + q), tl.load(high + start + Q - 1)
        if BACK:
            weight = tl.exp2(total)
        else:
            rest, end_rest = 0.0, 0.0
            if EXACT:
                rest, end_rest = tl.load(low + start + q), tl.load(low + start + Q - 1)
            weight = between(total, end, rest, end_rest, EXACT) * tl.load(dt + start + q)
        weighted = (value.to(tl.float32) * weight[:, None]).to(key.dtype)
        state *= tl.exp2(end)
        state = tl.dot(tl.trans(weighted), key, state, input_precision=PRECISION)
    if LAST:
        store_state(last, state, D, N, BD, BN, begins[0], begins[1])
