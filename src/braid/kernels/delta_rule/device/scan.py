"""The sequential passes over chunks: states forwards, their gradients backwards.

    X = β · v - erase · (k S)        d = A X        y = read · (q S) + P d        S' = keep · S + kᵀ (write · d)

and in reverse, from the gradient dS' of the state after a chunk,

    dd = Pᵀ dy + write · (k dS')     dX = Aᵀ dd     dS = keep · dS' + qᵀ (read · dy) - kᵀ (erase · dX)

Solving with A after reading from the state saves the two products of A with keys and values of the WY form.
Everything is computed transposed, with tokens as columns: what one product gives is then the left operand of
the next, and tensor cores read left operands from registers. A program has the state of one head, or of some of
its value channels, which are independent.

Shapes: B rows, T tokens, N chunks of L tokens, G key heads, H value heads, K key channels, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.delta_rule.device.pairs import LENGTH, Pairs
from braid.kernels.delta_rule.device.tiles import load_matrix, load_square, load_tile, store_matrix, store_tile
from braid.kernels.launch import Launcher, parts_of, power_of_two


@dataclass(frozen=True, kw_only=True)
class ScanVariant:
    channels: int = 64
    """Value channels of a program: at least 64, the rows of a tensor core's product."""
    warps: int = 4
    stages: int = 2


class States(NamedTuple):
    """What the gradients need of all chunks."""

    states_BHNVK: Tensor
    """State at the start of each chunk."""
    deltas_BTHV: Tensor


