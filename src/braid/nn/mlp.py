"""Dense MLP, the layer `-`; also the shared expert of a MoE layer.

    y = (act(x · W_gate) ⊙ (x · W_up)) · W_down         gated (SwiGLU, GeGLU; Shazeer, arXiv 2002.05202)
    y = act(x · W_up) · W_down                          not gated

Gate and up are interleaved by ffn channel in one weight, as in the experts (`kernels.grouped_mlp`), so that a
tp shard of the ffn channels is one contiguous slice. tp ranks split the ffn channels: all-gather,
column-parallel up, row-parallel down with reduce-scatter.

Shapes: B rows, t tokens of this rank, C hidden channels, F ffn channels, G projections into the ffn.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_gather
from braid.kernels.activation import projections
from braid.kernels.activation_bytes import saved_ffn_tensors
from braid.kernels.glu import PLAIN, MlpActivation
from braid.nn.canonical import Canonical, RowSpan, under
from braid.nn.cost import Cost, Workload, all_gather_calls, reduce_scatter_calls
from braid.nn.linear import Linear, RowLinear
from braid.nn.precision_work import mlp_work
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, activation_work, gather_copies, scatter_copies


class Mlp(Recomputing):
    """A dense MLP, gated or not."""

    def __init__(
        self,
        shape: architecture.Mlp,
        hidden: int,
        activation: MlpActivation = PLAIN,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups, self.activation = shape, groups, activation
        self.projections = projections(shape.activation)
        self.ffn = shape.ffn // groups.tp.size
        """ffn channels of this rank."""
        assert self.ffn * groups.tp.size == shape.ffn
        outputs = (self.ffn, len(self.projections))
        self.into = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.down = RowLinear(self.ffn, hidden, groups.tp, bias=shape.bias, device=device, dtype=dtype)

    def forward(self, x_BtC: Tensor) -> Tensor:
        x_BTC = all_gather(x_BtC, self.groups.tp, dim=1)
        if self._quantises(x_BTC.shape):
            return self.down.reduced(self._quantised(x_BTC))
        projected = (self.into(x_BTC),) if self.activation.joined else self.into.split_forward(x_BTC)
        activation = partial(self.activation, self.shape.activation, glu=self.shape.glu)
        return self.down(self.recomputed("activation", activation, *projected))

    def _quantises(self, shape: tuple[int, ...]) -> bool:
        """Whether kernels take both layers and the activation between them, which quantises what it makes."""
        into, down = self.into.products, self.down.products
        if (
            into is None
            or down is None
            or into.kernels is None
            or self.shape.bias
            or not self.activation.joined
        ):
            return False
        first, second = ((each.channels_out, each.channels_in) for each in (self.into, self.down))
        taken = into.kernels.takes
        return taken(into, first, shape) and taken(down, second, (*shape[:-1], self.ffn))

    def _quantised(self, x_BTC: Tensor) -> Tensor:
        into, down = self.into.products, self.down.products
        assert into is not None
        assert into.kernels is not None
        assert down is not None
        weights = self.into.weight, self.down.weight
        activation = self.shape.activation, self.shape.glu
        y_NC = into.kernels.mlp(x_BTC.flatten(0, -2), *weights, *activation, into, down, self.into.wgrad_store)
        return y_NC.view(x_BTC.shape)

    def canonical(self) -> dict[str, Canonical]:
        span = RowSpan(self.groups.tp.rank * self.ffn, self.shape.ffn)
        tensors: dict[str, Canonical] = {}
        for place, name in enumerate(self.projections):
            tensors |= under(name, "into", self.into.canonical_part((slice(None), place), span))
        return tensors | under("down", "down", self.down.canonical())

    def cost(self, workload: Workload) -> Cost:
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.into.channels_in
        cp_tokens, sp_tokens = workload.local_tokens(cp), workload.local_tokens(tp, cp)
        ffn, joined = cp_tokens * self.ffn * workload.narrow, self.activation.joined
        tokens = cp_tokens * hidden * workload.narrow
        # With several rows the gathered tokens are not contiguous, and each projection saves a copy of its own.
        copies = len(self.projections) if tp.size > 1 and workload.rows > 1 and not joined else 1
        ffn_tensors = saved_ffn_tensors(self.shape.activation, self.shape.glu, joined=False)
        if joined:
            ffn_tensors = len(self.projections) + 1
        if self._quantises((workload.rows, cp_tokens // workload.rows, hidden)):
            ffn_tensors = len(self.projections)
        if workload.recomputes("activation"):
            ffn_tensors = len(self.projections)
        return Cost(
            kept=workload.norm_output(copies * tokens, tp.size > 1) + ffn_tensors * ffn,
            # The fused backward holds the gradients of the activation and of all projections at once.
            passing=(len(self.projections) + 1) * ffn if joined else ffn,
            calls=all_gather_calls(tp, sp_tokens * hidden * workload.narrow, "mlp tokens")
            + reduce_scatter_calls(tp, tokens, "mlp sums"),
        )

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row."""
        gathered = tokens // self.groups.cp.size
        return self.into.flops(gathered) + self.down.flops(gathered)

    def work(self, workload: Workload) -> Work:
        tp, cp, narrow = self.groups.tp, self.groups.cp, workload.narrow
        tokens, own = workload.local_tokens(cp), workload.local_tokens(tp, cp)
        copies = gather_copies(workload, tp, own * self.into.channels_in * narrow)
        if self._quantises((workload.rows, tokens // workload.rows, self.into.channels_in)):
            return copies + self._quantised_work(workload, tokens)
        activation = activation_work(workload, tokens * self.ffn, len(self.projections))
        return copies + self.into.work(workload, tokens) + activation + self.down.work(workload, tokens)

    def _quantised_work(self, workload: Workload, tokens: int) -> Work:
        into, down = self.into.products, self.down.products
        assert into is not None
        assert down is not None
        sizes = self.into.channels_in, self.ffn, len(self.projections)
        partial_sums = tokens // self.groups.tp.size * self.down.channels_out * workload.narrow
        return mlp_work(into, down, tokens, *sizes) + scatter_copies(workload, self.groups.tp, partial_sums)
