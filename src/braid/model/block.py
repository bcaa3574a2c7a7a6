"""A block: the unit of scheduling, and the phases in which it runs.

    mix ──► dispatch ──► experts ──► combine

`mix` runs every layer up to a closing MoE, and of that its norm, router and shared expert. `dispatch` brings
tokens to their experts, `experts` computes, `combine` brings results back into the residual stream. A block
without MoE does all its work in `mix`; the other phases pass on what they are given. `forward` is the four
phases in order: there is no other path.

Shapes: B rows, T tokens, N = B · T, S slots of a token, M = N · S rows, C hidden channels.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from braid import architecture, pattern
from braid.kernels import Kernels
from braid.model.context import Context
from braid.nn.attention import Attention
from braid.nn.canonical import Canonical, under
from braid.nn.dropout import dropout
from braid.nn.mlp import Mlp
from braid.nn.moe.dispatch import combine, dispatch, order_by_expert
from braid.nn.moe.layer import Moe
from braid.nn.moe.router import count, load_balance
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.pattern import Kind, Layer

NAMES = MappingProxyType({Kind.ATTENTION: "attention", Kind.MLP: "mlp", Kind.MOE: "moe"})
"""The sub-tree of canonical names that each kind of layer has within its block."""


class Flow(NamedTuple):
    """The tensors that cross from one phase to the next; all but the first exist only before `combine` of
    a MoE block."""

    residual_BTC: Tensor
    routed: Tensor | None = None
    """What experts read or wrote: one entry per token before `dispatch`, one per row after it."""
    probs: Tensor | None = None
    """Probabilities: [N, S] before `dispatch`, [M] after it."""
    shared_BTC: Tensor | None = None
    """The shared expert's output, where there is one."""


class PreNorm(nn.Module):
    """A layer and the norm before it."""

    def __init__(self, before: RmsNorm | LayerNorm, inner: Attention | Mlp | Moe) -> None:
        super().__init__()
        self.norm = before
        self.inner = inner


