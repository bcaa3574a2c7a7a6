"""The state-space scan over whole rows, chunk by chunk: time and memory grow linearly. Any dtype, any sizes.

What a token reads comes from two places. From the tokens of its own chunk, by one product of C and B for every
pair, as attention has it. And from all chunks before, through the state that enters its chunk: each chunk adds
what its tokens leave behind, and the additions are passed on from chunk to chunk. Products run in the dtype of
the inputs; decays, states and sums of the two parts are float32 or better.

Shapes: B rows, T tokens, L chunks, Q tokens of a chunk (S as the earlier of a pair), V moments between chunks
(W as the earlier of a pair), G groups, R heads per group, H = G · R heads, D head channels, N state channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.documents import runs_of

CHUNK = 64
"""Tokens of a chunk. Pairs cost CHUNK for each token and head, states head_dim · state / CHUNK."""
TOGETHER = 16
"""Chunks whose states are passed on by one product, where a loop would launch a kernel for each."""


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
    """What each token reads from its document's state, and the state after the last token of each row.

    `dt_BTH` is not negative, `a_H` is not positive. `documents_BT` is None where every row is a single
    document; `initial_state_BHDN` is what the first document of each row begins with, zero if None. The outputs
    have the dtype of `x_BTHD`, the state is float32 or better.
    """
    narrow, wide = x_BTHD.dtype, torch.promote_types(x_BTHD.dtype, torch.float32)
    tokens, groups = b_BTGN.shape[1:3]
    chunk = min(CHUNK, tokens)
    x_BLQGRD = _chunks(x_BTHD, chunk).unflatten(3, (groups, -1))
    dt_BLQGR = _chunks(dt_BTH.to(wide), chunk).unflatten(3, (groups, -1))
    b_BLQGN, c_BLQGN = _chunks(b_BTGN, chunk), _chunks(c_BTGN, chunk)
    decay = _decays(dt_BLQGR * a_H.to(wide).view(groups, -1), _run_chunks(documents_BT, chunk))

    scores_BLGQS = torch.einsum("blqgn,blsgn->blgqs", c_BLQGN, b_BLQGN)
    weights_BLGRQS = (scores_BLGQS.unsqueeze(3) * decay.between_BLGRQS).to(narrow)
    written_BLQGRD = (x_BLQGRD * dt_BLQGR.unsqueeze(-1)).to(narrow)
    near_BLQGRD = torch.einsum("blgrqs,blsgrd->blqgrd", weights_BLGRQS, written_BLQGRD)

    left_BLQGRD = (x_BLQGRD * (dt_BLQGR * decay.to_end_BLQGR).unsqueeze(-1)).to(narrow)
    added_BLGRDN = torch.einsum("blsgrd,blsgn->blgrdn", left_BLQGRD, b_BLQGN).to(wide)
    states_BLGRDN, final_state_BHDN = _pass_on(added_BLGRDN, decay, initial_state_BHDN)
    far_BLQGRD = torch.einsum("blqgn,blgrdn->blqgrd", c_BLQGN, states_BLGRDN.to(narrow))

    skip_GR1 = skip_H.to(wide).view(groups, -1, 1)
    y_BLQGRD = near_BLQGRD + far_BLQGRD * decay.since_state_BLQGR.unsqueeze(-1) + x_BLQGRD * skip_GR1
    y_BTHD = y_BLQGRD.to(narrow).flatten(1, 2)[:, :tokens].flatten(2, 3)
    return y_BTHD, final_state_BHDN


class Decays(NamedTuple):
    """What is left of a state between two moments; zero where a document begins between them."""

    between_BLGRQS: Tensor
    """From the earlier token S to the token Q of the same chunk; zero for later ones."""
    since_state_BLQGR: Tensor
    """From the state that enters the chunk to the token."""
    to_end_BLQGR: Tensor
    """From the token to the end of the chunk."""
    log_chunk_BLGR: Tensor
    """The log of what a whole chunk leaves, as if no document began in it."""
    runs_BV: Tensor | None
    """The document at each moment between chunks; None where every row is a single document."""


def _decays(log_BLQGR: Tensor, runs_BLQ: Tensor | None) -> Decays:
    # Sums are float64: they grow over a chunk, and what matters is the small difference of two of them.
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
    """What is left at each moment Q of what was at each earlier moment S, from running sums of log decays:
    [..., G, R, Q, S]. Leading dims are kept."""
    total_GRQ = total_QGR.movedim(-3, -1)
    moments = total_GRQ.shape[-1]
    apart_QS = torch.ones(moments, moments, dtype=torch.bool, device=total_GRQ.device).triu(1)
    if runs_Q is not None:
        apart_QS = apart_QS | (runs_Q[..., None, None, :, None] != runs_Q[..., None, None, None, :])
    log_GRQS = (total_GRQ.unsqueeze(-1) - total_GRQ.unsqueeze(-2)).to(dtype)
    # masked before exp: later moments would overflow, and 0 · inf is nan in the gradient
    return log_GRQS.masked_fill_(apart_QS, -torch.inf).exp_()


def _pass_on(added_BLGRDN: Tensor, decay: Decays, initial_BHDN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the state after the last: state ← left of it + added."""
    rows, chunks, *dims = added_BLGRDN.shape
    state_BGRDN = added_BLGRDN.new_zeros(rows, *dims)
    if initial_BHDN is not None:
        state_BGRDN = initial_BHDN.to(state_BGRDN.dtype).reshape_as(state_BGRDN)
    entering = []
    for first in range(0, chunks, TOGETHER):
        these = slice(first, first + TOGETHER)
        # moment 0 is before these chunks, moment i after the i-th of them
        total_BVGR = F.pad(decay.log_chunk_BLGR[:, these], (0, 0, 0, 0, 1, 0)).cumsum(1)
        runs_BV = None if decay.runs_BV is None else decay.runs_BV[:, first : first + TOGETHER + 1]
        added_BVGRDN = torch.cat([state_BGRDN.unsqueeze(1), added_BLGRDN[:, these]], 1)
        states_BVGRDN = torch.einsum(
            "bgrvw,bwgrdn->bvgrdn", _between(total_BVGR, runs_BV, state_BGRDN.dtype), added_BVGRDN
        )
        entering.append(states_BVGRDN[:, :-1])
        state_BGRDN = states_BVGRDN[:, -1]
    return torch.cat(entering, 1), state_BGRDN.flatten(1, 2)


def _chunks(x_BT: Tensor, chunk: int) -> Tensor:
    """Cut into chunks, zeros behind the last token: no time passes there, and nothing is written."""
    missing = -x_BT.shape[1] % chunk
    padded = F.pad(x_BT, (0, 0) * (x_BT.dim() - 2) + (0, missing)) if missing else x_BT
    return padded.unflatten(1, (-1, chunk))


def _run_chunks(documents_BT: Tensor | None, chunk: int) -> Tensor | None:
    """Documents numbered within each row, cut into chunks; the last goes on behind the last token."""
    if documents_BT is None:
        return None
    missing = -documents_BT.shape[1] % chunk
    padded_BT = torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, missing)], 1)
    return runs_of(padded_BT).unflatten(1, (-1, chunk))