def outputs(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    pairs: Pairs,
    initial_BHKV: Tensor | None,
    variant: ScanVariant,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the float32 state after the last token."""
    rows, _, heads, value_dim = v_BTHV.shape
    y_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    shape = (rows, heads, k_BTGK.shape[3], value_dim)
    final_BHKV = torch.empty(shape, dtype=torch.float32, device=v_BTHV.device)
    written = (y_BTHV, final_BHKV, None, None, None, None)
    _forward(launch, q_BTGK, k_BTGK, v_BTHV, pairs, initial_BHKV, written, variant)
    return y_BTHV, final_BHKV


def states(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    pairs: Pairs,
    initial_BHKV: Tensor | None,
    d_states_BHNVK: Tensor,
    variant: ScanVariant,
) -> tuple[States, Tensor]:
    """The states and deltas of the forward pass once more, and ⟨S, dS'⟩ · keep of each chunk, by value
    channels: the gradient of what a chunk keeps, computed where S is float32."""
    states_BHNVK = torch.empty_like(d_states_BHNVK)
    deltas_BTHV = v_BTHV.new_empty(v_BTHV.shape)
    kept_BHNV = torch.empty(states_BHNVK.shape[:4], dtype=torch.float32, device=v_BTHV.device)
    written = (None, None, states_BHNVK, deltas_BTHV, d_states_BHNVK, kept_BHNV)
    _forward(launch, q_BTGK, k_BTGK, v_BTHV, pairs, initial_BHKV, written, variant)
    return States(states_BHNVK, deltas_BTHV), kept_BHNV


def _forward(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    pairs: Pairs,
    initial_BHKV: Tensor | None,
    written: tuple[Tensor | None, ...],
    variant: ScanVariant,
) -> None:
    tensors = (q_BTGK, k_BTGK, v_BTHV, *pairs, initial_BHKV, *written)
    strides = (*q_BTGK.stride()[1:3], *k_BTGK.stride()[1:3], *v_BTHV.stride()[1:3])
    _launch(launch, _scan, tensors, strides, k_BTGK, v_BTHV, variant)


def state_gradients(
    launch: Launcher,
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    dy_BTHV: Tensor,
    pairs: Pairs,
    d_final_BHKV: Tensor | None,
    variant: ScanVariant,
    *,
    initial: bool,
) -> tuple[States, Tensor | None]:
    """Gradients of the state after each chunk and of X, and that of the initial state if there is one."""
    rows, tokens, heads, value_dim = dy_BTHV.shape
    key_dim = k_BTGK.shape[3]
    d_states_BHNVK = dy_BTHV.new_empty(rows, heads, parts_of(tokens, LENGTH), value_dim, key_dim)
    d_x_BTHV = torch.empty_like(dy_BTHV)
    shape = (rows, heads, key_dim, value_dim)
    d_initial_BHKV = torch.empty(shape, dtype=torch.float32, device=dy_BTHV.device) if initial else None
    tensors = (q_BTGK, k_BTGK, dy_BTHV, *pairs, d_final_BHKV, d_initial_BHKV, d_states_BHNVK, d_x_BTHV)
    strides = (*q_BTGK.stride()[1:3], *k_BTGK.stride()[1:3])
    _launch(launch, _scan_backward, tensors, strides, k_BTGK, dy_BTHV, variant)
    return States(d_states_BHNVK, d_x_BTHV), d_initial_BHKV


def _launch(
    launch: Launcher,
    kernel: object,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    variant: ScanVariant,
) -> None:
    rows, tokens, heads, value_dim = v_BTHV.shape
    key_heads, key_dim = k_BTGK.shape[2:]
    chunks, channels = parts_of(tokens, LENGTH), min(variant.channels, max(power_of_two(value_dim), 16))
    launch(
        kernel,
        (rows * heads * parts_of(value_dim, channels), 1),
        tensors,
        (tokens, chunks, rows * heads * chunks * LENGTH, *strides),
        {
            "H": heads, "R": heads // key_heads, "K": key_dim, "V": value_dim,
            "KP": max(power_of_two(key_dim), 16), "BV": channels, "LENGTH": LENGTH,
        },
        warps=variant.warps,
        stages=variant.stages,
    )  # fmt: skip


@triton.jit
def _place(V: tl.constexpr, BV: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """Row, head, key head and first value channel of a program; neighbours share keys."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    head = program // PARTS % H
    return program // PARTS // H, head, head // R, program % PARTS * BV


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _scan(
    q, k, v, inverse, scores, factors, keep, initial, y, final, states, deltas, d_states, kept,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Writes outputs and the final state, or states and deltas."""
    row, head, key_head, first = _place(V, BV, H, R)
    i, n, c = tl.arange(0, LENGTH), tl.arange(0, KP), first + tl.arange(0, BV)
    state = (row * H + head).to(tl.int64)
    if initial is not None:
        state_VK = tl.trans(load_matrix(initial + state * K * V, n, c, K, V)).to(tl.float32)
    else:
        state_VK = tl.zeros((BV, KP), dtype=tl.float32)
    for chunk in range(0, chunks):
        which, here = state * chunks + chunk, tokens - chunk * LENGTH
        token = row.to(tl.int64) * tokens + chunk * LENGTH
        k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
        v_LV = load_tile(v + token * v_stride + head * v_head, v_stride, here, c, V, LENGTH)
        inverse_LS = load_square(inverse + which * LENGTH * LENGTH, LENGTH)
        factor = factors + which * LENGTH + i
        beta_L, read_L = tl.load(factor + plane), tl.load(factor + 2 * plane)
        erase_L, write_L = tl.load(factor + 3 * plane), tl.load(factor + 4 * plane)
        keeps = tl.load(keep + which)
        narrow_VK = state_VK.to(k_LK.dtype)
        if states is not None:
            store_matrix(states + which * V * K, c, n, V, K, narrow_VK)
            d_state_VK = load_matrix(d_states + which * V * K, c, n, V, K).to(tl.float32)
            tl.store(kept + which * V + c, tl.sum(state_VK * d_state_VK, 1) * keeps, mask=c < V)
        stored_VL = tl.dot(narrow_VK, tl.trans(k_LK))
        x_VL = tl.trans(v_LV).to(tl.float32) * beta_L[None, :] - stored_VL * erase_L[None, :]
        delta_VL = tl.dot(x_VL.to(k_LK.dtype), tl.trans(inverse_LS))
        if deltas is not None:
            store_tile(deltas + (token * H + head) * V, H * V, here, c, V, tl.trans(delta_VL), LENGTH)
        if y is not None:
            q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
            y_VL = tl.dot(narrow_VK, tl.trans(q_LK)) * read_L[None, :]
            scores_LS = load_square(scores + which * LENGTH * LENGTH, LENGTH)
            y_VL = tl.dot(delta_VL.to(k_LK.dtype), tl.trans(scores_LS), acc=y_VL)
            store_tile(y + (token * H + head) * V, H * V, here, c, V, tl.trans(y_VL), LENGTH)
        state_VK *= keeps
        state_VK = tl.dot((delta_VL * write_L[None, :]).to(k_LK.dtype), k_LK, acc=state_VK)
    if final is not None:
        store_matrix(final + state * K * V, n, c, K, V, tl.trans(state_VK))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _scan_backward(
    q, k, dy, inverse, scores, factors, keep, d_final, d_initial, d_states, d_x,
    tokens, chunks, plane, q_stride, q_head, k_stride, k_head,
    H: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row, head, key_head, first = _place(V, BV, H, R)
    i, n, c = tl.arange(0, LENGTH), tl.arange(0, KP), first + tl.arange(0, BV)
    state = (row * H + head).to(tl.int64)
    if d_final is not None:
        d_state_VK = tl.trans(load_matrix(d_final + state * K * V, n, c, K, V)).to(tl.float32)
    else:
        d_state_VK = tl.zeros((BV, KP), dtype=tl.float32)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        which, here = state * chunks + chunk, tokens - chunk * LENGTH
        token = row.to(tl.int64) * tokens + chunk * LENGTH
        k_LK = load_tile(k + token * k_stride + key_head * k_head, k_stride, here, n, K, LENGTH)
        q_LK = load_tile(q + token * q_stride + key_head * q_head, q_stride, here, n, K, LENGTH)
        dy_LV = load_tile(dy + (token * H + head) * V, H * V, here, c, V, LENGTH)
        inverse_LS, scores_LS = (
            load_square(inverse + which * LENGTH * LENGTH, LENGTH),
            load_square(scores + which * LENGTH * LENGTH, LENGTH),
        )
        factor = factors + which * LENGTH + i
        read_L, erase_L, write_L = (
            tl.load(factor + 2 * plane), tl.load(factor + 3 * plane), tl.load(factor + 4 * plane)
        )  # fmt: skip
        narrow_VK = d_state_VK.to(k_LK.dtype)
        store_matrix(d_states + which * V * K, c, n, V, K, narrow_VK)
        dy_VL = tl.trans(dy_LV)
        d_delta_VL = tl.dot(narrow_VK, tl.trans(k_LK)) * write_L[None, :]
        d_delta_VL = tl.dot(dy_VL, scores_LS, acc=d_delta_VL)
        d_x_VL = tl.dot(d_delta_VL.to(k_LK.dtype), inverse_LS)
        store_tile(d_x + (token * H + head) * V, H * V, here, c, V, tl.trans(d_x_VL), LENGTH)
        d_state_VK *= tl.load(keep + which)
        d_state_VK = tl.dot((dy_VL.to(tl.float32) * read_L[None, :]).to(k_LK.dtype), q_LK, acc=d_state_VK)
        d_state_VK = tl.dot((d_x_VL * -erase_L[None, :]).to(k_LK.dtype), k_LK, acc=d_state_VK)
    if d_initial is not None:
        store_matrix(d_initial + state * K * V, n, c, K, V, tl.trans(d_state_VK))
