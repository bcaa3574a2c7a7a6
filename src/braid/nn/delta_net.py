"""Gated delta net, the layer `G`: a mixer whose heads keep a memory that they correct, token by token.

Query, key, value and output gate z come from one projection, with two scalars per value head: how strongly a
token writes (b) and how much is forgotten (a). Its outputs are ordered by key head: query, key, then values,
gates and scalars of the value heads that this key head serves. The convolution's channels are ordered alike. A
shard of the key heads is then one contiguous slice of each.

Shapes: B rows, T tokens, C hidden channels, G key heads, R value heads per key head, H = G · R value heads,
K key channels, V value channels, J = 2K + RV convolved channels of a key head, P taps of the convolution,
Q = P - 1 tokens that it remembers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid import architecture
from braid.kernels.causal_conv import causal_conv
from braid.kernels.delta_rule import DeltaRule, step
from braid.nn.canonical import Canonical, under
from braid.nn.linear import Linear
from braid.nn.norm import RmsNorm


@dataclass(frozen=True, kw_only=True)
class DeltaNetCache:
    """What a layer remembers of B documents, one per row. `DeltaNet.forward` moves it on in place."""

    conv_BDQ: Tensor
    """The last tokens before the convolution, D = G · J channels."""
    state_BHKV: Tensor
    """The memories, float32 or better."""


class Heads(NamedTuple):
    """What the delta rule is given."""

    q_BTGK: Tensor
    k_BTGK: Tensor
    v_BTHV: Tensor
    log_decay_BTH: Tensor
    beta_BTH: Tensor


class DeltaNet(nn.Module):
    """Projects, convolves, applies the delta rule, norms and gates each head, projects back."""

    def __init__(
        self,
        shape: architecture.DeltaNet,
        hidden: int,
        eps: float,
        delta_rule: DeltaRule,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.delta_rule = delta_rule
        self.repeats = shape.value_heads // shape.key_heads
        values = self.repeats * shape.value_dim
        self.sizes = (shape.key_dim, shape.key_dim, values, values, self.repeats, self.repeats)
        self.convolved = sum(self.sizes[:3])
        self.qkvzba = Linear(hidden, (shape.key_heads, sum(self.sizes)), device=device, dtype=dtype)
        taps = (shape.key_heads, self.convolved, shape.conv)
        self.conv_GJP = nn.Parameter(torch.empty(taps, device=device, dtype=dtype))
        self.a_log_H = nn.Parameter(torch.empty(shape.value_heads, device=device, dtype=dtype))
        self.dt_bias_H = nn.Parameter(torch.empty(shape.value_heads, device=device, dtype=dtype))
        self.gate_norm = RmsNorm(shape.value_dim, eps, device=device, dtype=dtype)
        inner = shape.value_heads * shape.value_dim
        self.o = Linear(inner, hidden, fill="residual", device=device, dtype=dtype)

    def forward(
        self, x_BTC: Tensor, documents_BT: Tensor | None = None, cache: DeltaNetCache | None = None
    ) -> Tensor:
        """`documents_BT` is None where every row is a single document. With a cache, each row goes on with
        the document that the cache remembers."""
        assert documents_BT is None or cache is None, "a row that goes on from a cache is one document"
        heads, z_BTHV = self._heads(x_BTC, documents_BT, cache)
        if cache is None:
            y_BTHV, _ = self.delta_rule(*heads, documents_BT)
        else:
            y_BTHV = self._go_on(heads, cache)
        return self.o(self._gate(y_BTHV, z_BTHV).flatten(2))

    # -------------------------------------------------------------------------------------- parts

    def _heads(
        self, x_BTC: Tensor, documents_BT: Tensor | None, cache: DeltaNetCache | None
    ) -> tuple[Heads, Tensor]:
        """What the delta rule is given, and the gate on what it returns."""
        shape = self.shape
        projected = self.qkvzba(x_BTC).unflatten(-1, (shape.key_heads, sum(self.sizes)))
        qkv_BTGJ, z_BTGRV, b_BTGR, a_BTGR = projected.split([self.convolved, *self.sizes[3:]], -1)
        qkv_BTD, conv_BDQ = causal_conv(
            qkv_BTGJ.flatten(2),
            self.conv_GJP.flatten(0, 1),
            documents_BT=documents_BT,
            state_BCP=None if cache is None else cache.conv_BDQ,
        )
        if cache is not None and conv_BDQ is not None:
            cache.conv_BDQ.copy_(conv_BDQ.detach())
        qkv_BTGJ = F.silu(qkv_BTD).view_as(qkv_BTGJ)
        q_BTGK, k_BTGK, v_BTGRV = qkv_BTGJ.split(self.sizes[:3], -1)
        by_head = (shape.value_heads, shape.value_dim)
        heads = Heads(
            q_BTGK=q_BTGK,
            k_BTGK=k_BTGK,
            v_BTHV=v_BTGRV.flatten(2).unflatten(2, by_head),
            log_decay_BTH=self._log_decay(a_BTGR.flatten(2)),
            beta_BTH=b_BTGR.flatten(2).sigmoid(),
        )
        return heads, z_BTGRV.flatten(2).unflatten(2, by_head)

    def _log_decay(self, a_BTH: Tensor) -> Tensor:
        wide = torch.promote_types(a_BTH.dtype, torch.float32)
        rate_H = self.a_log_H.to(wide).exp()
        return -rate_H * F.softplus(a_BTH.to(wide) + self.dt_bias_H.to(wide))

    def _go_on(self, heads: Heads, cache: DeltaNetCache) -> Tensor:
        """The delta rule from the cache's memory on."""
        if heads.v_BTHV.shape[1] == 1:
            q_BGK, k_BGK, v_BHV, log_decay_BH, beta_BH = (x.squeeze(1) for x in heads)
            y_BHV, state_BHKV = step(q_BGK, k_BGK, v_BHV, log_decay_BH, beta_BH, cache.state_BHKV)
            y_BTHV = y_BHV.unsqueeze(1)
        else:
            y_BTHV, state_BHKV = self.delta_rule(*heads, initial_state_BHKV=cache.state_BHKV)
        cache.state_BHKV.copy_(state_BHKV.detach())
        return y_BTHV

    def _gate(self, y_BTHV: Tensor, z_BTHV: Tensor) -> Tensor:
        """norm(y) · silu(z), float32 or better inside."""
        wide = torch.promote_types(y_BTHV.dtype, torch.float32)
        return (self.gate_norm(y_BTHV.to(wide)) * F.silu(z_BTHV.to(wide))).to(y_BTHV.dtype)

    # -------------------------------------------------------------------------------------- facts

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> DeltaNetCache:
        """The cache of `batch` documents that have not begun."""
        shape = self.shape
        channels = shape.key_heads * self.convolved
        wide = torch.promote_types(dtype, torch.float32)
        memory = (batch, shape.value_heads, shape.key_dim, shape.value_dim)
        return DeltaNetCache(
            conv_BDQ=torch.zeros(batch, channels, shape.conv - 1, device=device, dtype=dtype),
            state_BHKV=torch.zeros(memory, device=device, dtype=wide),
        )

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        first = 0
        for name, size in zip("qkvzba", self.sizes, strict=True):
            place = (slice(None), slice(first, first + size))
            tensors |= under(name, "qkvzba", self.qkvzba.part(place))
            if name in "qkv":
                taps = (self.shape.key_heads * size, self.shape.conv)
                tensors[f"conv.{name}.weight"] = Canonical(
                    parameter="conv_GJP", shape=taps, fill="taps", index=place
                )
            first += size
        heads = (self.shape.value_heads,)
        tensors["A_log"] = Canonical(parameter="a_log_H", shape=heads, fill="decay_log")
        tensors["dt_bias"] = Canonical(parameter="dt_bias_H", shape=heads, fill="time_step")
        tensors |= under("gate_norm", "gate_norm", self.gate_norm.canonical())
        return tensors | under("o", "o", self.o.canonical())

    def flops(self, tokens: int) -> int:
        """A token asks a head's memory twice and writes to it once: 2 · key_dim · value_dim each."""
        shape = self.shape
        conv = 2 * tokens * self.conv_GJP.numel()
        rule = 6 * tokens * shape.value_heads * shape.key_dim * shape.value_dim
        return self.qkvzba.flops(tokens) + conv + rule + self.o.flops(tokens)
