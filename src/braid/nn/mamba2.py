"""Mamba-2 (Dao and Gu, arXiv 2405.21060), the layer `M`: a selective state-space model computed as SSD.

    x, B, C, dt, z = u · W                   x, B, C ← SiLU(causal conv)      dt ← softplus(dt + bias)
    h_t = exp(dt_t · A) · h_{t-1} + dt_t · x_t ⊗ B_t                          A = -exp(A_log), per head
    y_t = h_t · C_t + D · x_t
    out = RMSNorm(y · SiLU(z)) · W_o

One fused projection computes x, B, C, dt and z. Its outputs are ordered by group: x of the group's heads, B, C,
then dt and z of its heads; the convolution runs over x, B and C of every group. A tp shard of the groups is
then one contiguous slice of each.

Parallelism: tp ranks split the heads with sequence parallelism between layers, cp ranks split the heads of
their tp rank (Ulysses); see `head_partition`.

    all-gather over tp        the input, x_BtC to x_BSC, then the fused projection
    all-to-all over cp        x, B, C, dt from all heads of some tokens to some heads of all tokens; conv, scan
    all-to-all over cp        back; the gate z never leaves its tokens
    reduce-scatter over tp    the output projection, y_BtC

Shapes: B rows, T tokens, S = T / cp tokens of all tp ranks, t = S / tp tokens of this rank, C hidden channels,
G groups and H heads of this tp rank, g and h of them that this rank scans, r = h / g, D head channels, N state
channels, F channels of a group, I those of its x or z (in the norm: of all x or z), V convolved channels of a
group, E = g · V, K taps, P = K - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups, all_gather, all_reduce
from braid.kernels.activation_bytes import CHUNK, fused_ssd_bytes, padded_to_chunks, ssd_bytes
from braid.kernels.ssd import Ssd, fuses, step
from braid.nn.canonical import Canonical, under
from braid.nn.cost import (
    Cost,
    Workload,
    all_gather_calls,
    all_reduce_calls,
    all_to_all_calls,
    recomputed_calls,
    reduce_scatter_calls,
)
from braid.nn.grouped_conv import GroupedConv
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.head_scalars import HeadScalars
from braid.nn.linear import Linear, RowLinear
from braid.nn.recompute import Recomputing


@dataclass(kw_only=True)
class Mamba2Cache:
    """The recurrent state for generation, of constant size; updated in place."""

    conv_BEP: Tensor
    """The last K - 1 inputs of the convolution."""
    state_BHDN: Tensor
    """The SSM state, float32 or better."""


class ScanInputs(NamedTuple):
    """Arguments of the SSD scan."""

    x_BThD: Tensor
    dt_BTh: Tensor
    a_h: Tensor
    b_BTgN: Tensor
    c_BTgN: Tensor
    skip_h: Tensor


class Mamba2(Recomputing):
    """A Mamba-2 mixer."""

    def __init__(
        self,
        shape: architecture.Mamba2,
        hidden: int,
        eps: float,
        ssd: Ssd,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.ssd = ssd
        self.partition = HeadPartition(all_groups=shape.groups, all_heads=shape.heads, ranks=groups)
        x, z, dt = Part("x", shape.head_dim), Part("z", shape.head_dim), Part("dt", 1)
        b, c = Part("B", shape.state, shared=True), Part("C", shape.state, shared=True)
        self.parts = (x, b, c, dt, z)
        """The outputs of the fused projection for every group. All but the gate are exchanged over cp."""
        outputs = (self.partition.groups, sum(self.partition.sizes(self.parts)))
        inner = self.partition.heads * shape.head_dim
        self.xbcdtz = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.conv = GroupedConv(
            self.partition, (x, b, c), shape.conv, bias=shape.conv_bias, device=device, dtype=dtype
        )
        self.scalars = HeadScalars(
            self.partition,
            {"A_log": "decay_log", "D": "ones", "dt_bias": "time_step"},
            device=device,
            dtype=dtype,
        )
        parts, sharers = (
            (self.partition.groups, self.partition.holders) if shape.norm_per_group else (1, groups.tp)
        )
        self.gate_norm = GatedRmsNorm(
            inner, parts, eps, tp=groups.tp, sharers=sharers, device=device, dtype=dtype
        )
        self.o = RowLinear(inner, hidden, groups.tp, bias=shape.bias, device=device, dtype=dtype)

    def forward(
        self, x_BtC: Tensor, documents_BT: Tensor | None = None, cache: Mamba2Cache | None = None
    ) -> Tensor:
        """`documents_BT` is None if every row is a single document. With a cache, rows continue from its state,
        which is updated in place; caches require tp = cp = 1."""
        assert documents_BT is None or cache is None, "a row that continues from a cache is one document"
        assert cache is None or self.groups.tp.size == self.groups.cp.size == 1
        x_BSC = all_gather(x_BtC, self.groups.tp, dim=1)
        outputs_BSGF = self.xbcdtz(x_BSC).unflatten(-1, self.xbcdtz.dims)
        *recurrent, gate = self.partition.sizes(self.parts)
        xbcdt_BSGF, z_BSGI = outputs_BSGF.split([sum(recurrent), gate], -1)
        xbcdt_BTgF = self.partition.gather_sequence(xbcdt_BSGF, self.parts[:-1])
        scan = partial(self._scan, documents_BT, cache)
        y_BThD = self.recomputed("core", scan, xbcdt_BTgF, *self.scalars())
        y_BSHD = self.partition.scatter_sequence(y_BThD)
        return self.o(self.recomputed("core", self._gate_and_norm, y_BSHD, z_BSGI))

    def new_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> Mamba2Cache:
        """An empty cache; `dtype` is that of the activations."""
        shape = self.shape
        wide = torch.promote_types(dtype, torch.float32)
        return Mamba2Cache(
            conv_BEP=self.conv.new_state(rows, device, dtype),
            state_BHDN=torch.zeros(rows, shape.heads, shape.head_dim, shape.state, device=device, dtype=wide),
        )

    # -------------------------------------------------------------------------------------- parts

    def _scan(
        self,
        documents_BT: Tensor | None,
        cache: Mamba2Cache | None,
        xbcdt_BTgF: Tensor,
        a_log_h: Tensor,
        skip_h: Tensor,
        dt_bias_h: Tensor,
    ) -> Tensor:
        heads = self._scan_inputs(xbcdt_BTgF, (a_log_h, skip_h, dt_bias_h), documents_BT, cache)
        return self.ssd(*heads, documents_BT)[0] if cache is None else self._continue_from_cache(heads, cache)

    def _gate_and_norm(self, y_BSHD: Tensor, z_BSGI: Tensor) -> Tensor:
        return self.gate_norm(y_BSHD.flatten(2), z_BSGI.flatten(2))

    def _scan_inputs(
        self,
        xbcdt_BTgF: Tensor,
        scalars: tuple[Tensor, Tensor, Tensor],
        documents_BT: Tensor | None,
        cache: Mamba2Cache | None,
    ) -> ScanInputs:
        """Convolution, time step and decay for the heads of this rank over the whole sequence."""
        inner, state, _, steps = self.partition.core_sizes(self.parts[:-1])
        xbc_BTgV, dt_BTgr = xbcdt_BTgF.split([inner + 2 * state, steps], -1)
        xbc_BTgV = self.conv(xbc_BTgV, documents_BT, None if cache is None else cache.conv_BEP)
        x_BTgI, b_BTgN, c_BTgN = xbc_BTgV.split([inner, state, state], -1)
        a_log_h, skip_h, dt_bias_h = scalars
        dt_BTh = self._time_step(dt_BTgr.flatten(2), dt_bias_h)
        return ScanInputs(
            x_BThD=x_BTgI.flatten(2).unflatten(2, (-1, self.shape.head_dim)),
            dt_BTh=dt_BTh,
            a_h=-a_log_h.to(dt_BTh.dtype).exp(),
            b_BTgN=b_BTgN,
            c_BTgN=c_BTgN,
            skip_h=skip_h,
        )

    def _time_step(self, dt_BTh: Tensor, dt_bias_h: Tensor) -> Tensor:
        """The discretization step of each token, float32 or better."""
        wide = torch.promote_types(dt_BTh.dtype, torch.float32)
        dt_BTh = F.softplus(dt_BTh.to(wide) + dt_bias_h.to(wide))
        return dt_BTh.clamp(self.shape.dt_min, self.shape.dt_max)

    def _continue_from_cache(self, heads: ScanInputs, cache: Mamba2Cache) -> Tensor:
        """Scan from the cached state and update it: one recurrent step, or a chunked scan for a longer
        prompt."""
        if heads.x_BThD.shape[1] == 1:
            x_BThD, dt_BTh, a_h, b_BTgN, c_BTgN, skip_h = heads
            token = (x_BThD[:, 0], dt_BTh[:, 0], a_h, b_BTgN[:, 0], c_BTgN[:, 0], skip_h)
            y_BhD, state_BHDN = step(*token, cache.state_BHDN)
            y_BThD = y_BhD.unsqueeze(1)
        else:
            y_BThD, state_BHDN = self.ssd(*heads, initial_state_BHDN=cache.state_BHDN)
        cache.state_BHDN.copy_(state_BHDN.detach())
        return y_BThD

    # --------------------------------------------------------------------- introspection and cost

    def canonical(self) -> dict[str, Canonical]:
        partition = self.partition
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, partition.slices(self.parts), strict=True):
            held = self.xbcdtz.canonical_part(
                (slice(None), place), partition.span(part), partition.copies(part)
            )
            tensors |= under(part.name, "xbcdtz", held)
        tensors |= under("conv", "conv", self.conv.canonical())
        tensors |= under("", "scalars", self.scalars.canonical())
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def cost(self, workload: Workload) -> Cost:
        """The cost with the reference scan, dominated by the token pairs within chunks."""
        partition, shape, n, w = self.partition, self.shape, workload.narrow, workload.wide
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.xbcdtz.channels_in
        all_tokens, cp_tokens = workload.local_tokens(), workload.local_tokens(cp)
        sp_tokens = workload.local_tokens(tp, cp)
        heads, inner = partition.core_heads, partition.heads * shape.head_dim
        scan = (workload.rows, workload.tokens, heads, shape.head_dim, partition.core_groups, shape.state)
        exchanged = all_tokens * partition.core_groups * sum(partition.core_sizes(self.parts[:-1])) * n
        normed_input = workload.norm_output(cp_tokens * hidden * n, tp.size > 1)
        kept = normed_input + self.conv.cost(workload).kept
        fused = fuses(workload.device, workload.dtype, shape.head_dim, shape.state)
        kept += (2 * all_tokens + 1) * heads * w
        kept += (fused_ssd_bytes if fused else ssd_bytes)(*scan, narrow=n, wide=w)
        norm = self.gate_norm.cost(workload, cp_tokens)
        kept += norm.kept + cp_tokens * inner * n
        if not workload.mixed and partition.groups == 1:
            # The gate is a view of the projection's output and keeps all of it alive.
            kept += cp_tokens * (self.xbcdtz.channels_out - inner) * n
        if not workload.mixed and cp.size == 1:
            kept += (padded_to_chunks(workload.tokens) - workload.tokens) * workload.rows * inner * n
        calls = norm.calls
        if workload.recomputes("core"):
            calls += recomputed_calls(norm.calls)
            kept = normed_input + cp_tokens * self.xbcdtz.channels_out * n + 3 * heads * w
            kept += exchanged + cp_tokens * inner * n if cp.size > 1 else 0
        return Cost(
            kept=kept,
            # Pairwise decays within chunks, which forward briefly holds in float64.
            passing=all_tokens * heads * CHUNK * (4 if workload.mixed else 8),
            calls=all_gather_calls(tp, sp_tokens * hidden * n, "mamba2 tokens")
            + all_to_all_calls(cp, exchanged, "mamba2 heads")
            + all_to_all_calls(cp, all_tokens * heads * shape.head_dim * n, "mamba2 outputs")
            + calls
            + reduce_scatter_calls(tp, cp_tokens * hidden * n, "mamba2 sums"),
        )

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row. The recurrence updates and reads the state once per token, with 2 FLOPs
        per entry each."""
        own = tokens // self.groups.cp.size
        states = self.partition.core_heads * self.shape.head_dim * self.shape.state
        return self.xbcdtz.flops(own) + self.conv.flops(tokens) + 4 * tokens * states + self.o.flops(own)


