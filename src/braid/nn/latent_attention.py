"""Latent attention (MLA, as in DeepSeek-V3), the layer `+`.

A token's keys and values all come from one latent vector, and one rotated key is shared by all heads:

    x ──► q latent ──► norm ──► q up ──► per head: plain part, rotated part
      ──► kv latent ─► norm ──► k up ──► per head: plain part            k = plain part, shared rotated part
      │                    └──► v up ──► per head: value
      ──► k rope ─────────────► rotated part, shared

Without `q_rank`, queries come from x itself. The three projections out of x that have no heads are one, `down`;
those into heads are ordered by head, so that a shard of the heads is one contiguous slice.

Generation keeps of a token the kv latent and the rotated key alone, and reads them as they are, as a single
key-value head: `k up` moves to the query's side of the product, `v up` behind the sum over tokens. That is the
absorbed form; it equals the plain one, costs more per pair of tokens and reads far less memory.

Shapes: B rows, T tokens, S tokens so far, C hidden channels, H heads, P channels of a head's plain part, R of
its rotated part, D = P + R, V of its value, L channels of the kv latent, W = L + R kept of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.attention import Attend, Spans, attend_cached, pairs_seen
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear
from braid.nn.norm import RmsNorm
from braid.nn.rotary import Rotary, rotate
from braid.nn.token_store import TokenStore


@dataclass(frozen=True, kw_only=True)
class LatentCache:
    """What is kept of the tokens so far."""

    latents: TokenStore
    """The kv latent after its norm, then the shared key after its rotation: [B, S, 1, W]."""


class LatentAttention(nn.Module):
    """Projects to latents and from these to heads, lets the heads read, projects back."""

    def __init__(
        self,
        shape: architecture.LatentAttention,
        hidden: int,
        eps: float,
        attend: Attend,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.attend = attend
        q_rank, heads = shape.q_rank or 0, shape.heads
        self.down = Linear(hidden, q_rank + shape.kv_rank + shape.rope_dim, device=device, dtype=dtype)
        self.q_norm = RmsNorm(q_rank, eps, device=device, dtype=dtype) if q_rank else None
        self.kv_norm = RmsNorm(shape.kv_rank, eps, device=device, dtype=dtype)
        self.q = Linear(q_rank or hidden, (heads, shape.nope_dim + shape.rope_dim), device=device, dtype=dtype)
        self.kv_up = Linear(shape.kv_rank, (heads, shape.nope_dim + shape.v_dim), device=device, dtype=dtype)
        self.o = Linear(heads * shape.v_dim, hidden, fill="residual", device=device, dtype=dtype)

    def forward(self, x_BTC: Tensor, spans: Spans, rotary: Rotary, cache: LatentCache | None = None) -> Tensor:
        """`spans` and `rotary` (for rope_dim channels) are those of the tokens in x. With a cache, each row of
        x goes on with the one document that the cache has of it: the first tokens are read in the plain form,
        later ones in the absorbed form."""
        q_BTHD, latent_BTL, k_BT1R = self._latents(x_BTC, rotary)
        kept_BS1W = None
        if cache is not None:
            kept_BS1W = cache.latents.append(torch.cat([latent_BTL.unsqueeze(2), k_BT1R], -1))
        if kept_BS1W is None or kept_BS1W.shape[1] == x_BTC.shape[1]:
            y_BTHV = self._read(q_BTHD, latent_BTL, k_BT1R, spans)
        else:
            y_BTHV = self._read_absorbed(q_BTHD, kept_BS1W)
        return self.o(y_BTHV.flatten(2))

    def _latents(self, x_BTC: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ready to attend, the kv latent, the shared rotated key."""
        shape = self.shape
        sizes = [shape.q_rank or 0, shape.kv_rank, shape.rope_dim]
        q_latent, latent_BTL, k_BTR = self.down(x_BTC).split(sizes, -1)
        q_from = x_BTC if self.q_norm is None else self.q_norm(q_latent)
        q_BTHD = self.q(q_from).unflatten(-1, (shape.heads, shape.nope_dim + shape.rope_dim))
        q_BTHP, q_BTHR = q_BTHD.split([shape.nope_dim, shape.rope_dim], -1)
        q_BTHD = torch.cat([q_BTHP, rotate(q_BTHR, rotary)], -1)
        return q_BTHD, self.kv_norm(latent_BTL), rotate(k_BTR.unsqueeze(2), rotary)

    def _read(self, q_BTHD: Tensor, latent_BTL: Tensor, k_BT1R: Tensor, spans: Spans) -> Tensor:
        """The plain form: every head has its keys and values written out."""
        shape = self.shape
        heads = self.kv_up(latent_BTL).unflatten(-1, (shape.heads, shape.nope_dim + shape.v_dim))
        k_BTHP, v_BTHV = heads.split([shape.nope_dim, shape.v_dim], -1)
        k_BTHD = torch.cat([k_BTHP, k_BT1R.expand(-1, -1, shape.heads, -1)], -1)
        return self.attend(q_BTHD, k_BTHD, v_BTHV, spans, shape.score_scale)

    def _read_absorbed(self, q_BTHD: Tensor, kept_BS1W: Tensor) -> Tensor:
        """The absorbed form: heads read the latents of all tokens so far."""
        shape = self.shape
        k_up_HPL, v_up_HVL = self.kv_up.weight.split([shape.nope_dim, shape.v_dim], 1)
        q_BTHP, q_BTHR = q_BTHD.split([shape.nope_dim, shape.rope_dim], -1)
        q_BTHL = torch.einsum("bthp,hpl->bthl", q_BTHP, k_up_HPL)
        q_BTHW = torch.cat([q_BTHL, q_BTHR], -1)
        latents_BS1L = kept_BS1W[..., : shape.kv_rank]
        y_BTHL = attend_cached(q_BTHW, kept_BS1W, latents_BS1L, scale=shape.score_scale)
        return torch.einsum("bthl,hvl->bthv", y_BTHL, v_up_HVL)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> LatentCache:
        """A cache for so many rows, before their first token."""
        channels = self.shape.kv_rank + self.shape.rope_dim
        return LatentCache(latents=TokenStore.new(batch, 1, channels, device=device, dtype=dtype))

    def canonical(self) -> dict[str, Canonical]:
        shape, every = self.shape, slice(None)
        q_rank, kv_end = shape.q_rank or 0, (shape.q_rank or 0) + shape.kv_rank
        tensors: dict[str, Canonical] = {}
        if self.q_norm is not None:
            tensors |= under("q_down", "down", self.down.part((slice(0, q_rank),)))
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
        tensors |= under("q" if self.q_norm is None else "q_up", "q", self.q.canonical())
        tensors |= under("kv_down", "down", self.down.part((slice(q_rank, kv_end),)))
        tensors |= under("kv_norm", "kv_norm", self.kv_norm.canonical())
        tensors |= under("k_rope", "down", self.down.part((slice(kv_end, None),)))
        tensors |= under("k_up", "kv_up", self.kv_up.part((every, slice(0, shape.nope_dim))))
        tensors |= under("v_up", "kv_up", self.kv_up.part((every, slice(shape.nope_dim, None))))
        return tensors | under("o", "o", self.o.canonical())

    def flops(self, tokens: int) -> int:
        """Of the plain form. Scores and reads cost 2 · heads · (D + V) for each pair of query and key that is
        seen; packed documents count as one document that fills the row."""
        shape = self.shape
        channels = shape.nope_dim + shape.rope_dim + shape.v_dim
        read = 2 * shape.heads * channels * pairs_seen(tokens, None)
        return read + sum(linear.flops(tokens) for linear in (self.down, self.q, self.kv_up, self.o))
