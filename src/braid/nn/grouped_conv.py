"""The short depthwise causal convolution of Mamba-2 and gated delta nets, followed by SiLU.

    y_t = SiLU(bias + Σ_j w_j · x_{t-K+1+j})          per channel, within a document

Shapes: B rows, T tokens, G groups of this tp rank and g that it convolves (after the split of
`head_partition`), V channels of a group, E = g · V, K taps, P = K - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels import causal_conv as op
from braid.kernels.causal_conv import CausalConv, causal_conv
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.work import Work, kernel_work


class GroupedConv(nn.Module):
    """Depthwise causal convolution of some parts of every group, then SiLU."""

    def __init__(
        self,
        partition: HeadPartition,
        parts: Sequence[Part],
        taps: int,
        *,
        bias: bool = False,
        conv: CausalConv = op.PLAIN,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.partition, self.parts, self.taps = partition, tuple(parts), taps
        self.conv = conv
        self.dims = (partition.groups, sum(partition.sizes(parts)))
        channels = self.dims[0] * self.dims[1]
        self.weight = nn.Parameter(torch.empty(channels, taps, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None

    def forward(
        self, x_BTgV: Tensor, documents_BT: Tensor | None = None, state_BEP: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """One tensor y_BTgI for each part. `state_BEP` holds the last inputs of the rows so far, for
        generation; updated in place."""
        weight, bias = self._own(self.weight), None if self.bias is None else self._own(self.bias)
        sizes = self.partition.core_sizes(self.parts)
        if state_BEP is None:
            return self.conv(x_BTgV, weight, bias, documents_BT, sizes)
        y_BTE, after_BEP = causal_conv(x_BTgV.flatten(2), weight, bias, documents_BT, state_BEP)
        assert after_BEP is not None
        state_BEP.copy_(after_BEP.detach())
        return F.silu(y_BTE).view_as(x_BTgV).split(sizes, -1)

    def _own(self, parameter: Tensor) -> Tensor:
        """The part of a parameter for the channels that this rank convolves."""
        return self.partition.weights(parameter.unflatten(0, self.dims), self.parts).flatten(0, 1)

    def new_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The state before the first token."""
        return torch.zeros(rows, self.channels, self.taps - 1, device=device, dtype=dtype)

    @property
    def channels(self) -> int:
        """Channels that this rank convolves."""
        return self.partition.core_groups * sum(self.partition.core_sizes(self.parts))

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, self.partition.slices(self.parts), strict=True):
            start, whole = self.partition.span(part)
            held, index = self.partition.groups * (place.stop - place.start), (slice(None), place)
            tensors[f"{part.name}.weight"] = Canonical(
                parameter="weight",
                shape=(whole, self.taps),
                fill="taps",
                view=self.dims,
                index=index,
                part=(held, self.taps),
                offset=(start, 0),
                copies=self.partition.copies(part),
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
                    copies=self.partition.copies(part),
                )
        return tensors

    def fuses(self, workload: Workload) -> bool:
        """Whether it saves its input as it is, and returns contiguous parts."""
        return workload.may_fuse("causal_conv") and op.fuses(workload.device, workload.dtype, self.taps)

    def cost(self, workload: Workload) -> Cost:
        """Saves the upcast and zero-padded input and the input of SiLU. Split groups save the weights of all cp
        ranks, of which each takes a slice. The fused kernel saves its input, which the mixer counts."""
        weight_copies = self.partition.ranks.cp.size if self.partition.group_splits > 1 else 0
        every = self.channels * workload.local_tokens()
        if self.fuses(workload):
            weights = self.channels * (self.taps + (self.bias is not None)) * weight_copies
            return Cost(kept=weights * workload.narrow, passing=every * workload.narrow)
        weights = self.taps * (1 if workload.mixed else weight_copies)
        wide = workload.rows * (workload.tokens + self.taps - 1) + weights
        kept = self.channels * wide * workload.wide + every * workload.narrow
        return Cost(kept=kept, passing=every * workload.wide)

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.channels * self.taps

    def work(self, workload: Workload) -> Work:
        """One kernel for each part, after the taps are transposed; others sum the gradients of the taps."""
        flops, size = (
            self.flops(workload.local_tokens()),
            self.channels * workload.local_tokens() * workload.narrow,
        )
        return kernel_work(
            "causal_conv",
            {"taps": self.taps},
            flops=(flops, 2 * flops),
            moves=(2 * size, 3 * size),
            launches=(len(self.parts) + 1, len(self.parts) + 4),
            region="core",
        )
