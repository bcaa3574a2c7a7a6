"""The short convolution of recurrent mixers: each channel by itself, along the tokens of its document.

Shapes: B rows, T tokens, G groups of this tp rank and g that it convolves (after the cut, see
`head_partition`), V channels of a group, E = g · V, K taps, P = K - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.causal_conv import causal_conv
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Portion
from braid.nn.head_partition import HeadPartition, Part


class GroupedConv(nn.Module):
    """Causal convolution of some parts of every group, then SiLU."""

    def __init__(
        self,
        share: HeadPartition,
        parts: Sequence[Part],
        taps: int,
        *,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.share, self.parts, self.taps = share, tuple(parts), taps
        self.dims = (share.groups, sum(share.sizes(parts)))
        channels = self.dims[0] * self.dims[1]
        self.weight = nn.Parameter(torch.empty(channels, taps, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None

    def forward(
        self, x_BTgV: Tensor, documents_BT: Tensor | None = None, state_BEP: Tensor | None = None
    ) -> Tensor:
        """`state_BEP` holds the last tokens before the first, where a row goes on; it is moved on in place."""
        y_BTE, after_BEP = causal_conv(
            x_BTgV.flatten(2),
            self._own(self.weight),
            None if self.bias is None else self._own(self.bias),
            documents_BT,
            state_BEP,
        )
        if state_BEP is not None and after_BEP is not None:
            state_BEP.copy_(after_BEP.detach())
        return F.silu(y_BTE).view_as(x_BTgV)

    def _own(self, parameter: Tensor) -> Tensor:
        """The weights of the channels that this rank convolves."""
        return self.share.weights(parameter.unflatten(0, self.dims), self.parts).flatten(0, 1)

    def new_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What there is before the first token."""
        return torch.zeros(rows, self.channels, self.taps - 1, device=device, dtype=dtype)

    @property
    def channels(self) -> int:
        """Channels that this rank convolves."""
        return self.share.core_groups * sum(self.share.core_sizes(self.parts))

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, self.share.places(self.parts), strict=True):
            start, whole = self.share.span(part)
            held, index = self.share.groups * (place.stop - place.start), (slice(None), place)
            tensors[f"{part.name}.weight"] = Canonical(
                parameter="weight",
                shape=(whole, self.taps),
                fill="taps",
                view=self.dims,
                index=index,
                part=(held, self.taps),
                offset=(start, 0),
                copies=self.share.copies(part),
            )
            if self.bias is not None:
                tensors[f"{part.name}.bias"] = Canonical(
                    parameter="bias",
                    shape=(whole,),
                    fill="zeros",
                    view=self.dims,
                    index=index,
                    part=(held,),
                    offset=(start,),
                    copies=self.share.copies(part),
                )
        return tensors

    def cost(self, portion: Portion) -> Cost:
        """Its input is widened, and preceded by zeros; what SiLU is given is kept. Weights of groups that are
        cut are kept for all cp ranks."""
        cut = self.share.ranks.cp.size if self.share.cuts > 1 else 0
        weights = self.taps * (1 if portion.mixed else cut)
        wide = portion.rows * (portion.tokens + self.taps - 1) + weights
        every = self.channels * portion.places()
        kept = self.channels * wide * portion.wide + every * portion.narrow
        return Cost(kept=kept, passing=every * portion.wide)

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels * self.taps
