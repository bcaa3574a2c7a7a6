"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): several residual streams around every layer.

    u = Σ_s pre_s · x_s                      input of the layer
    x'_s = Σ_r res_rs · x_r + post_s · y     y = layer(norm(u)); res is doubly stochastic (Sinkhorn)

pre, post and res are computed per token from its streams: a projection of the normed streams, scaled by alpha,
plus a bias. The streams start as copies of the embedding and are merged by an exit before the final norm. With
alpha = 0 every stream equals a plain residual stream: the layer reads it times streams / 2, a factor that its
norm removes.

Weights are at least float32 in every model, and each connection is an FSDP unit of its own. Tokens are
independent, so tp and cp ranks process their own tokens. With a wgrad store, weight gradients are delayed.

Shapes: B rows, t tokens of this rank, S streams, C channels, N = B · t.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import Groups
from braid.kernels.hyper_connection import (
    ConnectionForm,
    HyperConnect,
    Parameters,
    PostInputs,
    activation_bytes,
    fuses,
)
from braid.nn.canonical import Canonical
from braid.nn.cost import Cost, Workload
from braid.nn.delayed_wgrad import Delaying
from braid.nn.work import Kernel, Piece, Work, kernel_work, moved


class _ProjectionWeights(Delaying):
    """Projection, scale (alpha) and bias that compute a token's mappings from its streams."""

    def __init__(
        self,
        rows: int,
        strengths: int,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        groups: Groups,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.shape, self.hidden, self.groups = shape, hidden, groups
        self.implementation = implementation
        self.form = ConnectionForm(steps=shape.sinkhorn_steps, eps=shape.eps, norm_eps=norm_eps)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, device=device, dtype=wide))

        self.weight = empty(rows, shape.streams * hidden)
        self.alpha = empty(strengths)
        self.bias = empty(rows)

    @property
    def parts(self) -> Parameters:
        return Parameters(self.weight, self.alpha, self.bias)

    def _canonical(self, alpha: Canonical) -> dict[str, Canonical]:
        tp = self.groups.tp
        weight = Canonical(parameter="weight", shape=tuple(self.weight.shape), fill="xavier", copies=tp)
        bias = Canonical(parameter="bias", shape=tuple(self.bias.shape), fill="zeros", copies=tp)
        return {"weight": weight, "alpha": alpha, "bias": bias}

    def _own(self, tokens: int) -> int:
        """The tokens of a row that this rank processes."""
        return tokens // self.groups.tp_cp.size

    def _projection_work(self, workload: Workload, part: Literal["pre", "exit"]) -> Work:
        """Projection, mappings and the weighted sum of the streams. Forward reads the streams twice; backward
        too, with the gradient of the sum, and writes that of the streams."""
        tokens, streams = workload.local_tokens(self.groups.tp_cp), self.shape.streams
        one = tokens * self.hidden * workload.narrow
        every, scalars = streams * one, 2 * tokens * len(self.weight) * workload.wide
        product, sums = 2 * tokens * self.weight.numel(), 2 * tokens * streams * self.hidden
        key = {"part": part, "streams": streams}
        read = 2 * every + 2 * one + (every if part == "pre" else 0)
        work = kernel_work(
            "hyper_connection",
            key,
            flops=(product + sums, product + 2 * sums),
            moves=(2 * every + one + scalars, read + every + 2 * scalars),
            launches=(3, 3),
            region="hyper",
        )
        wgrad = Kernel("hyper_connection", tuple(sorted(key.items())), product, every + scalars)
        return replace(work, wgrad=(Piece(wgrad, launches=2),))


