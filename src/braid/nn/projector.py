"""The projector of an encoder: from joined rows to the hidden channels of a language model.

    y = x · W + b                            affine
    y = act(x · W_up + b) · W_down + b       MLP, gated if its activation is; x may be normed first

Rows are split over tp · cp ranks, and each tp rank has copies of all weights: no collective is needed.

Shapes: R rows, J joined channels, F ffn channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from braid.distributed.collectives import Groups
from braid.encoders import Encoder
from braid.kernels import Kernels
from braid.kernels.activation import SWIGLU, projections
from braid.kernels.activation_bytes import saved_ffn_tensors
from braid.kernels.glu import PLAIN
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload
from braid.nn.linear import Linear
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, activation_work


class Projector(Recomputing):
    """An affine map or an MLP, with an optional norm before it."""

    def __init__(
        self,
        encoder: Encoder,
        kernels: Kernels,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, joined = encoder.projector, encoder.group * encoder.hidden
        shape = self.shape
        on: dict[str, Any] = {"copies": groups.tp, "device": device, "dtype": dtype}
        self.norm: RmsNorm | LayerNorm | None = None
        if shape.norm != "none":
            self.norm = norm(shape.norm, joined, shape.norm_eps, kernels.rms_norm.function, **on)
        linear: Any = partial(Linear, bias=shape.bias, **on)
        self.activation = PLAIN if kernels.glu is None else kernels.glu.function
        self.projections = projections(shape.activation)
        self.into: Linear | None = linear(joined, (shape.ffn, len(self.projections))) if shape.ffn else None
        self.out: Linear = linear(shape.ffn or joined, shape.width)

    def forward(self, x_RJ: Tensor) -> Tensor:
        if self.norm is not None:
            x_RJ = self.norm(x_RJ)
        if self.into is None:
            y_RW: Tensor = self.out(x_RJ)
            return y_RW
        projected = (self.into(x_RJ),) if self.activation.joined else self.into.split_forward(x_RJ)
        activation = partial(self.activation, self.shape.activation, glu=SWIGLU)
        y_RW = self.out(self.recomputed("activation", activation, *projected))
        return y_RW

    def canonical(self) -> dict[str, Canonical]:
        tensors = {} if self.norm is None else under("norm", "norm", self.norm.canonical())
        if self.into is not None:
            for place, name in enumerate(self.projections):
                tensors |= under(name, "into", self.into.canonical_part((slice(None), place)))
        return tensors | under("out", "out", self.out.canonical())

    def cost(self, workload: Workload, rows: int, joined: int) -> Cost:
        """The cost for `rows`, of which `joined` bytes are saved as the input: none if it is recomputed."""
        ffn, normed = rows * self.shape.ffn * workload.narrow, Cost(kept=joined)
        if self.norm is not None:
            # A product saves the norm's output. The norm saves its input, unless it saves an upcast copy.
            output = rows * self.norm.channels * workload.narrow
            dropped = 0 if self.norm.upcasts(workload) else output - joined
            normed = self.norm.cost(workload, rows) + Cost(kept=output - dropped)
        if self.into is None:
            return normed
        tensors = saved_ffn_tensors(self.shape.activation, SWIGLU, joined=False)
        if self.activation.joined:
            tensors = len(self.projections) + 1
        if workload.recomputes("activation"):
            tensors = len(self.projections)
        return normed + Cost(kept=tensors * ffn, passing=(len(self.projections) + 1) * ffn)

    def flops(self, rows: int) -> int:
        return self.out.flops(rows) + (0 if self.into is None else self.into.flops(rows))

    def work(self, workload: Workload, rows: int) -> Work:
        work = Work() if self.norm is None else self.norm.work(workload, rows)
        if self.into is not None:
            work += self.into.work(workload, rows)
            work += activation_work(workload, rows * self.shape.ffn, len(self.projections))
        return work + self.out.work(workload, rows)
