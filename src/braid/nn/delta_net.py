"""Gated delta net, the layer `G`: a mixer whose heads keep a memory that they correct, token by token.

Query, key, value and output gate z come from one projection, with two scalars per value head: how strongly a
token writes (b) and how much is forgotten (a). Its outputs are ordered by key head: query, key, then values,
scalars and gates of the value heads that this key head serves. The convolution's channels are ordered alike. A
shard of the key heads is then one contiguous slice of each.

tp ranks share the value heads, and cp ranks those of their tp rank, as `head_partition` has it:

    gather over tp     x_BtC to x_BSC, which is projected
    swap over cp       q, k, v, b and a from all heads of some tokens to some heads of all tokens; conv and rule
    swap over cp       back; each head is normed, and gated by z, which has stayed with its tokens
    scatter over tp    what `o` gives, y_BtC

Shapes: B rows, T tokens, S of them that the tp ranks share (T / cp), t of this rank alone (S / tp), C hidden
channels, G key heads and H value heads of this tp rank, g and h of them whose memories are on this rank,
r = h / g, K key channels, V value channels, F channels that belong to a key head, I those of its values or
gates, J those that are convolved, E = g · J, P taps of the convolution, Q = P - 1 tokens that it remembers.
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
from braid.kernels import rms_norm
from braid.kernels.activation_bytes import CHUNK, in_chunks, remembered
from braid.kernels.delta_rule import DeltaRule, step
from braid.kernels.rms_norm import Normalize
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Portion, gather_cost, scatter_cost, swap_cost
from braid.nn.grouped_conv import GroupedConv
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.head_scalars import HeadScalars
from braid.nn.linear import Linear, RowLinear
from braid.nn.norm import RmsNorm
from braid.nn.recompute import Recomputing


@dataclass(frozen=True, kw_only=True)
class DeltaNetCache:
    """What a layer remembers of B documents, one per row. `DeltaNet.forward` moves it on in place."""

    conv_BEQ: Tensor
    """The last tokens before the convolution."""
    state_BHKV: Tensor
    """The memories, float32 or better."""


class DeltaHeads(NamedTuple):
    """What the delta rule is given."""

    q_BTgK: Tensor
    k_BTgK: Tensor
    v_BThV: Tensor
    log_decay_BTh: Tensor
    beta_BTh: Tensor


class DeltaNet(Recomputing):
    """Projects, convolves, applies the delta rule, norms and gates each head, projects back."""

    def __init__(
        self,
        shape: architecture.DeltaNet,
        hidden: int,
        eps: float,
        delta_rule: DeltaRule,
        *,
        normalize: Normalize = rms_norm.PLAIN,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.delta_rule = delta_rule
        self.share = HeadPartition(all_groups=shape.key_heads, all_heads=shape.value_heads, ranks=groups)
        q, k = Part("q", shape.key_dim, common=True), Part("k", shape.key_dim, common=True)
        v, z = Part("v", shape.value_dim), Part("z", shape.value_dim)
        self.parts = (q, k, v, Part("b", 1), Part("a", 1), z)
        """What the projection gives every key head. All but the gate go where the memories are."""
        outputs = (self.share.groups, sum(self.share.sizes(self.parts)))
        self.qkvbaz = Linear(hidden, outputs, device=device, dtype=dtype)
        self.conv = GroupedConv(self.share, (q, k, v), shape.conv, device=device, dtype=dtype)
        self.scalars = HeadScalars(
            self.share, {"A_log": "decay_log", "dt_bias": "time_step"}, device=device, dtype=dtype
        )
        self.gate_norm = RmsNorm(
            shape.value_dim, eps, normalize=normalize, copies=groups.tp, device=device, dtype=dtype
        )
        inner = self.share.heads * shape.value_dim
        self.o = RowLinear(inner, hidden, groups.tp, device=device, dtype=dtype)

    def forward(
        self, x_BtC: Tensor, documents_BT: Tensor | None = None, cache: DeltaNetCache | None = None
    ) -> Tensor:
        """`documents_BT` is None where every row is a single document. With a cache, which a process alone may
        have, each row goes on with the document that the cache remembers."""
        assert documents_BT is None or cache is None, "a row that goes on from a cache is one document"
        assert cache is None or self.groups.tp.size == self.groups.cp.size == 1
        x_BSC = all_gather(x_BtC, self.groups.tp, dim=1)
        outputs_BSGF = self.qkvbaz(x_BSC).unflatten(-1, self.qkvbaz.dims)
        *remembered, gate = self.share.sizes(self.parts)
        remembered_BSGF, z_BSGI = outputs_BSGF.split([sum(remembered), gate], -1)
        qkvba_BTgF = self.share.all_tokens(remembered_BSGF, self.parts[:-1])
        remember = partial(self._remember, documents_BT, cache)
        y_BThV = self.recomputed("core", remember, qkvba_BTgF, *self.scalars())
        return self.o(self.recomputed("core", self._gate, self.share.own_tokens(y_BThV), z_BSGI))

    # -------------------------------------------------------------------------------------- parts

    def _remember(
        self,
        documents_BT: Tensor | None,
        cache: DeltaNetCache | None,
        qkvba_BTgF: Tensor,
        a_log_h: Tensor,
        dt_bias_h: Tensor,
    ) -> Tensor:
        heads = self._heads(qkvba_BTgF, (a_log_h, dt_bias_h), documents_BT, cache)
        return self.delta_rule(*heads, documents_BT)[0] if cache is None else self._go_on(heads, cache)

    def _heads(
        self,
        qkvba_BTgF: Tensor,
        scalars: tuple[Tensor, Tensor],
        documents_BT: Tensor | None,
        cache: DeltaNetCache | None,
    ) -> DeltaHeads:
        """What the delta rule is given, from the projections of all tokens."""
        *convolved, writes, forgets = self.share.core_sizes(self.parts[:-1])
        qkv_BTgJ, b_BTgr, a_BTgr = qkvba_BTgF.split([sum(convolved), writes, forgets], -1)
        qkv_BTgJ = self.conv(qkv_BTgJ, documents_BT, None if cache is None else cache.conv_BEQ)
        q_BTgK, k_BTgK, v_BTgI = qkv_BTgJ.split(convolved, -1)
        return DeltaHeads(
            q_BTgK=q_BTgK,
            k_BTgK=k_BTgK,
            v_BThV=v_BTgI.flatten(2).unflatten(2, (-1, self.shape.value_dim)),
            log_decay_BTh=self._log_decay(a_BTgr.flatten(2), *scalars),
            beta_BTh=b_BTgr.flatten(2).sigmoid(),
        )

    def _log_decay(self, a_BTh: Tensor, a_log_h: Tensor, dt_bias_h: Tensor) -> Tensor:
        wide = torch.promote_types(a_BTh.dtype, torch.float32)
        return -a_log_h.to(wide).exp() * F.softplus(a_BTh.to(wide) + dt_bias_h.to(wide))

    def _go_on(self, heads: DeltaHeads, cache: DeltaNetCache) -> Tensor:
        """The delta rule from the cache's memory on."""
        if heads.v_BThV.shape[1] == 1:
            q_BgK, k_BgK, v_BhV, log_decay_Bh, beta_Bh = (x.squeeze(1) for x in heads)
            y_BhV, state_BHKV = step(q_BgK, k_BgK, v_BhV, log_decay_Bh, beta_Bh, cache.state_BHKV)
            y_BThV = y_BhV.unsqueeze(1)
        else:
            y_BThV, state_BHKV = self.delta_rule(*heads, initial_state_BHKV=cache.state_BHKV)
        cache.state_BHKV.copy_(state_BHKV.detach())
        return y_BThV

    def _gate(self, y_BSHV: Tensor, z_BSGI: Tensor) -> Tensor:
        """norm(y) · silu(z), float32 or better inside, heads side by side."""
        z_BSHV, wide = z_BSGI.flatten(2).view_as(y_BSHV), torch.promote_types(y_BSHV.dtype, torch.float32)
        gated_BSHV = self.gate_norm(y_BSHV.to(wide)) * F.silu(z_BSHV.to(wide))
        return gated_BSHV.to(y_BSHV.dtype).flatten(2)

    # -------------------------------------------------------------------------------------- facts

    def new_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> DeltaNetCache:
        """The cache of documents that have not begun, one per row."""
        shape = self.shape
        memory = (rows, shape.value_heads, shape.key_dim, shape.value_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return DeltaNetCache(
            conv_BEQ=self.conv.new_state(rows, device, dtype),
            state_BHKV=torch.zeros(memory, device=device, dtype=wide),
        )

    def canonical(self) -> dict[str, Canonical]:
        share = self.share
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, share.places(self.parts), strict=True):
            held = self.qkvbaz.part((slice(None), place), share.span(part), share.copies(part))
            tensors |= under(part.name, "qkvbaz", held)
        tensors |= under("conv", "conv", self.conv.canonical())
        tensors |= under("", "scalars", self.scalars.canonical())
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def cost(self, portion: Portion) -> Cost:
        """With the rule in plain torch: pairs of tokens within a chunk are most of it."""
        share, shape, n, w = self.share, self.shape, portion.narrow, portion.wide
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.qkvbaz.channels_in
        every, own, part = portion.places(), portion.places(cp), portion.places(tp, cp)
        heads, inner = share.core_heads, share.heads * shape.value_dim
        rule = (portion.rows, portion.tokens, heads, share.core_groups, shape.key_dim, shape.value_dim)
        swapped = every * share.core_groups * sum(share.core_sizes(self.parts[:-1])) * n
        seen = portion.normed(own * hidden * n, tp.size > 1)
        kept = seen + self.conv.cost(portion).kept
        kept += every * heads * (2 * w + n) + 2 * heads * w + remembered(*rule, narrow=n, wide=w)
        kept += self.gate_norm.cost(portion, own * share.heads, wide=True).kept + own * inner * (3 * w + n)
        if not portion.mixed and share.groups == 1:
            kept += (
                own * (self.qkvbaz.channels_out - inner) * n
            )  # the gate is read where the projection left it
        if not portion.mixed and cp.size == 1:
            kept += (in_chunks(portion.tokens) - portion.tokens) * portion.rows * inner * n
        if portion.again("core"):
            kept = seen + own * self.qkvbaz.channels_out * n + 2 * heads * w
            kept += swapped + own * inner * n if cp.size > 1 else 0
        return Cost(
            kept=kept,
            passing=every * heads * CHUNK * 4,  # decays between the tokens of a chunk
            calls=gather_cost(tp, part * hidden * n, "delta net tokens")
            + swap_cost(cp, swapped, "delta net heads")
            + swap_cost(cp, every * heads * shape.value_dim * n, "delta net outputs")
            + scatter_cost(tp, own * hidden * n, "delta net sums"),
        )

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens. A token asks a head's memory twice and writes to
        it once: 2 · key_dim · value_dim each."""
        own = tokens // self.groups.cp.size
        rule = 6 * tokens * self.share.core_heads * self.shape.key_dim * self.shape.value_dim
        return self.qkvbaz.flops(own) + self.conv.flops(tokens) + rule + self.o.flops(own)