class HyperConnection(_ProjectionWeights):
    """The hyper-connection of one layer."""

    def __init__(
        self,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rows = shape.streams * (shape.streams + 2)
        super().__init__(rows, 3, shape, hidden, norm_eps, implementation, groups, device, dtype)

    def forward(self, x_BtSC: Tensor) -> tuple[Tensor, PostInputs]:
        """Returns the layer's input, and the arguments of `post`."""
        rows, tokens = x_BtSC.shape[:2]
        branch_NC, post_inputs = self.implementation.pre(
            x_BtSC.flatten(0, 1), self.parts, self.form, self.wgrad_store
        )
        return branch_NC.view(rows, tokens, self.hidden), post_inputs

    def post(self, post_inputs: PostInputs, y_BtC: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """The streams after the layer, whose output is `y_BtC`. Needs no weights."""
        rows, tokens, _ = y_BtC.shape
        out_NSC = self.implementation.post(post_inputs, y_BtC.flatten(0, 1), bias_C)
        return out_NSC.view(rows, tokens, self.shape.streams, self.hidden)

    def canonical(self) -> dict[str, Canonical]:
        return self._canonical(
            Canonical(parameter="alpha", shape=(3,), fill="hundredths", copies=self.groups.tp)
        )

    def cost(self, workload: Workload) -> Cost:
        """Includes the layer's output, which `post` saves."""
        tokens, streams = workload.local_tokens(self.groups.tp_cp), self.shape.streams
        sizes = {"narrow": workload.narrow, "wide": workload.wide}
        if _fuses(workload):
            saved = activation_bytes.fused(tokens, streams, self.hidden, **sizes)
        else:
            saved = activation_bytes.plain(tokens, streams, self.hidden, self.shape.sinkhorn_steps, **sizes)
        return Cost(kept=saved, passing=tokens * streams * self.hidden * 2 * workload.narrow)

    def flops(self, tokens: int) -> int:
        """FLOPs of the projection, and a multiply-add for every mapping weight and channel."""
        own, streams = self._own(tokens), self.shape.streams
        return 2 * own * (self.weight.numel() + streams * (streams + 2) * self.hidden)

    def pre_work(self, workload: Workload) -> Work:
        """Projection, mappings and the layer's input. Backward also reads the gradient of the streams after the
        layer, to apply H_res to it."""
        return self._projection_work(workload, "pre")

    def post_work(self, workload: Workload) -> Work:
        """The streams after the layer."""
        tokens, streams = workload.local_tokens(self.groups.tp_cp), self.shape.streams
        one = tokens * self.hidden * workload.narrow
        flops = 2 * tokens * streams * (streams + 1) * self.hidden
        return kernel_work(
            "hyper_connection",
            {"part": "post", "streams": streams},
            flops=(flops, flops),
            moves=((2 * streams + 1) * one, (2 * streams + 2) * one),
            region="hyper",
        )

    def work(self, workload: Workload) -> Work:
        return self.pre_work(workload) + self.post_work(workload)


class HyperExit(_ProjectionWeights):
    """The learned exit: merges the streams with weights computed per token."""

    def __init__(
        self,
        shape: architecture.HyperConnections,
        hidden: int,
        norm_eps: float,
        implementation: HyperConnect,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape.streams, 1, shape, hidden, norm_eps, implementation, groups, device, dtype)

    def forward(self, x_BtSC: Tensor) -> Tensor:
        out_NC = self.implementation.contract(x_BtSC.flatten(0, 1), self.parts, self.form, self.wgrad_store)
        return out_NC.view(x_BtSC.shape[0], x_BtSC.shape[1], self.hidden)

    def canonical(self) -> dict[str, Canonical]:
        return self._canonical(Canonical(parameter="alpha", shape=(1,), fill="ones", copies=self.groups.tp))

    def cost(self, workload: Workload) -> Cost:
        tokens, streams = workload.local_tokens(self.groups.tp_cp), self.shape.streams
        fused = _fuses(workload)
        count = activation_bytes.fused_exit if fused else activation_bytes.plain_exit
        saved = count(tokens, streams, self.hidden, narrow=workload.narrow, wide=workload.wide)
        return Cost(kept=saved, passing=tokens * streams * self.hidden * workload.narrow)

    def flops(self, tokens: int) -> int:
        return 2 * self._own(tokens) * (self.weight.numel() + self.shape.streams * self.hidden)

    def work(self, workload: Workload) -> Work:
        return self._projection_work(workload, "exit")


class HyperMean(nn.Module):
    """The exit without weights: the mean of the streams."""

    def __init__(self, shape: architecture.HyperConnections, hidden: int, *, groups: Groups = Groups()) -> None:
        super().__init__()
        self.shape, self.hidden, self.groups = shape, hidden, groups

    def forward(self, x_BtSC: Tensor) -> Tensor:
        wide = torch.promote_types(x_BtSC.dtype, torch.float32)
        return x_BtSC.mean(2, dtype=wide).to(x_BtSC.dtype)

    def canonical(self) -> dict[str, Canonical]:
        return {}

    def cost(self, workload: Workload) -> Cost:
        tokens = workload.local_tokens(self.groups.tp_cp)
        return Cost(passing=tokens * self.shape.streams * self.hidden * workload.narrow)

    def flops(self, tokens: int) -> int:
        return self.shape.streams * self.hidden * tokens // self.groups.tp_cp.size

    def work(self, workload: Workload) -> Work:
        """Ops of torch, in float32: a mean and a cast; backward casts the gradients of all streams."""
        entries, streams = workload.local_tokens(self.groups.tp_cp) * self.hidden, self.shape.streams
        n, w, cast = workload.narrow, workload.wide, workload.narrow + workload.wide if workload.mixed else 0
        forward, backward = streams * n + w + cast, (streams + 1) * (w + cast)
        flops = streams * entries
        return moved(entries * forward, entries * backward, launches=(2, 3), flops=(flops, flops))


def expand_work(workload: Workload, tokens: int, hidden: int, streams: int) -> Work:
    """Of `expand`; backward sums the gradients of all copies."""
    size = tokens * hidden * (streams + 1) * workload.narrow
    return moved(size, size)


def expand(x_BtC: Tensor, streams: int) -> Tensor:
    """The initial streams: copies of the embedding, x_BtSC."""
    return x_BtC.unsqueeze(2).expand(-1, -1, streams, -1).contiguous()


@torch.no_grad()
def deviation(res_NSS: Tensor) -> Tensor:
    """The largest deviation of a row or column sum of `res` from 1; 0 without tokens."""
    sums = torch.cat([res_NSS.sum(1), res_NSS.sum(2)])
    return (sums - 1).abs().amax() if len(sums) else sums.new_zeros(())


def _fuses(workload: Workload) -> bool:
    return fuses(workload.device, workload.dtype) and workload.may_fuse("hyper_connection")