class Block(nn.Module):
    """The layers of one `pattern.Block`."""

    def __init__(
        self,
        block: pattern.Block,
        shape: architecture.Model,
        kernels: Kernels,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.dropout = shape.dropout
        self.layers = nn.ModuleDict()
        for layer in block.layers:
            before = norm(shape.norm, shape.hidden, shape.norm_eps, device=device, dtype=dtype)
            inner = _layer(layer, shape, kernels, device, dtype)
            self.layers[NAMES[layer.kind]] = PreNorm(before, inner)

    def forward(self, x_BTC: Tensor, context: Context) -> Tensor:
        flow = self.mix(x_BTC, context)
        flow = self.dispatch(flow, context)
        flow = self.experts(flow, context)
        return self.combine(flow, context)

    # ------------------------------------------------------------------------------------- phases

    def mix(self, x_BTC: Tensor, context: Context) -> Flow:
        for layer in self.block.layers:
            if layer.kind is Kind.MOE:
                return self._route(x_BTC, layer, context)
            pre_norm = self._at(layer)
            normed_BTC = pre_norm.norm(x_BTC)
            if isinstance(pre_norm.inner, Attention):
                y_BTC = _attend(pre_norm.inner, normed_BTC, context)
            else:
                y_BTC = pre_norm.inner(normed_BTC)
            x_BTC = self._add(x_BTC, y_BTC, layer, context)
        return Flow(x_BTC)

    def dispatch(self, flow: Flow, context: Context) -> Flow:
        if flow.routed is None or flow.probs is None:
            return flow
        rows_MC, probs_M = dispatch(flow.routed, flow.probs, context.orders[self.block.layers[-1]])
        return flow._replace(routed=rows_MC, probs=probs_M)

    def experts(self, flow: Flow, context: Context) -> Flow:
        if flow.routed is None:
            return flow
        layer = self.block.layers[-1]
        y_MC = self._moe(layer).experts(flow.routed, flow.probs, context.orders[layer].counts_E)
        return flow._replace(routed=y_MC, probs=None)

    def combine(self, flow: Flow, context: Context) -> Tensor:
        if flow.routed is None:
            return flow.residual_BTC
        layer = self.block.layers[-1]
        y_BTC = combine(flow.routed, context.orders[layer]).view_as(flow.residual_BTC)
        if flow.shared_BTC is not None:
            y_BTC = y_BTC + flow.shared_BTC
        return self._add(flow.residual_BTC, y_BTC, layer, context)

    # -------------------------------------------------------------------------------------- parts

    def _route(self, x_BTC: Tensor, layer: Layer, context: Context) -> Flow:
        moe = self._moe(layer)
        normed_BTC = self._at(layer).norm(x_BTC)
        normed_NC = normed_BTC.flatten(0, 1)
        routing = moe.router(normed_NC)
        context.orders[layer] = order_by_expert(routing.experts_NS, moe.shape.experts)
        valid_N = context.valid_BT().flatten()
        counts_E = count(routing.experts_NS, valid_N, moe.shape.experts)
        context.expert_counts_E[layer] = counts_E
        if moe.shape.aux_loss:
            context.aux[layer] = moe.shape.aux_loss * load_balance(routing.shares_NE, counts_E, valid_N)
        shared_BTC = None if moe.shared is None else moe.shared(normed_BTC)
        return Flow(x_BTC, normed_NC, routing.probs_NS, shared_BTC)

    def _add(self, x_BTC: Tensor, y_BTC: Tensor, layer: Layer, context: Context) -> Tensor:
        """A layer's output joins the residual stream."""
        if self.dropout and context.batch.training:
            keep_BTC = context.keep_mask(layer, self.dropout, y_BTC.shape[-1])
            y_BTC = dropout(y_BTC, keep_BTC, self.dropout)
        return x_BTC + y_BTC

    def _at(self, layer: Layer) -> PreNorm:
        return cast(PreNorm, self.layers[NAMES[layer.kind]])

    def _moe(self, layer: Layer) -> Moe:
        return cast(Moe, self._at(layer).inner)

    # -------------------------------------------------------------------------------------- facts

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for name, module in self.layers.items():
            pre_norm = cast(PreNorm, module)
            tensors |= under(f"{name}.norm", f"layers.{name}.norm", pre_norm.norm.canonical())
            tensors |= under(name, f"layers.{name}.inner", pre_norm.inner.canonical())
        return tensors

    def flops(self, tokens: int) -> int:
        return sum(self._at(layer).inner.flops(tokens) for layer in self.block.layers)


def _attend(attention: Attention, normed_BTC: Tensor, context: Context) -> Tensor:
    shape = attention.shape
    rotary = context.rotary(shape.head_dim, shape.rope_base) if shape.positions == "rope" else None
    return attention(normed_BTC, context.spans(shape.window), rotary)


def _layer(
    layer: Layer,
    shape: architecture.Model,
    kernels: Kernels,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> Attention | Mlp | Moe:
    match layer.kind:
        case Kind.ATTENTION if shape.attention is not None:
            assert kernels.attention is not None
            attend = kernels.attention.function
            return Attention(shape.attention, shape.hidden, shape.norm_eps, attend, device=device, dtype=dtype)
        case Kind.MLP if shape.mlp is not None:
            return Mlp(shape.mlp, shape.hidden, device=device, dtype=dtype)
        case Kind.MOE if shape.moe is not None:
            assert kernels.grouped_mlp is not None
            return Moe(shape.moe, shape.hidden, kernels.grouped_mlp.function, device=device, dtype=dtype)
        case Kind.ATTENTION | Kind.MLP | Kind.MOE:
            raise ValueError(
                f"layer {layer.number} is {layer.kind.value!r}, but model.{NAMES[layer.kind]} is not set"
            )
        case _:
            raise ValueError(f"layer {layer.number} is {layer.kind.value!r}: this kind cannot be built yet")
