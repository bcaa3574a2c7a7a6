"""Grouped-query attention, the layer `*`.

Query, output gate, key and value come from one projection. Its outputs are ordered by key-value head: first
the query heads that this head serves, then their gates where there are any, then its key, then its value. A
shard of the heads is then one contiguous slice.

Shapes: B rows, T tokens, S tokens so far, C hidden channels, Q query heads, K key-value heads, D head channels.
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
class AttentionCache:
    """Keys and values of the tokens so far, of all of them even where a window is narrower."""

    keys: TokenStore
    values: TokenStore


class Attention(nn.Module):
    """Projects to heads, lets them read, projects back."""

    def __init__(
        self,
        shape: architecture.Attention,
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
        repeats = shape.heads // shape.kv_heads
        self.parts = {"q": repeats, "gate": repeats if shape.gate else 0, "k": 1, "v": 1}
        outputs = (shape.kv_heads, sum(self.parts.values()), shape.head_dim)
        self.qkv = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.o = Linear(
            shape.heads * shape.head_dim, hidden, bias=shape.bias, fill="residual", device=device, dtype=dtype
        )
        self.q_norm = RmsNorm(shape.head_dim, eps, device=device, dtype=dtype) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, eps, device=device, dtype=dtype) if shape.qk_norm else None

    def forward(
        self, x_BTC: Tensor, spans: Spans, rotary: Rotary | None, cache: AttentionCache | None = None
    ) -> Tensor:
        """`spans` and `rotary` are those of the tokens in x; `rotary` is None for attention without positions.
        With a cache, each row of x goes on with the one document that the cache has of it."""
        q_BTQD, gate_BTQD, k_BTKD, v_BTKD = self._heads(x_BTC)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTQD, k_BTKD = self.q_norm(q_BTQD), self.k_norm(k_BTKD)
        if rotary is not None:
            q_BTQD, k_BTKD = rotate(q_BTQD, rotary), rotate(k_BTKD, rotary)
        y_BTQD = self._read(q_BTQD, k_BTKD, v_BTKD, spans, cache)
        if self.shape.gate:
            y_BTQD = y_BTQD * gate_BTQD.sigmoid()
        return self.o(y_BTQD.flatten(2))

    def _heads(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, gates (none of them where attention has no gate), keys and values."""
        outputs = self.qkv(x_BTC).unflatten(-1, self.qkv.weight.shape[:-1])
        q, gate, k, v = (part.flatten(2, 3) for part in outputs.split(list(self.parts.values()), -2))
        return q, gate, k, v

    def _read(
        self, q_BTQD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, spans: Spans, cache: AttentionCache | None
    ) -> Tensor:
        if cache is None:
            return self.attend(q_BTQD, k_BTKD, v_BTKD, spans)
        k_BSKD, v_BSKD = cache.keys.append(k_BTKD), cache.values.append(v_BTKD)
        if k_BSKD.shape[1] == k_BTKD.shape[1]:
            return self.attend(q_BTQD, k_BTKD, v_BTKD, spans)
        return attend_cached(q_BTQD, k_BSKD, v_BSKD, window=self.shape.window)

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionCache:
        """A cache for so many rows, before their first token."""
        dims = (batch, self.shape.kv_heads, self.shape.head_dim)
        return AttentionCache(
            keys=TokenStore.new(*dims, device=device, dtype=dtype),
            values=TokenStore.new(*dims, device=device, dtype=dtype),
        )

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        start = 0
        for name, count in self.parts.items():
            if count:
                tensors |= under(name, "qkv", self.qkv.part((slice(None), slice(start, start + count))))
            start += count
        tensors |= under("o", "o", self.o.canonical())
        if self.q_norm is not None and self.k_norm is not None:
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
            tensors |= under("k_norm", "k_norm", self.k_norm.canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        """Scores and reads cost 4 · heads · head_dim for each pair of query and key that is seen; packed
        documents count as one document that fills the row."""
        pairs = pairs_seen(tokens, self.shape.window)
        read = 4 * self.shape.heads * self.shape.head_dim * pairs
        return self.qkv.flops(tokens) + read + self.o.flops(tokens)
