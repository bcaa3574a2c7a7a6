"""A block: the unit of scheduling, and the phases in which it runs.

    mix ──► dispatch ──► experts ──► combine ──► post

`mix` runs every layer up to a closing MoE, and of that its norm, router and shared expert. `dispatch` brings
tokens to their experts, `experts` computes, `combine` brings results back, and `post` sums them for each token
and takes them into the residual stream. A block without MoE does all its work in `mix`; the other phases pass
on what they are given. `forward` is the phases in order: there is no other path.

Between blocks a rank holds t of the T tokens of its rows; what leaves it in `dispatch` and returns in `combine`
is up to the dispatcher.

Shapes: B rows, t tokens of this rank, N = B · t, C hidden channels, S slots of a token, or streams. What is
called `stream` is the residual stream, of shape BtC, or BtSC where hyper-connections make several of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from braid import architecture, pattern
from braid.distributed.collectives import Groups
from braid.kernels import Kernels
from braid.kernels.hyper_connection import Ways
from braid.model.context import Context
from braid.model.declaration import LAYER_NAMES
from braid.model.streams import connection_of
from braid.nn.attention import Attention
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Portion, sent_again
from braid.nn.delta_net import DeltaNet
from braid.nn.dropout import dropout
from braid.nn.hyper_connection import HyperConnection, deviation
from braid.nn.latent_attention import LatentAttention
from braid.nn.mamba2 import Mamba2
from braid.nn.mlp import Mlp
from braid.nn.moe.balance import examine
from braid.nn.moe.dispatch_plan import Dispatcher, DispatchPlan
from braid.nn.moe.layer import ONCE, Moe
from braid.nn.moe.routing import Routing
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.recompute import Recomputing
from braid.pattern import Kind, Layer

Mixer = Attention | LatentAttention | Mamba2 | DeltaNet
Inner = Mixer | Mlp | Moe


class Flow(NamedTuple):
    """The tensors that cross from one phase to the next; all but the first exist only before the end of a MoE
    block."""

    stream: Tensor
    rows: Tensor | None = None
    """What experts read or wrote, as it leaves and returns."""
    probs: Tensor | None = None
    """The probability of each row, until experts have used it."""
    shared_BtC: Tensor | None = None
    """The shared expert's output, where there is one."""
    post_NS: Tensor | None = None
    """With hyper-connections: how a result is shared out among streams,"""
    res_NSS: Tensor | None = None
    """and how these mix."""


class PreNorm(nn.Module):
    """A layer and what stands before it: a norm, and a hyper-connection where there are several streams."""

    def __init__(
        self, before: RmsNorm | LayerNorm, inner: Inner, connection: HyperConnection | None = None
    ) -> None:
        super().__init__()
        self.norm = before
        self.inner = inner
        self.connection = connection


