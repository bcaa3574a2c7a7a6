"""Latent attention (MLA, as in DeepSeek-V3), the layer `+`.

A token's keys and values all come from one latent vector, and one rotated key is shared by all heads:

    x ──► q latent ──► norm ──► q up ──► per head: plain part, rotated part
      ──► kv latent ─► norm ──► k up ──► per head: plain part            k = plain part, shared rotated part
      │                    └──► v up ──► per head: value
      ──► k rope ─────────────► rotated part, shared

Without `q_rank`, queries come from x itself. The three projections out of x that have no heads are one, `down`;
those into heads are ordered by head, so that a shard of the heads is one contiguous slice.

tp ranks share the heads. Each has all of `down` and maps its own tokens to latents; these are what is gathered,
and hidden channels only where there is no `q_rank`. cp ranks share the heads of their tp rank while these read,
so that each sees all tokens.

Generation keeps of a token the kv latent and the rotated key alone, and reads them as they are, as a single
key-value head: `k up` moves to the query's side of the product, `v up` behind the sum over tokens. That is the
absorbed form; it equals the plain one, costs more per pair of tokens and reads far less memory.

Shapes: B rows, T tokens, S of them that the tp ranks share (T / cp), t of this rank alone (S / tp), Z tokens so
far, C hidden channels, H heads of this tp rank, h of them that read on this rank, P channels of a head's plain
part, R of its rotated part, D = P + R, V of its value, E = P + V, L channels of the kv latent, W = L + R kept
of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_gather, all_to_all
from braid.kernels import rms_norm, rotary
from braid.kernels.attention import Attend, Spans, attend_cached, pairs_seen
from braid.kernels.rms_norm import Normalize
from braid.kernels.rotary import Turn
from braid.nn.canonical import Canonical, RowSpan, under
from braid.nn.cost import Cost, Portion, gather_cost, scatter_cost, swap_cost
from braid.nn.kv_cache import TokenStore
from braid.nn.linear import Linear, RowLinear
from braid.nn.norm import RmsNorm
from braid.nn.recompute import Recomputing
from braid.nn.rotary import Rotary, rotate


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """What is kept of the tokens so far."""

    latents: TokenStore
    """The kv latent after its norm, then the shared key after its rotation: [B, Z, 1, W]."""


class LatentAttention(Recomputing):
    """Projects to latents and from these to heads, lets the heads read, projects back."""

    def __init__(
        self,
        shape: architecture.LatentAttention,
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
        tp, q_rank = groups.tp, shape.q_rank or 0
        self.heads = shape.heads // tp.size
        """What this tp rank has of them."""
        assert shape.heads % (tp.size * groups.cp.size) == 0
        self.down = Linear(
            hidden, q_rank + shape.kv_rank + shape.rope_dim, copies=tp, device=device, dtype=dtype
        )
        normed = partial(RmsNorm, eps=eps, normalize=normalize, copies=tp, device=device, dtype=dtype)
        self.q_norm = normed(q_rank) if q_rank else None
        self.kv_norm = normed(shape.kv_rank)
        q_dim, kv_dim = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.v_dim
        self.q = Linear(q_rank or hidden, (self.heads, q_dim), device=device, dtype=dtype)
        self.kv_up = Linear(shape.kv_rank, (self.heads, kv_dim), device=device, dtype=dtype)
        self.o = RowLinear(self.heads * shape.v_dim, hidden, tp, device=device, dtype=dtype)

    def forward(self, x_BtC: Tensor, spans: Spans, rotary: Rotary, cache: LatentCache | None = None) -> Tensor:
        """`spans` and `rotary` (for rope_dim channels) are those of all T tokens. With a cache, which a process
        alone may have, each row of x goes on with the one document that the cache has of it: the first tokens
        are read in the plain form, later ones in the absorbed form."""
        cp = self.groups.cp
        assert cache is None or self.groups.tp.size == cp.size == 1
        q_BSHD, latent_BSL, k_BSR = self._latents(x_BtC)
        q_BThD = all_to_all(q_BSHD, cp, split=2, join=1)
        k_BT1R = rotate(all_gather(k_BSR, cp, dim=1).unsqueeze(2), rotary, self.turn)
        kept_BZ1W = None
        if cache is not None:
            kept_BZ1W = cache.latents.append(torch.cat([latent_BSL.unsqueeze(2), k_BT1R], -1))
        if kept_BZ1W is None or kept_BZ1W.shape[1] == k_BT1R.shape[1]:
            kv_BSHE = self.kv_up(latent_BSL).unflatten(-1, self.kv_up.dims)
            kv_BThE = all_to_all(kv_BSHE, cp, split=2, join=1)
            y_BThV = self.recomputed("core", partial(self._read, spans, rotary), q_BThD, kv_BThE, k_BT1R)
        else:
            y_BThV = self._read_absorbed(self._turned(q_BThD, rotary), kept_BZ1W)
        return self.o(all_to_all(y_BThV, cp, split=1, join=2).flatten(2))

    def _latents(self, x_BtC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, the kv latent and the shared key, nothing rotated yet."""
        shape = self.shape
        sizes = [shape.q_rank or 0, shape.kv_rank, shape.rope_dim]
        q_latent, latent_BtL, k_BtR = self.down(x_BtC).split(sizes, -1)
        q_from = x_BtC if self.q_norm is None else self.q_norm(q_latent)
        q_from, latent_BSL, k_BSR = self._gathered(q_from, self.kv_norm(latent_BtL), k_BtR)
        return self.q(q_from).unflatten(-1, self.q.dims), latent_BSL, k_BSR

    def _gathered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tokens of all tp ranks, in one message."""
        if self.groups.tp.size == 1:
            return tensors
        together = all_gather(torch.cat(tensors, -1), self.groups.tp, dim=1)
        return together.split([tensor.shape[-1] for tensor in tensors], -1)

    def _turned(self, q_BThD: Tensor, rotary: Rotary) -> Tensor:
        q_BThP, q_BThR = q_BThD.split([self.shape.nope_dim, self.shape.rope_dim], -1)
        return torch.cat([q_BThP, rotate(q_BThR, rotary, self.turn)], -1)

    def _read(self, spans: Spans, rotary: Rotary, q_BThD: Tensor, kv_BThE: Tensor, k_BT1R: Tensor) -> Tensor:
        """The plain form: every head has its keys and values written out. The shared key is turned already."""
        shape, q_BThD = self.shape, self._turned(q_BThD, rotary)
        k_BThP, v_BThV = kv_BThE.split([shape.nope_dim, shape.v_dim], -1)
        k_BThD = torch.cat([k_BThP, k_BT1R.expand(-1, -1, k_BThP.shape[2], -1)], -1)
        # What was widened is cut off here, so that nothing is copied behind the region.
        return self.attend(q_BThD, k_BThD, v_BThV, spans, shape.score_scale).contiguous()

    def _read_absorbed(self, q_BThD: Tensor, kept_BZ1W: Tensor) -> Tensor:
        """The absorbed form: heads read the latents of all tokens so far."""
        shape = self.shape
        up_HEL = self.kv_up.weight.unflatten(0, self.kv_up.dims)
        k_up_HPL, v_up_HVL = up_HEL.split([shape.nope_dim, shape.v_dim], 1)
        q_BThP, q_BThR = q_BThD.split([shape.nope_dim, shape.rope_dim], -1)
        q_BThL = torch.einsum("bthp,hpl->bthl", q_BThP, k_up_HPL)
        q_BThW = torch.cat([q_BThL, q_BThR], -1)
        latents_BZ1L = kept_BZ1W[..., : shape.kv_rank]
        y_BThL = attend_cached(q_BThW, kept_BZ1W, latents_BZ1L, scale=shape.score_scale)
        return torch.einsum("bthl,hvl->bthv", y_BThL, v_up_HVL)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> LatentCache:
        """A cache for so many rows, before their first token."""
        channels = self.shape.kv_rank + self.shape.rope_dim
        return LatentCache(latents=TokenStore.new(batch, 1, channels, device=device, dtype=dtype))

    def canonical(self) -> dict[str, Canonical]:
        shape = self.shape
        q_rank, kv_end = shape.q_rank or 0, (shape.q_rank or 0) + shape.kv_rank
        (_, q_dim), (_, kv_dim) = self.q.dims, self.kv_up.dims
        tensors: dict[str, Canonical] = {}
        if self.q_norm is not None:
            tensors |= under("q_down", "down", self.down.part((slice(0, q_rank),)))
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
        tensors |= under("q" if self.q_norm is None else "q_up", "q", self._part(self.q, 0, q_dim))
        tensors |= under("kv_down", "down", self.down.part((slice(q_rank, kv_end),)))
        tensors |= under("kv_norm", "kv_norm", self.kv_norm.canonical())
        tensors |= under("k_rope", "down", self.down.part((slice(kv_end, None),)))
        tensors |= under("k_up", "kv_up", self._part(self.kv_up, 0, shape.nope_dim))
        tensors |= under("v_up", "kv_up", self._part(self.kv_up, shape.nope_dim, kv_dim))
        return tensors | under("o", "o", self.o.canonical())

    def _part(self, linear: Linear, start: int, stop: int) -> dict[str, Canonical]:
        """Some channels of every head."""
        channels = stop - start
        span = RowSpan(self.groups.tp.rank * self.heads * channels, self.shape.heads * channels)
        return linear.part((slice(None), slice(start, stop)), span)

    def cost(self, portion: Portion) -> Cost:
        """The plain form, by SDPA. A CPU widens keys or values until both have as many channels."""
        shape, n, hidden = self.shape, portion.narrow, self.down.channels_in
        tp, cp = self.groups.tp, self.groups.cp
        every, own, part = portion.places(), portion.places(cp), portion.places(tp, cp)
        heads, q_rank = self.heads // cp.size, shape.q_rank or 0
        q_dim, kv_dim = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.v_dim
        q, kv, read = every * heads * q_dim * n, every * heads * kv_dim * n, own * self.heads * shape.v_dim * n
        norms = self.kv_norm.cost(portion, part)
        if self.q_norm is not None:
            norms += self.q_norm.cost(portion, part)
        # Norms read slices of what `down` gives.
        in_place = 0 if self.kv_norm.widens(portion) else part * shape.rope_dim * n
        latents = (q_rank or hidden) + shape.kv_rank
        if tp.size > 1 and portion.rows == 1:
            latents += shape.rope_dim  # gathered together, and then read in place
        elif tp.size == 1 and not q_rank:
            latents -= hidden
        kept = portion.normed(part * hidden * n, False) + norms.kept + in_place + own * latents * n
        normalizers = every * heads * portion.wide
        if portion.again("core"):
            kept += q + kv + every * shape.rope_dim * n + (read if cp.size > 1 else 0)
        elif portion.device == "cpu" and q_dim != shape.v_dim:
            kept += normalizers + 3 * every * heads * max(q_dim, shape.v_dim) * n
            kept += q + read if q_dim > shape.v_dim else kv + (read if cp.size > 1 else 0)
        else:
            kept += normalizers + 2 * q + kv + every * heads * shape.v_dim * n + (read if cp.size > 1 else 0)
        return Cost(
            kept=kept,
            passing=(3 if portion.device == "cuda" else 1) * q + kv,
            calls=gather_cost(tp, part * ((q_rank or hidden) + shape.kv_rank + shape.rope_dim) * n, "latents")
            + gather_cost(cp, own * shape.rope_dim * n, "latent attention, shared keys")
            + swap_cost(cp, q, "latent attention, queries")
            + swap_cost(cp, kv, "latent attention, keys and values")
            + swap_cost(cp, every * heads * shape.v_dim * n, "latent attention, outputs")
            + scatter_cost(tp, own * hidden * n, "latent attention, sums"),
        )

    def flops(self, tokens: int) -> int:
        """What this rank computes for a row of so many tokens, in the plain form. Scores and reads cost
        2 · heads · (D + V) for each pair of query and key that is seen; packed documents count as one document
        that fills the row."""
        shape, tp, cp = self.shape, self.groups.tp.size, self.groups.cp.size
        channels = shape.nope_dim + shape.rope_dim + shape.v_dim
        read = 2 * (self.heads // cp) * channels * pairs_seen(tokens, None)
        into_heads = sum(linear.flops(tokens // cp) for linear in (self.q, self.kv_up, self.o))
        return self.down.flops(tokens // (tp * cp)) + into_heads + read
