"""Chunked SSD scan: linear in tokens. Any dtype, any sizes.

The output of a token has two parts: from the tokens of its own chunk, computed like attention with one product
of C and B per pair; and from all chunks before, through the state at the start of its chunk. Every chunk adds
the contribution of its tokens to the state, which is scanned over chunks. Products run in the dtype of the
inputs; decays, states and the sum of the two parts are float32 or wider.

Shapes: B rows, T tokens, L chunks, Q tokens of a chunk (S as the earlier of a pair), V chunk boundaries (W as
the earlier of a pair), G groups, R heads per group, H = G · R heads, D head channels, N state channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.documents import runs_of

CHUNK = 64
"""Chunk length. Per token and head, pairs cost CHUNK, and states head_dim · state / CHUNK."""
SCAN_CHUNKS = 16
"""Chunks per product of the state scan; one chunk at a time would launch a kernel for each."""


def ssd(
    x_BTHD: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    skip_H: Tensor,
    documents_BT: Tensor | None = None,
    initial_state_BHDN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the state after the last token of each row.

    `dt_BTH` is at least 0, `a_H` at most 0. `documents_BT` is None if every row is one document.
    `initial_state_BHDN` is the state of the first document of each row, zero by default. Outputs have the dtype
    of `x_BTHD`, the state is float32 or wider.
    """
    narrow, wide = x_BTHD.dtype, torch.promote_types(x_BTHD.dtype, torch.float32)
    tokens, groups = b_BTGN.shape[1:3]
    chunk = min(CHUNK, max(tokens, 1))
    by_group = (groups, x_BTHD.shape[2] // groups)
    x_BLQGRD = _chunks(x_BTHD, chunk).unflatten(3, by_group)
    dt_BLQGR = _chunks(dt_BTH.to(wide), chunk).unflatten(3, by_group)
    b_BLQGN, c_BLQGN = _chunks(b_BTGN, chunk), _chunks(c_BTGN, chunk)
    decay = _decays(dt_BLQGR * a_H.to(wide).view(groups, -1), _run_chunks(documents_BT, chunk))

    scores_BLGQS = torch.einsum("blqgn,blsgn->blgqs", c_BLQGN, b_BLQGN)
    weights_BLGRQS = (scores_BLGQS.unsqueeze(3) * decay.between_BLGRQS).to(narrow)
    written_BLQGRD = (x_BLQGRD * dt_BLQGR.unsqueeze(-1)).to(narrow)
    near_BLQGRD = torch.einsum("blgrqs,blsgrd->blqgrd", weights_BLGRQS, written_BLQGRD)

    decayed_BLQGRD = (x_BLQGRD * (dt_BLQGR * decay.to_end_BLQGR).unsqueeze(-1)).to(narrow)
    added_BLGRDN = torch.einsum("blsgrd,blsgn->blgrdn", decayed_BLQGRD, b_BLQGN).to(wide)
    states_BLGRDN, final_state_BHDN = _scan_states(added_BLGRDN, decay, initial_state_BHDN)
    far_BLQGRD = torch.einsum("blqgn,blgrdn->blqgrd", c_BLQGN, states_BLGRDN.to(narrow))

    skip_GR1 = skip_H.to(wide).view(groups, -1, 1)
    y_BLQGRD = near_BLQGRD + far_BLQGRD * decay.since_state_BLQGR.unsqueeze(-1) + x_BLQGRD * skip_GR1
    y_BTHD = y_BLQGRD.to(narrow).flatten(1, 2)[:, :tokens].flatten(2, 3)
    return y_BTHD, final_state_BHDN


class Decays(NamedTuple):
    """Decay factors of the state between two points; zero across document boundaries."""

    between_BLGRQS: Tensor
    """From token S to token Q of the same chunk; zero for S after Q."""
    since_state_BLQGR: Tensor
    """From the start of the chunk to the token."""
    to_end_BLQGR: Tensor
    """From the token to the end of the chunk."""
    log_chunk_BLGR: Tensor
    """Log decay over the whole chunk, ignoring document boundaries."""
    runs_BV: Tensor | None
    """Document index at each chunk boundary; None if every row is one document."""


def _decays(log_BLQGR: Tensor, runs_BLQ: Tensor | None) -> Decays:
    # float64: differences of neighbouring cumulative sums must stay accurate when the sums are large.
    wide, total_BLQGR = log_BLQGR.dtype, log_BLQGR.double().cumsum(2)
    end_BL1GR = total_BLQGR[:, :, -1:]
    since_BLQGR, to_end_BLQGR = total_BLQGR, end_BL1GR - total_BLQGR
    if runs_BLQ is not None:
        last_BL1 = runs_BLQ[:, :, -1:]
        entered_BL1 = F.pad(last_BL1[:, :-1], (0, 0, 1, 0))
        since_BLQGR = since_BLQGR.masked_fill((runs_BLQ != entered_BL1)[..., None, None], -torch.inf)
        to_end_BLQGR = to_end_BLQGR.masked_fill((runs_BLQ != last_BL1)[..., None, None], -torch.inf)
    return Decays(
        between_BLGRQS=_between(total_BLQGR, runs_BLQ, wide),
        since_state_BLQGR=since_BLQGR.to(wide).exp(),
        to_end_BLQGR=to_end_BLQGR.to(wide).exp(),
        log_chunk_BLGR=end_BL1GR.squeeze(2),
        runs_BV=None if runs_BLQ is None else F.pad(runs_BLQ[:, :, -1], (1, 0)),
    )


def _between(total_QGR: Tensor, runs_Q: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Decay from each earlier point S to each point Q, [..., G, R, Q, S], from cumulative log decays. Leading
    dims are kept."""
    total_GRQ = total_QGR.movedim(-3, -1)
    points = total_GRQ.shape[-1]
    masked_QS = torch.ones(points, points, dtype=torch.bool, device=total_GRQ.device).triu(1)
    if runs_Q is not None:
        masked_QS = masked_QS | (runs_Q[..., None, None, :, None] != runs_Q[..., None, None, None, :])
    log_GRQS = (total_GRQ.unsqueeze(-1) - total_GRQ.unsqueeze(-2)).to(dtype)
    # Mask before exp: entries above the diagonal would overflow, and 0 · inf is nan in the gradient.
    return log_GRQS.masked_fill_(masked_QS, -torch.inf).exp_()


def _scan_states(added_BLGRDN: Tensor, decay: Decays, initial_BHDN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state at the start of each chunk, and after the last: state ← decay · state + added."""
    rows, chunks, *dims = added_BLGRDN.shape
    state_BGRDN = added_BLGRDN.new_zeros(rows, *dims)
    if initial_BHDN is not None:
        state_BGRDN = initial_BHDN.to(state_BGRDN.dtype).reshape_as(state_BGRDN)
    entering = []
    for first in range(0, chunks, SCAN_CHUNKS):
        these = slice(first, first + SCAN_CHUNKS)
        # Boundary 0 is before these chunks, boundary i after the i-th of them.
        total_BVGR = F.pad(decay.log_chunk_BLGR[:, these], (0, 0, 0, 0, 1, 0)).cumsum(1)
        runs_BV = None if decay.runs_BV is None else decay.runs_BV[:, first : first + SCAN_CHUNKS + 1]
        added_BVGRDN = torch.cat([state_BGRDN.unsqueeze(1), added_BLGRDN[:, these]], 1)
        states_BVGRDN = torch.einsum(
            "bgrvw,bwgrdn->bvgrdn", _between(total_BVGR, runs_BV, state_BGRDN.dtype), added_BVGRDN
        )
        entering.append(states_BVGRDN[:, :-1])
        state_BGRDN = states_BVGRDN[:, -1]
    # Without tokens there is no chunk, and the state stays what it was.
    entering_BLGRDN = torch.cat(entering, 1) if entering else added_BLGRDN
    return entering_BLGRDN, state_BGRDN.flatten(1, 2)


def _chunks(x_BT: Tensor, chunk: int) -> Tensor:
    """Split into chunks, padded with zeros: with dt = 0 the state neither decays nor changes."""
    padding = -x_BT.shape[1] % chunk
    padded = F.pad(x_BT, (0, 0) * (x_BT.dim() - 2) + (0, padding)) if padding else x_BT
    return padded.unflatten(1, (padded.shape[1] // chunk, chunk))


def _run_chunks(documents_BT: Tensor | None, chunk: int) -> Tensor | None:
    """Document indices in chunks; padding continues the last document."""
    if documents_BT is None:
        return None
    padding = -documents_BT.shape[1] % chunk
    padded_BT = torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, padding)], 1)
    return runs_of(padded_BT).unflatten(1, (padded_BT.shape[1] // chunk, chunk))
