"""Chunkwise gated delta rule (Yang et al., 2024, WY representation): linear in tokens. Any dtype, any sizes.

Within a chunk, the delta of every token depends on those of the tokens before it. The L deltas d solve a unit
lower triangular system, and they are linear in the state S at the start of the chunk:

    d = written - erased · S        S' = keep · S + kᵀ d        y = q · S + (q kᵀ) d

The systems of all chunks are solved in parallel. Only the state recurrence is sequential, with one product per
chunk: S' = (keep - kᵀ erased) · S + kᵀ written. All outputs then follow from the states in parallel. Decays are
omitted above: every product between two tokens includes the decay between them, which is zero across documents.

Shapes: B rows, T tokens, N chunks, L tokens of a chunk (S as the earlier of a pair), G key heads, R value heads
per key head, H = G · R value heads, K key channels, V value channels. X stands for the dims N, B, G, R, where
R is 1 for queries and keys; M = B · G · R states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.delta_rule.recurrent import query, unit
from braid.kernels.documents import runs_of

CHUNK = 64
"""Chunk length: the fastest of 32, 64 and 128 on a CPU with heads of 64 and 128 channels."""


def delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    documents_BT: Tensor | None = None,
    initial_state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the state after the last token of each row.

    `log_decay_BTH` is at most 0. `documents_BT` is None if every row is one document. `initial_state_BHKV` is
    the state of the first document of each row, zero by default. Computes in float32 or wider; outputs have the
    dtype of `v_BTHV`, the state stays wide.
    """
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    tokens, key_heads = q_BTGK.shape[1:3]
    chunk = min(CHUNK, max(tokens, 1))
    by_key_head = (key_heads, v_BTHV.shape[2] // key_heads)
    q_XLK = _chunks(query(q_BTGK.to(wide)).unsqueeze(3), chunk)
    k_XLK = _chunks(unit(k_BTGK.to(wide)).unsqueeze(3), chunk)
    v_XLV = _chunks(v_BTHV.to(wide).unflatten(2, by_key_head), chunk)
    beta_XL1 = _chunks(beta_BTH.to(wide).unflatten(2, by_key_head).unsqueeze(-1), chunk)
    log_decay_XL1 = _chunks(log_decay_BTH.to(wide).unflatten(2, by_key_head).unsqueeze(-1), chunk)
    decay = _decays(log_decay_XL1.squeeze(-1), _run_chunks(documents_BT, chunk))

    inverse_XLS = _inverse(beta_XL1 * (k_XLK @ k_XLK.mT) * decay.between_XLS)
    written_XLV = inverse_XLS @ (beta_XL1 * v_XLV)
    erased_XLK = inverse_XLS @ (beta_XL1 * decay.since_state_XL1 * k_XLK)
    decayed_XKL = (decay.to_end_XL1 * k_XLK).mT
    keep_X11 = decay.since_state_XL1[..., -1:, :]
    eye_KK = torch.eye(k_XLK.shape[-1], dtype=wide, device=k_XLK.device)
    states_XKV, final_state_BHKV = _states(
        keep_X11 * eye_KK - decayed_XKL @ erased_XLK, decayed_XKL @ written_XLV, initial_state_BHKV
    )
    delta_XLV = written_XLV - erased_XLK @ states_XKV
    scores_XLS = (q_XLK @ k_XLK.mT) * decay.between_XLS
    y_XLV = (decay.since_state_XL1 * q_XLK) @ states_XKV + scores_XLS @ delta_XLV
    y_BTHV = y_XLV.permute(1, 0, 4, 2, 3, 5).flatten(1, 2)[:, :tokens].flatten(2, 3)
    return y_BTHV.to(v_BTHV.dtype), final_state_BHKV


class DeltaDecays(NamedTuple):
    """Decay factors of the state between two points of a chunk; zero across document boundaries."""

    between_XLS: Tensor
    """From token S to token L; zero for S after L."""
    since_state_XL1: Tensor
    """From the start of the chunk to the token."""
    to_end_XL1: Tensor
    """From the token to the end of the chunk."""


def _decays(log_decay_XL: Tensor, runs_NBL: Tensor | None) -> DeltaDecays:
    # float64: differences of neighbouring cumulative sums must stay accurate when the sums are large.
    total_XL = log_decay_XL.double().cumsum(-1)
    between_XLS = total_XL.unsqueeze(-1) - total_XL.unsqueeze(-2)
    to_end_XL = total_XL[..., -1:] - total_XL
    length = total_XL.shape[-1]
    hidden_XLS = torch.ones(length, length, dtype=torch.bool, device=total_XL.device).triu(1)
    if runs_NBL is not None:
        runs_NB11L = runs_NBL[:, :, None, None]
        last_NB111 = runs_NB11L[..., -1:]
        entering_NB111 = F.pad(last_NB111[:-1], (0, 0) * 4 + (1, 0))
        hidden_XLS = hidden_XLS | (runs_NB11L.unsqueeze(-1) != runs_NB11L.unsqueeze(-2))
        total_XL = total_XL.masked_fill(runs_NB11L != entering_NB111, -torch.inf)
        to_end_XL = to_end_XL.masked_fill(runs_NB11L != last_NB111, -torch.inf)
    wide = log_decay_XL.dtype
    return DeltaDecays(
        # Mask before exp: entries above the diagonal would overflow, and 0 · inf is nan in the gradient.
        between_XLS=between_XLS.masked_fill_(hidden_XLS, -torch.inf).to(wide).exp(),
        since_state_XL1=total_XL.to(wide).exp().unsqueeze(-1),
        to_end_XL1=to_end_XL.to(wide).exp().unsqueeze(-1),
    )


def _inverse(lower_XLS: Tensor) -> Tensor:
    """(I + strictly lower part of `lower_XLS`)⁻¹, by forward substitution."""
    eye_LS = torch.eye(lower_XLS.shape[-1], dtype=lower_XLS.dtype, device=lower_XLS.device)
    return torch.linalg.solve_triangular(
        lower_XLS, eye_LS.expand_as(lower_XLS), upper=False, unitriangular=True
    )


def _states(step_XKK: Tensor, write_XKV: Tensor, initial_BHKV: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state at the start of each chunk, and after the last: S' = step · S + write."""
    _, rows, key_heads, repeats, _, _ = write_XKV.shape
    write_NMKV = write_XKV.flatten(1, 3)
    state_MKV = write_NMKV.new_zeros(write_NMKV.shape[1:])
    if initial_BHKV is not None:
        state_MKV = initial_BHKV.flatten(0, 1)
    states = [state_MKV.to(write_XKV.dtype)]
    for step_MKK, write_MKV in zip(step_XKK.flatten(1, 3).unbind(0), write_NMKV.unbind(0), strict=True):
        states.append(torch.baddbmm(write_MKV, step_MKK, states[-1]))
    final_BHKV = states.pop().unflatten(0, (rows, key_heads * repeats))
    # Without tokens there is no chunk, and the state stays what it was.
    return torch.stack(states).view_as(write_XKV) if states else write_XKV, final_BHKV


def _chunks(x_BTGRD: Tensor, chunk: int) -> Tensor:
    """Split into chunks, padded with zeros: a zero key, β and log decay do not change the state."""
    padded = F.pad(x_BTGRD, (0, 0, 0, 0, 0, 0, 0, -x_BTGRD.shape[1] % chunk))
    return padded.unflatten(1, (padded.shape[1] // chunk, chunk)).permute(1, 0, 3, 4, 2, 5).contiguous()


def _run_chunks(documents_BT: Tensor | None, chunk: int) -> Tensor | None:
    """Document indices in chunks; padding continues the last document."""
    if documents_BT is None:
        return None
    padding = documents_BT[:, -1:].expand(-1, -documents_BT.shape[1] % chunk)
    runs_BT = runs_of(torch.cat([documents_BT, padding], 1))
    return runs_BT.unflatten(1, (runs_BT.shape[1] // chunk, chunk)).transpose(0, 1)