class GatedRmsNorm(nn.Module):
    """RMSNorm(y · SiLU(z)) over all channels or over equal groups of them. A group may span tp ranks."""

    def __init__(
        self,
        channels: int,
        parts: int,
        eps: float,
        *,
        tp: Group = ALONE,
        sharers: Group = ALONE,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`channels` and `parts` (norm groups) are those of this tp rank. If a norm group is larger, `sharers`
        are the ranks that hold the rest of it."""
        super().__init__()
        self.channels, self.parts = channels, parts
        self.eps = eps
        self.tp, self.sharers = tp, sharers
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, y_I: Tensor, z_I: Tensor) -> Tensor:
        wide = torch.promote_types(y_I.dtype, torch.float32)
        gated = (y_I.to(wide) * F.silu(z_I.to(wide))).unflatten(-1, (self.parts, -1))
        return (self._normed(gated).flatten(-2) * self.weight.to(wide)).to(y_I.dtype)

    def _normed(self, gated: Tensor) -> Tensor:
        """Normalize each group over its channels on all `sharers`, with an all-reduce of the squares."""
        if self.sharers.size == 1:
            return F.rms_norm(gated, gated.shape[-1:], None, self.eps)
        squares = all_reduce(gated.square().sum(-1, keepdim=True), self.sharers)
        return gated * torch.rsqrt(squares / (self.sharers.size * gated.shape[-1]) + self.eps)

    def canonical(self) -> dict[str, Canonical]:
        weight = Canonical(
            parameter="weight",
            shape=(self.tp.size * self.channels,),
            fill="ones",
            part=(self.channels,),
            offset=(self.tp.rank * self.channels,),
        )
        return {"weight": weight}

    def cost(self, workload: Workload, vectors: int) -> Cost:
        """The cost of `vectors` tokens: both inputs upcast, SiLU(z), the product, and its norm."""
        entries = vectors * (5 * self.channels + self.parts) + (self.channels if workload.mixed else 0)
        return Cost(
            kept=entries * workload.wide,
            passing=vectors * self.channels * workload.wide,
            calls=all_reduce_calls(self.sharers, vectors * self.parts * workload.wide, "mamba2 norm"),
        )
