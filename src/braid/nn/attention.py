"""Grouped-query attention, the layer `*`.

Query, key and value come from one projection. Its outputs are ordered by key-value head: first the query
heads that this head serves, then its key, then its value. A shard of the heads is then one contiguous slice.

Shapes: B rows, T tokens, C hidden channels, Q query heads, K key-value heads, R query heads per key-value
head, D head channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.kernels.attention import Attend, Spans
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear
from braid.nn.norm import RmsNorm
from braid.nn.rotary import Rotary, rotate


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
        self.repeats = shape.heads // shape.kv_heads
        outputs = (shape.kv_heads, self.repeats + 2, shape.head_dim)
        self.qkv = Linear(hidden, outputs, bias=shape.bias, device=device, dtype=dtype)
        self.o = Linear(
            shape.heads * shape.head_dim, hidden, bias=shape.bias, fill="residual", device=device, dtype=dtype
        )
        self.q_norm = RmsNorm(shape.head_dim, eps, device=device, dtype=dtype) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, eps, device=device, dtype=dtype) if shape.qk_norm else None

    def forward(self, x_BTC: Tensor, spans: Spans, rotary: Rotary | None) -> Tensor:
        """`rotary` is None for attention without positions."""
        q_BTQD, k_BTKD, v_BTKD = self.heads(x_BTC, rotary)
        y_BTQD = self.attend(q_BTQD, k_BTKD, v_BTKD, spans)
        return self.o(y_BTQD.flatten(2))

    def heads(self, x_BTC: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ready to attend."""
        shape = self.shape
        qkv = self.qkv(x_BTC).unflatten(-1, (shape.kv_heads, self.repeats + 2, shape.head_dim))
        q_BTKRD, k_BTK1D, v_BTK1D = qkv.split([self.repeats, 1, 1], -2)
        q_BTQD, k_BTKD, v_BTKD = q_BTKRD.flatten(2, 3), k_BTK1D.squeeze(-2), v_BTK1D.squeeze(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTQD, k_BTKD = self.q_norm(q_BTQD), self.k_norm(k_BTKD)
        if rotary is not None:
            q_BTQD, k_BTKD = rotate(q_BTQD, rotary), rotate(k_BTKD, rotary)
        return q_BTQD, k_BTKD, v_BTKD

    def canonical(self) -> dict[str, Canonical]:
        every, repeats = slice(None), self.repeats
        tensors = under("q", "qkv", self.qkv.part((every, slice(0, repeats))))
        tensors |= under("k", "qkv", self.qkv.part((every, repeats)))
        tensors |= under("v", "qkv", self.qkv.part((every, repeats + 1)))
        tensors |= under("o", "o", self.o.canonical())
        if self.q_norm is not None and self.k_norm is not None:
            tensors |= under("q_norm", "q_norm", self.q_norm.canonical())
            tensors |= under("k_norm", "k_norm", self.k_norm.canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        """Scores and reads cost 4 · heads · head_dim for each pair of query and key that is seen; packed
        documents count as one document that fills the row."""
        window = min(self.shape.window or tokens, tokens)
        pairs = tokens * window - window * window // 2
        return (
            self.qkv.flops(tokens) + self.o.flops(tokens) + 4 * self.shape.heads * self.shape.head_dim * pairs
        )
