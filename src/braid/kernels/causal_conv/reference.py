"""Depthwise causal convolution as one shifted product per tap. Any dtype, any sizes.

Shapes: B rows, T tokens, C channels, K taps, P = K - 1 tokens before the first, S = P + T, G groups, V channels
of a group, I those of a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.documents import runs_of


def conv_parts(
    x_BTGV: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    documents_BT: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    """SiLU of the convolution without a state, one tensor y_BTGI for each part of the channels of a group."""
    y_BTC, _ = causal_conv(x_BTGV.flatten(2), weight_CK, bias_C, documents_BT)
    return F.silu(y_BTC).view(x_BTGV.shape).split(list(sizes), -1)


def causal_conv(
    x_BTC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    documents_BT: Tensor | None = None,
    state_BCP: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolution output, and the new state.

    Tokens before the start of a document count as zero. `documents_BT` is None if every row is one document.
    For generation, `state_BCP` holds the previous K - 1 tokens of the row; the second result is the state after
    the T new tokens, or None without a state. Accumulates in float32 or wider.
    """
    assert documents_BT is None or state_BCP is None, "a row that continues from a state is one document"
    dtype = torch.promote_types(x_BTC.dtype, torch.float32)
    tokens, taps = x_BTC.shape[1], weight_CK.shape[1]
    if state_BCP is None:
        x_BSC = F.pad(x_BTC, (0, 0, taps - 1, 0))
    else:
        x_BSC = torch.cat([state_BCP.transpose(1, 2).to(x_BTC.dtype), x_BTC], 1)
    wide_BSC, weight_KC = x_BSC.to(dtype), weight_CK.to(dtype).t()
    runs_BT = None if documents_BT is None else runs_of(documents_BT)
    y_BTC = wide_BSC[:, taps - 1 :] * weight_KC[-1]
    for tap in reversed(range(taps - 1)):
        term_BTC = wide_BSC[:, tap : tap + tokens] * weight_KC[tap]
        if runs_BT is not None:
            term_BTC = term_BTC * _same_document(runs_BT, taps - 1 - tap).unsqueeze(-1)
        y_BTC = y_BTC + term_BTC
    if bias_C is not None:
        y_BTC = y_BTC + bias_C.to(dtype)
    new_state_BCP = None if state_BCP is None else x_BSC[:, tokens:].transpose(1, 2).to(state_BCP.dtype)
    return y_BTC.to(x_BTC.dtype), new_state_BCP


def _same_document(runs_BT: Tensor, shift: int) -> Tensor:
    """Whether the token `shift` positions before each token belongs to the same document."""
    return F.pad(runs_BT, (shift, 0), value=-1)[:, : runs_BT.shape[1]] == runs_BT
