"""Causal convolution of each channel by itself, as one shifted product per tap. Any dtype, any sizes.

Shapes: B rows, T tokens, C channels, K taps, P = K - 1 tokens before the first, S = P + T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.documents import runs_of


def causal_conv(
    x_BTC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    documents_BT: Tensor | None = None,
    state_BCP: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Each token's weighted sum of itself (last tap) and the K - 1 tokens before it in its document.

    What lies before a document reads as zero. `documents_BT` is None where every row is a single document.
    Such a document may have begun earlier: `state_BCP` then holds its last K - 1 tokens so far, and the second
    result is that state moved on by T tokens; without a state it is None. Sums are float32 or better.
    """
    assert documents_BT is None or state_BCP is None, "a row that goes on from a state is one document"
    dtype = torch.promote_types(x_BTC.dtype, torch.float32)
    tokens, taps = x_BTC.shape[1], weight_CK.shape[1]
    x_BSC = _preceded(x_BTC, taps - 1, state_BCP)
    wide_BSC, weight_KC = x_BSC.to(dtype), weight_CK.to(dtype).t()
    runs_BT = None if documents_BT is None else runs_of(documents_BT)
    y_BTC = wide_BSC[:, taps - 1 :] * weight_KC[-1]
    for tap in reversed(range(taps - 1)):
        term_BTC = wide_BSC[:, tap : tap + tokens] * weight_KC[tap]
        if runs_BT is not None:
            term_BTC = term_BTC * _reaches(runs_BT, taps - 1 - tap).unsqueeze(-1)
        y_BTC = y_BTC + term_BTC
    if bias_C is not None:
        y_BTC = y_BTC + bias_C.to(dtype)
    new_state_BCP = None if state_BCP is None else x_BSC[:, tokens:].transpose(1, 2).to(state_BCP.dtype)
    return y_BTC.to(x_BTC.dtype), new_state_BCP


def _preceded(x_BTC: Tensor, places: int, state_BCP: Tensor | None) -> Tensor:
    """The tokens, with what was before them or zeros in front."""
    if state_BCP is None:
        return F.pad(x_BTC, (0, 0, places, 0))
    return torch.cat([state_BCP.transpose(1, 2).to(x_BTC.dtype), x_BTC], 1)


def _reaches(runs_BT: Tensor, back: int) -> Tensor:
    """Whether the token `back` places before each token belongs to its document."""
    return F.pad(runs_BT, (back, 0), value=-1)[:, : runs_BT.shape[1]] == runs_BT
