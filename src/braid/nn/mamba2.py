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
from torch import Tensor
from torch.nn import functional as F

from braid import architecture
from braid.distributed.collectives import Groups, all_gather
from braid.kernels import causal_conv, gated_norm, ssd
from braid.kernels.activation_bytes import CHUNK, fused_ssd_bytes, padded_to_chunks, ssd_bytes
from braid.kernels.causal_conv import CausalConv
from braid.kernels.gated_norm import GatedNorm
from braid.kernels.ssd import Ssd, step
from braid.nn.canonical import Canonical, under
from braid.nn.cost import (
    Cost,
    Workload,
    all_gather_calls,
    all_to_all_calls,
    recomputed_calls,
    reduce_scatter_calls,
)
from braid.nn.gated_norm import GateThenNorm
from braid.nn.grouped_conv import GroupedConv
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.head_scalars import HeadScalars
from braid.nn.linear import Linear, RowLinear
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, exchange_copies, gather_copies, kernel_work, moved


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
        scan: Ssd,
        *,
        conv: CausalConv = causal_conv.PLAIN,
        gate: GatedNorm = gated_norm.PLAIN,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.ssd = scan
        self.partition = HeadPartition(all_groups=shape.groups, all_heads=shape.heads, ranks=groups)
        x, z, dt = Part("x", shape.head_dim), Part("z", shape.head_dim), Part("dt", 1)
        b, c = Part("B", shape.state, shared=True), Part("C", shape.state, shared=True)
        self.parts = (x, b, c, dt, z)
        """The outputs of the fused projection for every group. All but the gate are exchanged over cp."""
        outputs = (self.partition.groups, sum(self.partition.sizes(self.parts)))
        inner = self.partition.heads * shape.head_dim
        self.xbcdtz = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.conv = GroupedConv(
            self.partition, (x, b, c), shape.conv, bias=shape.conv_bias, conv=conv, device=device, dtype=dtype
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
        self.gate_norm = GateThenNorm(
            inner, parts, eps, gated_norm=gate, tp=groups.tp, sharers=sharers, device=device, dtype=dtype
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
        return self.gate_norm(y_BSHD.flatten(2), z_BSGI)

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
        x_BTgI, b_BTgN, c_BTgN = self.conv(xbc_BTgV, documents_BT, None if cache is None else cache.conv_BEP)
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
        """The cost of the projections, the scan and what lies between them. That of the reference scan is
        dominated by the token pairs within chunks."""
        partition, shape, n, w = self.partition, self.shape, workload.narrow, workload.wide
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.xbcdtz.channels_in
        all_tokens, cp_tokens = workload.local_tokens(), workload.local_tokens(cp)
        sp_tokens = workload.local_tokens(tp, cp)
        heads, inner = partition.core_heads, partition.heads * shape.head_dim
        exchanged = all_tokens * partition.core_groups * sum(partition.core_sizes(self.parts[:-1])) * n
        normed_input = workload.norm_output(cp_tokens * hidden * n, tp.size > 1)
        norm = self.gate_norm.cost(workload, cp_tokens)
        kept = normed_input + self._saved_projection(workload, exchanged) + self.conv.cost(workload).kept
        kept += (2 * all_tokens + 1) * heads * w + self._saved_by_scan(workload)
        kept += norm.kept + cp_tokens * inner * n
        calls = norm.calls
        if workload.recomputes("core"):
            calls += recomputed_calls(norm.calls)
            kept = normed_input + cp_tokens * self.xbcdtz.channels_out * n + 3 * heads * w
            kept += exchanged + cp_tokens * inner * n if cp.size > 1 else 0
        # Pairwise decays within chunks, which forward briefly holds in float64; or the states of all chunks and
        # their gradients.
        passing = all_tokens * heads * CHUNK * (4 if workload.mixed else 8)
        if self._fuses_scan(workload):
            passing = 2 * all_tokens * heads * shape.head_dim * shape.state // CHUNK * n
        return Cost(
            kept=kept,
            passing=passing,
            calls=all_gather_calls(tp, sp_tokens * hidden * n, "mamba2 tokens")
            + all_to_all_calls(cp, exchanged, "mamba2 heads")
            + all_to_all_calls(cp, all_tokens * heads * shape.head_dim * n, "mamba2 outputs")
            + calls
            + reduce_scatter_calls(tp, cp_tokens * hidden * n, "mamba2 sums"),
        )

    def _fuses_scan(self, workload: Workload) -> bool:
        available = ssd.fuses(workload.device, workload.dtype, self.shape.head_dim, self.shape.state)
        return available and workload.may_fuse("ssd")

    def _saved_projection(self, workload: Workload, exchanged: int) -> int:
        """Bytes of the projection's output that its slices keep alive: the gate, and the input of a fused
        convolution. A gate that the norm upcasts, or that was copied for it, is counted there."""
        cp, cp_tokens, n = self.groups.cp, workload.local_tokens(self.groups.cp), workload.narrow
        inner, conv, gate = self.partition.heads * self.shape.head_dim, *self._fused_around(workload)
        sliced = self.partition.groups == 1 or self.shape.norm_per_group
        whole = cp_tokens * self.xbcdtz.channels_out * n
        saved = exchanged if conv and cp.size > 1 else 0
        if gate or not workload.mixed:
            saved += whole if sliced or (conv and cp.size == 1) else 0
            saved += cp_tokens * inner * n * (gate - sliced)
        elif conv and cp.size == 1:
            saved += whole
        return saved

    def _fused_around(self, workload: Workload) -> tuple[bool, bool]:
        return self.conv.fuses(workload), self.gate_norm.fuses(workload)

    def _saved_by_scan(self, workload: Workload) -> int:
        """Bytes that the scan saves, inputs included."""
        shape, partition, n, w = self.shape, self.partition, workload.narrow, workload.wide
        heads, groups = partition.core_heads, partition.core_groups
        sizes = (workload.rows, workload.tokens, heads, shape.head_dim, groups, shape.state)
        conv, gate = self._fused_around(workload)
        if self._fuses_scan(workload):
            return fused_ssd_bytes(*sizes, contiguous=conv, narrow=n, wide=w)
        saved = ssd_bytes(*sizes, narrow=n, wide=w)
        if (gate or not workload.mixed) and self.groups.cp.size == 1:
            # The gated norm saves the outputs, a slice of whole chunks.
            padding = padded_to_chunks(workload.tokens) - workload.tokens
            saved += padding * workload.rows * partition.heads * shape.head_dim * n
        return saved

    def flops(self, tokens: int) -> int:
        """FLOPs of this rank for a row. The recurrence updates and reads the state once per token, with 2 FLOPs
        per entry each."""
        own = tokens // self.groups.cp.size
        states = self.partition.core_heads * self.shape.head_dim * self.shape.state
        return self.xbcdtz.flops(own) + self.conv.flops(tokens) + 4 * tokens * states + self.o.flops(own)

    def work(self, workload: Workload) -> Work:
        partition, n, tp, cp = self.partition, workload.narrow, self.groups.tp, self.groups.cp
        tokens, all_tokens = workload.local_tokens(cp), workload.local_tokens()
        own = workload.local_tokens(tp, cp) * self.xbcdtz.channels_in * n
        exchanged = all_tokens * partition.core_groups * sum(partition.core_sizes(self.parts[:-1])) * n
        outputs = tokens * self.xbcdtz.channels_out * n
        work = gather_copies(workload, tp, own) + self.xbcdtz.work(workload, tokens)
        # Gradients of the gate and of all else become one tensor, as do those of the parts of the latter.
        work += moved(backward=2 * (outputs + exchanged), launches=2)
        work += exchange_copies(cp, exchanged) + self.conv.work(workload) + self._scan_work(workload)
        work += exchange_copies(cp, tokens * partition.heads * self.shape.head_dim * n)
        return work + self.gate_norm.work(workload, tokens) + self.o.work(workload, tokens)

    def _scan_work(self, workload: Workload) -> Work:
        """The scan, and before it ops of torch on one float32 number per head. Backward writes the states of
        all chunks and their gradients, and reads both again."""
        shape, partition, n, w = self.shape, self.partition, workload.narrow, workload.wide
        tokens, heads = workload.local_tokens(), partition.core_heads
        x, bc = tokens * heads * shape.head_dim * n, 2 * tokens * partition.core_groups * shape.state * n
        states = -(-workload.tokens // CHUNK) * workload.rows * heads * shape.head_dim * shape.state
        flops, steps = 4 * tokens * heads * shape.head_dim * shape.state, tokens * heads * w
        return moved(9 * steps, 9 * steps, launches=(7, 8), region="core") + kernel_work(
            "ssd",
            {"head_dim": shape.head_dim, "state": shape.state},
            flops=(flops, 2 * flops),
            moves=(2 * x + bc + 3 * steps, 5 * x + 3 * bc + 4 * states * n + 6 * steps),
            launches=(3, 6),
            region="core",
        )