class Block(Recomputing):
    """The layers of one `pattern.Block`. Each phase but `combine` is a region that can be recomputed."""

    def __init__(
        self,
        block: pattern.Block,
        shape: architecture.Model,
        kernels: Kernels,
        dispatcher: Dispatcher | None = None,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.groups = groups
        self.streams = 1 if shape.hyper is None else shape.hyper.streams
        self.hyper = shape.hyper is not None
        self.closes = True
        """Whether the streams behind it are kept, where hyper-connections are recomputed."""
        self.dropout = shape.dropout
        self.layers = nn.ModuleDict()
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        for layer in block.layers:
            normalize = kernels.rms_norm.function
            before = norm(shape.norm, shape.hidden, shape.norm_eps, normalize, copies=groups.tp, **on)
            inner = _layer(layer, shape, kernels, dispatcher, {"groups": groups, **on})
            ways = connection_of(shape, kernels, {"groups": groups, **on})
            self.layers[LAYER_NAMES[layer.kind]] = PreNorm(before, inner, ways)

    def forward(self, stream: Tensor, context: Context) -> Tensor:
        flow = self.mix(stream, context)
        flow = self.dispatch(flow, context)
        flow = self.experts(flow, context)
        flow = self.combine(flow, context)
        return self.post(flow, context)

    # ------------------------------------------------------------------------------------- phases

    def mix(self, stream: Tensor, context: Context) -> Flow:
        dispatch_plans: list[DispatchPlan] = []
        flow, routing = self.recomputed("block", partial(self._mixed, context, dispatch_plans), stream)
        if routing is None and self.closes:
            self.kept(flow.stream)  # what the next block is given
        if routing is not None:
            layer = self.block.layers[-1]
            moe, tokens, earlier_E = self._moe(layer), context.tokens(layer), context.earlier_E.get(layer)
            if context.recording is not None:
                context.recording.write(tokens, routing.choice)
            (context.dispatch_plans[layer],) = dispatch_plans
            context.balances[layer] = examine(routing, moe.shape, tokens, earlier_E, self.groups)
        return flow

    def dispatch(self, flow: Flow, context: Context) -> Flow:
        if flow.rows is None or flow.probs is None:
            return flow
        layer = self.block.layers[-1]
        moe, dispatch_plans = self._moe(layer), [context.dispatch_plans[layer]]
        rows, probs = self.recomputed("block", partial(_sent, moe, dispatch_plans), flow.rows, flow.probs)
        context.dispatch_plans[layer] = dispatch_plans[-1]
        return flow._replace(rows=rows, probs=probs)

    def experts(self, flow: Flow, context: Context) -> Flow:
        if flow.rows is None or flow.probs is None:
            return flow
        layer = self.block.layers[-1]
        visit = partial(self._moe(layer).visit, dispatch_plan=context.dispatch_plans[layer])
        return flow._replace(rows=self.recomputed("block", visit, flow.rows, flow.probs), probs=None)

    def combine(self, flow: Flow, context: Context) -> Flow:
        if flow.rows is None:
            return flow
        layer = self.block.layers[-1]
        return flow._replace(rows=self._moe(layer).dispatcher.combine(flow.rows, context.dispatch_plans[layer]))

    def post(self, flow: Flow, context: Context) -> Tensor:
        if flow.rows is None:
            return flow.stream
        layer = self.block.layers[-1]
        y_NC = self._moe(layer).unpack(flow.rows, context.dispatch_plans[layer])
        y_BtC = y_NC.view(*flow.stream.shape[:2], flow.stream.shape[-1])
        if flow.shared_BtC is not None:
            y_BtC = y_BtC + flow.shared_BtC
        stream = self._leave(flow, y_BtC, layer, context)
        if self.closes:
            self.kept(stream)
        return stream

    # -------------------------------------------------------------------------------------- parts

    def _mixed(
        self, context: Context, dispatch_plans: list[DispatchPlan], stream: Tensor
    ) -> tuple[Flow, Routing | None]:
        """All of `mix` but what is written down. The dispatch plan is left in the list, where it is found
        again."""
        for layer in self.block.layers:
            branch_BtC, flow = self._enter(stream, layer, context)
            normed_BtC = self.recomputed("norm", self._at(layer).norm, branch_BtC)
            if layer.kind is Kind.MOE:
                return self._routed(context, dispatch_plans, flow, normed_BtC)
            y_BtC = _computed(self._at(layer).inner, normed_BtC, layer, context)
            stream = self._leave(flow, y_BtC, layer, context)
        return Flow(stream), None

    def _routed(
        self, context: Context, dispatch_plans: list[DispatchPlan], flow: Flow, normed_BtC: Tensor
    ) -> tuple[Flow, Routing]:
        layer, normed_NC = self.block.layers[-1], normed_BtC.flatten(0, 1)
        moe, tokens = self._moe(layer), context.tokens(layer)
        replayed = None if context.replay is None else context.replay.read(tokens)
        routing = moe.router(normed_NC, tokens, replayed)
        if not dispatch_plans:
            dispatch_plans.append(moe.dispatch_plan(routing, tokens, replayed=replayed is not None))
        rows, probs = moe.pack(normed_NC, routing.probs_NS, dispatch_plans[0])
        return flow._replace(rows=rows, probs=probs, shared_BtC=moe.shared_output(normed_BtC)), routing

    def _enter(self, stream: Tensor, layer: Layer, context: Context) -> tuple[Tensor, Flow]:
        """What a layer reads of the residual stream, and what stays to be joined by what it writes."""
        connection = self._at(layer).connection
        if connection is None:
            return stream, Flow(stream)
        branch_BtC, ways = self.recomputed("hyper", connection, stream)
        if context.deviations is not None:
            context.deviations[layer] = deviation(ways.res_NSS)
        return branch_BtC, Flow(ways.through_NSC.view_as(stream), post_NS=ways.post_NS, res_NSS=ways.res_NSS)

    def _leave(self, flow: Flow, y_BtC: Tensor, layer: Layer, context: Context) -> Tensor:
        """A layer's output joins the residual stream."""
        if self.dropout and context.batch.training:
            y_BtC = y_BtC * self.recomputed("block", partial(self._scale, layer, context, y_BtC.shape[-1]))
        connection = self._at(layer).connection
        if connection is None:
            return flow.stream + y_BtC
        assert flow.post_NS is not None
        assert flow.res_NSS is not None
        join = partial(self.recomputed, "hyper", partial(_joined, connection))
        return self.recomputed("block", join, flow.stream, flow.post_NS, flow.res_NSS, y_BtC)

    def _scale(self, layer: Layer, context: Context, channels: int) -> Tensor:
        """What dropout makes of ones, and multiplies everything with."""
        keep_BtC = context.keep_mask(layer, self.dropout, channels)
        return dropout(torch.ones_like(keep_BtC, dtype=context.dtype), keep_BtC, self.dropout)

    def _at(self, layer: Layer) -> PreNorm:
        return cast(PreNorm, self.layers[LAYER_NAMES[layer.kind]])

    def _moe(self, layer: Layer) -> Moe:
        return cast(Moe, self._at(layer).inner)

    # -------------------------------------------------------------------------------------- facts

    def mixers(self) -> Iterator[tuple[Layer, Mixer]]:
        """The layers that move information between tokens, and so remember some of it in generation."""
        for layer in self.block.layers:
            inner = self._at(layer).inner
            if not isinstance(inner, Mlp | Moe):
                yield layer, inner

    def moe(self) -> tuple[Layer, Moe] | None:
        """The layer of experts that closes the block, where there is one."""
        last = self.block.layers[-1]
        return (last, self._moe(last)) if last.kind is Kind.MOE else None

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for name, module in self.layers.items():
            pre_norm = cast(PreNorm, module)
            tensors |= under(f"{name}.norm", f"layers.{name}.norm", pre_norm.norm.canonical())
            tensors |= under(name, f"layers.{name}.inner", pre_norm.inner.canonical())
            if pre_norm.connection is not None:
                at = f"layers.{name}.connection"
                tensors |= under(f"{name}.connection", at, pre_norm.connection.canonical())
        return tensors

    def cost(self, portion: Portion, *, given: bool = True) -> Cost:
        """Of all its layers and what stands before them. The stream between layers and its gradient pass by,
        and so does what is made again. `given` says whether the stream before it is kept, where
        hyper-connections are made again."""
        everything = replace(portion, recompute=frozenset())
        every, costs, dropped = Cost(), Cost(), list[int]()
        for layer in self.block.layers:
            kept, own = (self._layer_cost(layer, each) for each in (everything, portion))
            every, costs = every + kept, costs + own
            dropped.append(kept.kept - own.kept)
        again = max(dropped) if portion.fine and self.moe() is not None else sum(dropped)
        one = portion.places(self.groups.tp_cp) * self._at(self.block.layers[0]).norm.channels * portion.narrow
        stream = one * self.streams
        if portion.again("block"):
            costs = self._recomputed_cost(portion, every, stream, one)
            again = every.kept - costs.kept
        elif portion.again("hyper") and self.hyper:
            costs += Cost(kept=stream if given else 0)
            again = portion.span * (every.kept - costs.kept)
        return replace(costs, passing=costs.passing + again + 2 * stream)

    def _layer_cost(self, layer: Layer, portion: Portion) -> Cost:
        pre_norm, tokens = self._at(layer), portion.places(self.groups.tp_cp)
        stream = tokens * pre_norm.norm.channels * portion.narrow
        norm, dropped = pre_norm.norm.cost(portion, tokens), Cost(kept=stream if self.dropout else 0)
        norm = replace(norm, kept=stream) if portion.again("norm") else norm
        cost = pre_norm.inner.cost(portion) + dropped
        if pre_norm.connection is None:
            return norm + cost
        if not portion.again("hyper"):
            return norm + cost + pre_norm.connection.cost(portion)
        # Of the way in nothing is kept, of the way out the layer's result.
        branch = 0 if pre_norm.norm.widens(portion) and not portion.again("norm") else stream
        return replace(norm, kept=norm.kept - branch) + cost + Cost(kept=stream)

    def _recomputed_cost(self, portion: Portion, every: Cost, stream: int, result: int) -> Cost:
        """The stream that the block is given, and what comes of its routing; with hyper-connections, what
        experts have returned."""
        found = self.moe()
        kept = stream if found is None else stream + found[1].block_cost(portion).kept
        if found is not None and self.hyper:
            kept += result
        return replace(every, kept=kept, calls=every.calls + sent_again(every.calls, *ONCE))

    def flops(self, tokens: int) -> int:
        layers = [self._at(layer) for layer in self.block.layers]
        connections = (each.connection.flops(tokens) for each in layers if each.connection is not None)
        return sum(each.inner.flops(tokens) for each in layers) + sum(connections)


def _joined(
    connection: HyperConnection, stream: Tensor, post_NS: Tensor, res_NSS: Tensor, y_BtC: Tensor
) -> Tensor:
    """The streams after a layer."""
    return connection.post(Ways(stream.flatten(0, 1), post_NS, res_NSS), y_BtC)


def _sent(moe: Moe, dispatch_plans: list[DispatchPlan], rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """What arrives of rows that leave by the first dispatch plan; the completed one is left behind it."""
    rows, probs, dispatch_plan = moe.dispatcher.dispatch(rows, probs, dispatch_plans[0])
    dispatch_plans[1:] = [dispatch_plan]
    return rows, probs


def _computed(inner: Inner, normed_BtC: Tensor, layer: Layer, context: Context) -> Tensor:
    """What a layer other than a MoE makes of its normed input."""
    cache = context.caches.get(layer)
    match inner:
        case Attention(shape=shape):
            rotary = None
            if shape.positions == "rope":
                rotary = context.rotary(shape.rope_dim, shape.rope_base, shape.rope_scaling)
            return inner(normed_BtC, context.spans(shape.window), rotary, cache)
        case LatentAttention(shape=shape):
            rotary = context.rotary(shape.rope_dim, shape.rope_base, shape.rope_scaling)
            return inner(normed_BtC, context.spans(None), rotary, cache)
        case Mamba2() | DeltaNet():
            return inner(normed_BtC, context.documents(), cache)
        case _:
            return inner(normed_BtC)


def _layer(
    layer: Layer,
    shape: architecture.Model,
    kernels: Kernels,
    dispatcher: Dispatcher | None,
    on: dict[str, Any],
) -> Inner:
    """The module of a layer. The plan has made sure that its shape is there."""
    hidden, eps, normalize = shape.hidden, shape.norm_eps, kernels.rms_norm.function
    match layer.kind:
        case Kind.ATTENTION if shape.attention and kernels.attention and kernels.rotary:
            attend, turn = kernels.attention.function, kernels.rotary.function
            return Attention(shape.attention, hidden, eps, attend, normalize=normalize, turn=turn, **on)
        case Kind.LATENT_ATTENTION if shape.latent_attention and kernels.attention and kernels.rotary:
            attend, turn = kernels.attention.function, kernels.rotary.function
            own = shape.latent_attention
            return LatentAttention(own, hidden, eps, attend, normalize=normalize, turn=turn, **on)
        case Kind.MAMBA2 if shape.mamba2 and kernels.ssd:
            return Mamba2(shape.mamba2, hidden, eps, kernels.ssd.function, **on)
        case Kind.DELTA_NET if shape.delta_net and kernels.delta_rule:
            rule = kernels.delta_rule.function
            return DeltaNet(shape.delta_net, hidden, eps, rule, normalize=normalize, **on)
        case Kind.MLP if shape.mlp:
            return Mlp(shape.mlp, hidden, **on)
        case Kind.MOE if shape.moe and kernels.grouped_mlp and kernels.permute:
            fast = (kernels.grouped_mlp.function, dispatcher, kernels.permute.function)
            return Moe(shape.moe, hidden, *fast, **on)
        case Kind.SPARSE_ATTENTION:
            raise ValueError(f"layer {layer.number} is 'D': sparse attention cannot be built")
        case kind:
            raise ValueError(f"layer {layer.number} is {kind.value!r}, but its shape is not set")
