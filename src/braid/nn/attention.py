"""Grouped-query attention, the layer `*`.

Query, key, value and output gate come from one projection. Its outputs are ordered by key-value head: first
the query heads that this head serves, then its key, its value, and the gates of those queries where there are
any. A shard of the heads is then one contiguous slice.

tp ranks share the heads, and cp ranks those of their tp rank, as `head_partition` has it: a group is a
key-value head with its queries.

    gather over tp     x_BtC to x_BSC, which is projected
    swap over cp       q, k and v from all heads of some tokens to some heads of all tokens, which then read
    swap over cp       back; the gates have stayed with their tokens
    scatter over tp    what `o` gives, y_BtC

Shapes: B rows, T tokens, S of them that the tp ranks share (T / cp), t of this rank alone (S / tp), Z tokens so
far, C hidden channels, K key-value heads and Q query heads of this tp rank, k and q of them that read on this
rank, D head channels, F channels of a key-value head with its queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_gather
from braid.kernels import rms_norm, rotary
from braid.kernels.attention import Attend, Spans, attend_cached, pairs_seen
from braid.kernels.rms_norm import Normalize
from braid.kernels.rotary import Turn
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Portion, gather_cost, scatter_cost, swap_cost
from braid.nn.head_partition import HeadPartition, Part
from braid.nn.kv_cache import TokenStore
from braid.nn.linear import Linear, RowLinear
from braid.nn.norm import RmsNorm
from braid.nn.recompute import Recomputing
from braid.nn.rotary import Rotary, rotate


@dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """Keys and values of the tokens so far, of all of them even where a window is narrower."""

    keys: TokenStore
    values: TokenStore


class Attention(Recomputing):
    """Projects to heads, lets them read, projects back."""

    def __init__(
        self,
        shape: architecture.Attention,
        hidden: int,
        eps: float,
        attend: Attend,
        *,
        normalize: Normalize = rms_norm.PLAIN,
        turn: Turn = rotary.PLAIN,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.attend, self.turn = attend, turn
        self.share = HeadPartition(all_groups=shape.kv_heads, all_heads=shape.heads, ranks=groups)
        dim, tp = shape.head_dim, groups.tp
        self.readers = (Part("q", dim), Part("k", dim, common=True), Part("v", dim, common=True))
        """What heads read with: it goes to where they see all tokens. Gates come after it, and stay."""
        self.parts = (*self.readers, Part("gate", dim)) if shape.gate else self.readers
        outputs = (self.share.groups, sum(self.share.sizes(self.parts)))
        self.qkv = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.o = RowLinear(self.share.heads * dim, hidden, tp, bias=shape.bias, device=device, dtype=dtype)
        normed = partial(RmsNorm, dim, eps, normalize=normalize, copies=tp, device=device, dtype=dtype)
        self.q_norm = normed() if shape.qk_norm else None
        self.k_norm = normed() if shape.qk_norm else None

    def forward(
        self, x_BtC: Tensor, spans: Spans, rotary: Rotary | None, cache: AttentionCache | None = None
    ) -> Tensor:
        """`spans` and `rotary` are those of all T tokens; `rotary` is None for attention without positions.
        With a cache, which a process alone may have, each row of x goes on with the one document that the
        cache has of it."""
        assert cache is None or self.groups.tp.size == self.groups.cp.size == 1
        outputs_BSKF = self.qkv(all_gather(x_BtC, self.groups.tp, dim=1)).unflatten(-1, self.qkv.dims)
        readers_BSKF, gate_BSKF = outputs_BSKF.tensor_split([sum(self.share.sizes(self.readers))], -1)
        core = partial(self._core, spans, rotary, cache)
        y_BTqD = self.recomputed("core", core, self.share.all_tokens(readers_BSKF, self.readers))
        y_BSQD = self.share.own_tokens(y_BTqD)
        if self.shape.gate:
            y_BSQD = self.recomputed("core", _gated, y_BSQD, gate_BSKF)
        return self.o(y_BSQD.flatten(2))

    def _core(
        self, spans: Spans, rotary: Rotary | None, cache: AttentionCache | None, readers_BTkF: Tensor
    ) -> Tensor:
        """What heads read, from the projections of all tokens."""
        q_BTkF, k_BTkD, v_BTkD = readers_BTkF.split(self.share.core_sizes(self.readers), -1)
        q_BTkgD = q_BTkF.unflatten(-1, (-1, self.shape.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTkgD, k_BTkD = self.q_norm(q_BTkgD), self.k_norm(k_BTkD)
        if rotary is not None:
            q_BTkgD, k_BTkD = (rotate(heads, rotary, self.turn) for heads in (q_BTkgD, k_BTkD))
        return self._read(q_BTkgD.flatten(2, 3), k_BTkD, v_BTkD, spans, cache)

    def _read(
        self, q_BTqD: Tensor, k_BTkD: Tensor, v_BTkD: Tensor, spans: Spans, cache: AttentionCache | None
    ) -> Tensor:
        if cache is None:
            return self.attend(q_BTqD, k_BTkD, v_BTkD, spans)
        k_BZkD, v_BZkD = cache.keys.append(k_BTkD), cache.values.append(v_BTkD)
        if k_BZkD.shape[1] == k_BTkD.shape[1]:
            return self.attend(q_BTqD, k_BTkD, v_BTkD, spans)
        return attend_cached(q_BTqD, k_BZkD, v_BZkD, window=self.shape.window)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionCache:
        """A cache for so many rows, before their first token."""
        dims = (batch, self.shape.kv_heads, self.shape.head_dim)
        return AttentionCache(
            keys=TokenStore.new(*dims, device=device, dtype=dtype),
            values=TokenStore.new(*dims, device=device, dtype=dtype),
        )

    def canonical(self) -> dict[str, Canonical]:
        share = self.share
        tensors: dict[str, Canonical] = {}
        for part, place in zip(self.parts, share.places(self.parts), strict=True):
            held = self.qkv.part((slice(None), place), share.span(part), share.copies(part))
            tensors |= under(part.name, "qkv", held)
        tensors |= under("o", "o", self.o.canonical())
        if self.q_norm is not None and self.k_norm is not None:
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
            tensors |= under("k_norm", "k_norm", self.k_norm.canonical())
        return tensors

    def cost(self, portion: Portion) -> Cost:
        """By SDPA. Values are read where the projection or the swap left them, and so keep all of it."""
        share, n, dim = self.share, portion.narrow, self.shape.head_dim
        tp, cp, hidden = self.groups.tp, self.groups.cp, self.qkv.channels_in
        every, own = portion.places(), portion.places(cp)
        readers = every * share.core_groups * sum(share.core_sizes(self.readers)) * n
        q, k, read = (
            every * share.core_heads * dim * n,
            every * share.core_groups * dim * n,
            own * share.heads * dim * n,
        )
        seen, projected = portion.normed(own * hidden * n, tp.size > 1), own * self.qkv.channels_out * n
        kept = seen + (readers if cp.size > 1 else projected)
        if portion.again("core"):
            kept += (read + (projected if self.shape.gate else 0)) if cp.size > 1 else 0
            return replace(self._cost(portion, readers, q), kept=kept)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.cost(portion, every * share.core_heads) + self.k_norm.cost(
                portion, every * share.core_groups
            )
            in_place = 0 if self.q_norm.widens(portion) else q + k  # without a copy to widen them
            kept += norms.kept - in_place + q + k
        elif self.shape.positions == "rope":
            kept += q + k
        elif share.core_groups > 1:
            kept += q
        kept += q + every * share.core_heads * portion.wide  # what was read, and the normalizer of each query
        kept += (read if cp.size > 1 else 0) + (2 * read if self.shape.gate else 0)
        return replace(self._cost(portion, readers, q), kept=kept)

    def _cost(self, portion: Portion, readers: int, q: int) -> Cost:
        """All but what is kept."""
        tp, cp, hidden, n = self.groups.tp, self.groups.cp, self.qkv.channels_in, portion.narrow
        own, part = portion.places(cp), portion.places(tp, cp)
        return Cost(
            # A GPU sums query gradients in float32, and has those of keys and values for every query head.
            passing=(5 if portion.device == "cuda" else 1) * q,
            calls=gather_cost(tp, part * hidden * n, "attention tokens")
            + swap_cost(cp, readers, "attention heads")
            + swap_cost(cp, q, "attention outputs")
            + scatter_cost(tp, own * hidden * n, "attention sums"),
        )

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens. Scores and reads cost 4 · heads · head_dim for
        each pair of query and key that is seen; packed documents count as one document that fills the row."""
        own = tokens // self.groups.cp.size
        pairs = pairs_seen(tokens, self.shape.window)
        read = 4 * self.share.core_heads * self.shape.head_dim * pairs
        return self.qkv.flops(own) + read + self.o.flops(own)


def _gated(y_BSQD: Tensor, gate_BSKF: Tensor) -> Tensor:
    return y_BSQD * gate_BSKF.reshape(y_BSQD.shape).sigmoid()
