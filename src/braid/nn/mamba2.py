"""Mamba-2, the layer `M`.

One projection gives what is written (x), where (B), what is read (C), the time step (dt) and the gate (z). Its
outputs are ordered by group: the x of the group's heads, its B, its C, then dt and z of its heads. The
convolution sees x, B and C of every group. A shard of the groups is then one contiguous slice of each.

tp ranks share the heads, and cp ranks those of their tp rank, as `head_partition` has it:

    gather over tp     x_BtC to x_BSC, which is projected
    swap over cp       x, B, C and dt from all heads of some tokens to some heads of all tokens; conv and scan
    swap over cp       back; z has stayed with its tokens and gates them, the norm follows
    scatter over tp    what `o` gives, y_BtC

Shapes: B rows, T tokens, S of them that the tp ranks share (T / cp), t of this rank alone (S / tp), C hidden
channels, G groups and H heads of this tp rank, g and h of them that this rank scans, r = h / g, D head
channels, N state channels, F channels of a group, I those of its x or z (in the norm: of all x or z), V those
that are convolved, E = g · V, K taps, P = K - 1.
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
from braid.kernels.activation_bytes import CHUNK, in_chunks, scanned
from braid.kernels.ssd import Ssd, step
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Portion, gather_cost, scatter_cost, sent_again, swap_cost, total_cost
from braid.nn.grouped_conv import GroupedConv
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.head_scalars import HeadScalars
from braid.nn.linear import Linear, RowLinear
from braid.nn.recompute import Recomputing


@dataclass(kw_only=True)
class Mamba2Cache:
    """What generation keeps of the tokens so far: its size does not depend on how many they are."""

    conv_BEP: Tensor
    """The last K - 1 inputs of the convolution."""
    state_BHDN: Tensor
    """The state, float32 or better."""


class Heads(NamedTuple):
    """What the scan is given."""

    x_BThD: Tensor
    dt_BTh: Tensor
    a_h: Tensor
    b_BTgN: Tensor
    c_BTgN: Tensor
    skip_h: Tensor


class Mamba2(Recomputing):
    """Projects, convolves, scans, gates and projects back."""

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
        self.share = HeadPartition(all_groups=shape.groups, all_heads=shape.heads, ranks=groups)
        x, z, dt = Part("x", shape.head_dim), Part("z", shape.head_dim), Part("dt", 1)
        b, c = Part("B", shape.state, common=True), Part("C", shape.state, common=True)
        self.parts = (x, b, c, dt, z)
        """What the projection gives every group. All but the gate go where the scan is."""
        outputs = (self.share.groups, sum(self.share.sizes(self.parts)))
        inner = self.share.heads * shape.head_dim
        self.xbcdtz = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.conv = GroupedConv(
            self.share, (x, b, c), shape.conv, bias=shape.conv_bias, device=device, dtype=dtype
        )
        self.scalars = HeadScalars(
            self.share, {"A_log": "decay_log", "D": "ones", "dt_bias": "time_step"}, device=device, dtype=dtype
        )
        parts, sharers = (self.share.groups, self.share.holders) if shape.norm_per_group else (1, groups.tp)
        self.gate_norm = GatedRmsNorm(
            inner, parts, eps, tp=groups.tp, sharers=sharers, device=device, dtype=dtype
        )
        self.o = RowLinear(inner, hidden, groups.tp, bias=shape.bias, device=device, dtype=dtype)

    def forward(
        self, x_BtC: Tensor, documents_BT: Tensor | None = None, cache: Mamba2Cache | None = None
    ) -> Tensor:
        """`documents_BT` is None where every row is a single document. With a cache, which a process alone may
        have, the tokens go on from it and it is brought up to date."""
        assert documents_BT is None or cache is None, "a row that goes on from a cache is one document"
        assert cache is None or self.groups.tp.size == self.groups.cp.size == 1
        x_BSC = all_gather(x_BtC, self.groups.tp, dim=1)
        outputs_BSGF = self.xbcdtz(x_BSC).unflatten(-1, self.xbcdtz.dims)
        *scanned, gate = self.share.sizes(self.parts)
        scanned_BSGF, z_BSGI = outputs_BSGF.split([sum(scanned), gate], -1)
        xbcdt_BTgF = self.share.all_tokens(scanned_BSGF, self.parts[:-1])
        scan = partial(self._scan, documents_BT, cache)
        y_BThD = self.recomputed("core", scan, xbcdt_BTgF, *self.scalars())
        return self.o(self.recomputed("core", self._gated, self.share.own_tokens(y_BThD), z_BSGI))

    def new_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> Mamba2Cache:
        """The cache before the first token; `dtype` is that of the activations."""
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
        heads = self._heads(xbcdt_BTgF, (a_log_h, skip_h, dt_bias_h), documents_BT, cache)
        return self.ssd(*heads, documents_BT)[0] if cache is None else self._go_on(heads, cache)

    def _gated(self, y_BSHD: Tensor, z_BSGI: Tensor) -> Tensor:
        return self.gate_norm(y_BSHD.flatten(2), z_BSGI.flatten(2))

    def _heads(
        self,
        xbcdt_BTgF: Tensor,
        scalars: tuple[Tensor, Tensor, Tensor],
        documents_BT: Tensor | None,
        cache: Mamba2Cache | None,
    ) -> Heads:
        """What the scan is given, from the projections of all tokens."""
        inner, state, _, steps = self.share.core_sizes(self.parts[:-1])
        xbc_BTgV, dt_BTgr = xbcdt_BTgF.split([inner + 2 * state, steps], -1)
        xbc_BTgV = self.conv(xbc_BTgV, documents_BT, None if cache is None else cache.conv_BEP)
        x_BTgI, b_BTgN, c_BTgN = xbc_BTgV.split([inner, state, state], -1)
        a_log_h, skip_h, dt_bias_h = scalars
        dt_BTh = self._time_step(dt_BTgr.flatten(2), dt_bias_h)
        return Heads(
            x_BThD=x_BTgI.flatten(2).unflatten(2, (-1, self.shape.head_dim)),
            dt_BTh=dt_BTh,
            a_h=-a_log_h.to(dt_BTh.dtype).exp(),
            b_BTgN=b_BTgN,
            c_BTgN=c_BTgN,
            skip_h=skip_h,
        )

    def _time_step(self, dt_BTh: Tensor, dt_bias_h: Tensor) -> Tensor:
        """The time that passes with each token, float32 or better."""
        wide = torch.promote_types(dt_BTh.dtype, torch.float32)
        dt_BTh = F.softplus(dt_BTh.to(wide) + dt_bias_h.to(wide))
        return dt_BTh.clamp(self.shape.dt_min, self.shape.dt_max)

    def _go_on(self, heads: Heads, cache: Mamba2Cache) -> Tensor:
        """The scan from the cache's state on."""
        if heads.x_BThD.shape[1] == 1:
            x_BThD, dt_BTh, a_h, b_BTgN, c_BTgN, skip_h = heads
            token = (x_BThD[:, 0], dt_BTh[:, 0], a_h, b_BTgN[:, 0], c_BTgN[:, 0], skip_h)
            y_BhD, state_BHDN = step(*token, cache.state_BHDN)
            y_BThD = y_BhD.unsqueeze(1)
        else:
            y_BThD, state_BHDN = self.ssd(*heads, initial_state_BHDN=cache.state_BHDN)
        cache.state_BHDN.copy_(state_BHDN.detach())
        return y_BThD

    # -------------------------------------------------------------------------------------- facts

    def canonical(self) -> dict[str, Canonical]:
        share = self.share
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, share.places(self.parts), strict=True):
            held = self.xbcdtz.part((slice(None), place), share.span(part), share.copies(part))
            tensors |= under(part.name, "xbcdtz", held)
        tensors |= under("conv", "conv", self.conv.canonical())
        tensors |= under("", "scalars", self.scalars.canonical())
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def cost(self, portion: Portion) -> Cost:
        """With the scan in plain torch: pairs of tokens within a chunk are most of it."""
        share, shape, n, w = self.share, self.shape, portion.narrow, portion.wide
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.xbcdtz.channels_in
        every, own, part = portion.places(), portion.places(cp), portion.places(tp, cp)
        heads, inner = share.core_heads, share.heads * shape.head_dim
        scan = (portion.rows, portion.tokens, heads, shape.head_dim, share.core_groups, shape.state)
        swapped = every * share.core_groups * sum(share.core_sizes(self.parts[:-1])) * n
        seen = portion.normed(own * hidden * n, tp.size > 1)
        kept = seen + self.conv.cost(portion).kept
        kept += (2 * every + 1) * heads * w + scanned(*scan, narrow=n, wide=w)
        norm = self.gate_norm.cost(portion, own)
        kept += norm.kept + own * inner * n
        if not portion.mixed and share.groups == 1:
            kept += (
                own * (self.xbcdtz.channels_out - inner) * n
            )  # the gate is read where the projection left it
        if not portion.mixed and cp.size == 1:
            kept += (in_chunks(portion.tokens) - portion.tokens) * portion.rows * inner * n
        calls = norm.calls
        if portion.again("core"):
            calls += sent_again(norm.calls)
            kept = seen + own * self.xbcdtz.channels_out * n + 3 * heads * w
            kept += swapped + own * inner * n if cp.size > 1 else 0
        return Cost(
            kept=kept,
            # Decays between the tokens of a chunk, of which forward has float64 ones for a moment.
            passing=every * heads * CHUNK * (4 if portion.mixed else 8),
            calls=gather_cost(tp, part * hidden * n, "mamba2 tokens")
            + swap_cost(cp, swapped, "mamba2 heads")
            + swap_cost(cp, every * heads * shape.head_dim * n, "mamba2 outputs")
            + calls
            + scatter_cost(tp, own * hidden * n, "mamba2 sums"),
        )

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens. The recurrence writes and reads a state once for
        each token, 2 operations per entry each."""
        own = tokens // self.groups.cp.size
        states = self.share.core_heads * self.shape.head_dim * self.shape.state
        return self.xbcdtz.flops(own) + self.conv.flops(tokens) + 4 * tokens * states + self.o.flops(own)


class GatedRmsNorm(nn.Module):
    """RMSNorm of y · silu(z), over all channels or over equal parts of them. A part may span ranks."""

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
        """`channels` and `parts` are what this rank of `tp` holds, an equal share of the channels. Where a part
        is larger, `sharers` are the ranks that hold the rest of it."""
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
        """Each part by itself, over its channels on all ranks."""
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

    def cost(self, portion: Portion, vectors: int) -> Cost:
        """Of so many tokens: both inputs widened, the opened gate, their product, that normed."""
        entries = vectors * (5 * self.channels + self.parts) + (self.channels if portion.mixed else 0)
        return Cost(
            kept=entries * portion.wide,
            passing=vectors * self.channels * portion.wide,
            calls=total_cost(self.sharers, vectors * self.parts * portion.wide, "mamba2 norm"),
        )
