"""A block: residual layers with their norms, run in phases that a schedule can overlap.

    x ← x + residual_scale · layer(norm(x))     for every layer of the block; with post-norm, norm(layer(x));
                                                with LayerScale (arXiv 2103.17239), its output · factors

    mix ──► dispatch ──► experts ──► combine ──► post

`mix` runs every layer up to a closing MoE, then the MoE's norm, router and shared expert. `dispatch` sends
tokens to their experts, `experts` runs the grouped GEMMs, `combine` returns the results, and `post` sums them
per token and adds them to the residual stream. A block without MoE does all its work in `mix`; its other phases
are the identity. `forward` runs the phases in order: eager and scheduled execution share one code path.

With sequence and context parallelism a rank holds t of the T tokens of its rows between layers. What it sends
in `dispatch` and receives in `combine` is up to the token dispatcher.

Shapes: B rows, t tokens of this rank, N = B · t, C hidden channels, S slots of a token, or streams. `stream` is
the residual stream: BtC, or BtSC with hyper-connections.
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
from braid.kernels.hyper_connection import PostInputs
from braid.kernels.precision import BlockKernels
from braid.model.context import StackContext
from braid.model.declaration import LAYER_NAMES
from braid.model.streams import build_connection
from braid.nn.attention import Attention
from braid.nn.canonical import Canonical, under
from braid.nn.cost import Cost, Workload, recomputed_calls
from braid.nn.delta_net import DeltaNet
from braid.nn.dropout import dropout
from braid.nn.hyper_connection import HyperConnection, deviation
from braid.nn.latent_attention import LatentAttention
from braid.nn.layer_scale import LayerScale
from braid.nn.mamba2 import Mamba2
from braid.nn.mlp import Mlp
from braid.nn.moe.balance import measure_balance
from braid.nn.moe.dispatch_plan import Dispatcher, DispatchPlan
from braid.nn.moe.layer import NOT_REPEATED, Moe
from braid.nn.moe.routing import Routing
from braid.nn.norm import LayerNorm, RmsNorm, norm
from braid.nn.precision import LossTally, amax_calls, set_precision, temporary_bytes
from braid.nn.recompute import Recomputing
from braid.nn.work import Work, moved
from braid.pattern import Kind, Layer
from braid.precision import Precision

Mixer = Attention | LatentAttention | Mamba2 | DeltaNet
Inner = Mixer | Mlp | Moe


class Flow(NamedTuple):
    """The tensors passed from one phase to the next. All but the stream belong to a MoE that is in progress."""

    stream: Tensor
    rows: Tensor | None = None
    """Inputs or outputs of experts, in the order in which they are sent."""
    probs: Tensor | None = None
    """The router probability of each row; experts consume it."""
    shared_BtC: Tensor | None = None
    """Output of the shared expert, if any."""
    post_NS: Tensor | None = None
    """Hyper-connections: weights that distribute the layer's output over streams."""
    res_NSS: Tensor | None = None
    """Hyper-connections: matrices that mix the streams."""


class PreNorm(nn.Module):
    """A layer with its norm, which stands before it or after it (`post`), factors on its output if there is
    LayerScale, and its hyper-connection if there are several residual streams."""

    def __init__(
        self,
        norm: RmsNorm | LayerNorm,
        inner: Inner,
        connection: HyperConnection | None = None,
        *,
        post: bool = False,
        scale: LayerScale | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.inner = inner
        self.connection = connection
        self.post = post
        self.scale = scale


class Block(Recomputing):
    """The layers of one `pattern.Block`. Every phase but `combine` can be recomputed."""

    def __init__(
        self,
        block: pattern.Block,
        shape: architecture.Trunk,
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
        self.saves_stream = True
        """Whether to save the output streams if hyper-connections are recomputed."""
        self.dropout, self.residual_scale = shape.dropout, shape.residual_scale
        self.is_quantised = False
        """Whether layers have products in low precision."""
        self.layers = nn.ModuleDict()
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        for layer in block.layers:
            normalize = kernels.rms_norm.function
            pre_norm = norm(shape.norm, shape.hidden, shape.norm_eps, normalize, copies=groups.tp, **on)
            inner = _build_layer(layer, shape, kernels, dispatcher, {"groups": groups, **on})
            connection = build_connection(shape, kernels, {"groups": groups, **on})
            scale = None
            if shape.layer_scale is not None:
                scale = LayerScale(shape.hidden, shape.layer_scale, copies=groups.tp, **on)
            post = shape.has_post_norm(layer)
            self.layers[LAYER_NAMES[layer.kind]] = PreNorm(pre_norm, inner, connection, post=post, scale=scale)

    def forward(self, stream: Tensor, context: StackContext) -> Tensor:
        flow = self.mix(stream, context)
        flow = self.dispatch(flow, context)
        flow = self.experts(flow, context)
        flow = self.combine(flow, context)
        return self.post(flow, context)

    # ------------------------------------------------------------------------------------- phases

    def mix(self, stream: Tensor, context: StackContext) -> Flow:
        dispatch_plans: list[DispatchPlan] = []
        flow, routing = self.recomputed("block", partial(self._mix_region, context, dispatch_plans), stream)
        if routing is None and self.saves_stream:
            self.save_output(flow.stream)
        if routing is not None:
            # Outside the region, so that a replay does not record or count the routing twice.
            layer = self.block.layers[-1]
            moe, tokens, earlier_E = self._moe(layer), context.tokens(layer), context.earlier_E.get(layer)
            if context.recording is not None:
                context.recording.write(tokens, routing.choice)
            (context.dispatch_plans[layer],) = dispatch_plans
            self.holds("block", *dispatch_plans)
            context.balances[layer] = measure_balance(routing, moe.shape, tokens, earlier_E, self.groups)
        return flow

    def dispatch(self, flow: Flow, context: StackContext) -> Flow:
        if flow.rows is None or flow.probs is None:
            return flow
        layer = self.block.layers[-1]
        moe, dispatch_plans = self._moe(layer), [context.dispatch_plans[layer]]
        dispatch = partial(_dispatch_rows, moe, dispatch_plans)
        rows, probs = self.recomputed("block", dispatch, flow.rows, flow.probs)
        context.dispatch_plans[layer] = dispatch_plans[-1]
        self.holds("block", dispatch_plans[-1])
        return flow._replace(rows=rows, probs=probs)

    def experts(self, flow: Flow, context: StackContext) -> Flow:
        if flow.rows is None or flow.probs is None:
            return flow
        layer = self.block.layers[-1]
        run_experts = partial(self._moe(layer).run_experts, dispatch_plan=context.dispatch_plans[layer])
        return flow._replace(rows=self.recomputed("block", run_experts, flow.rows, flow.probs), probs=None)

    def combine(self, flow: Flow, context: StackContext) -> Flow:
        if flow.rows is None:
            return flow
        layer = self.block.layers[-1]
        return flow._replace(rows=self._moe(layer).dispatcher.combine(flow.rows, context.dispatch_plans[layer]))

    def post(self, flow: Flow, context: StackContext) -> Tensor:
        if flow.rows is None:
            return flow.stream
        layer = self.block.layers[-1]
        y_NC = self._moe(layer).unpack(flow.rows, context.dispatch_plans[layer])
        y_BtC = y_NC.view(*flow.stream.shape[:2], flow.stream.shape[-1])
        if flow.shared_BtC is not None:
            y_BtC = y_BtC + flow.shared_BtC
        stream = self._add_to_stream(flow, y_BtC, layer, context)
        if self.saves_stream:
            self.save_output(stream)
        return stream

    # -------------------------------------------------------------------------------------- parts

    def _mix_region(
        self, context: StackContext, dispatch_plans: list[DispatchPlan], stream: Tensor
    ) -> tuple[Flow, Routing | None]:
        """The recomputable part of `mix`. The first run appends the dispatch plan to the list; a replay finds
        it there and need not exchange row counts again."""
        for layer in self.block.layers:
            branch_BtC, flow = self._branch_input(stream, layer, context)
            pre_norm, normed_BtC = self._pre_norm(layer), branch_BtC
            if not pre_norm.post:
                normed_BtC = self.recomputed("norm", pre_norm.norm, branch_BtC)
            elif layer.kind is Kind.MOE:
                # Outputs of a reduce-scatter make the stream strided by tokens: router and shared expert would
                # each save a copy of it.
                normed_BtC = branch_BtC.contiguous()
            if layer.kind is Kind.MOE:
                return self._route(context, dispatch_plans, flow, normed_BtC)
            y_BtC = _run_mixer_or_mlp(pre_norm.inner, normed_BtC, layer, context)
            stream = self._add_to_stream(flow, y_BtC, layer, context)
        return Flow(stream), None

    def _route(
        self, context: StackContext, dispatch_plans: list[DispatchPlan], flow: Flow, normed_BtC: Tensor
    ) -> tuple[Flow, Routing]:
        layer, normed_NC = self.block.layers[-1], normed_BtC.flatten(0, 1)
        moe, tokens = self._moe(layer), context.tokens(layer)
        replayed = None if context.replay is None else context.replay.read(tokens)
        routing = moe.router(normed_NC, tokens, replayed)
        if not dispatch_plans:
            dispatch_plans.append(moe.dispatch_plan(routing, tokens, replayed=replayed is not None))
        rows, probs = moe.pack(normed_NC, routing.probs_NS, dispatch_plans[0])
        return flow._replace(rows=rows, probs=probs, shared_BtC=moe.shared_output(normed_BtC)), routing

    def _branch_input(self, stream: Tensor, layer: Layer, context: StackContext) -> tuple[Tensor, Flow]:
        """The input of a layer's branch, and the residual that its output will be added to."""
        connection = self._pre_norm(layer).connection
        if connection is None:
            return stream, Flow(stream)
        branch_BtC, post_inputs = self.recomputed("hyper", connection, stream)
        if context.deviations is not None:
            context.deviations[layer] = deviation(post_inputs.res_NSS)
        streams_NSC, post_NS, res_NSS = post_inputs
        return branch_BtC, Flow(streams_NSC.view_as(stream), post_NS=post_NS, res_NSS=res_NSS)

    def _add_to_stream(self, flow: Flow, y_BtC: Tensor, layer: Layer, context: StackContext) -> Tensor:
        """Add a layer's output to the residual stream, after its norm (if post), dropout and scaling."""
        pre_norm = self._pre_norm(layer)
        if pre_norm.post:
            # No region: nothing saves the output of this norm, so a replay would save no memory.
            y_BtC = pre_norm.norm(y_BtC)
        if pre_norm.scale is not None:
            y_BtC = pre_norm.scale(y_BtC)
        if self.dropout and context.batch.training:
            # A region of its own: the mask can be recomputed without the layer.
            scale = partial(self._dropout_scale, layer, context, y_BtC.shape[-1])
            y_BtC = y_BtC * self.recomputed("block", scale)
        connection = pre_norm.connection
        if connection is None:
            return torch.add(flow.stream, y_BtC, alpha=self.residual_scale)
        assert flow.post_NS is not None
        assert flow.res_NSS is not None
        post = partial(self.recomputed, "hyper", partial(_hyper_post, connection))
        return self.recomputed("block", post, flow.stream, flow.post_NS, flow.res_NSS, y_BtC)

    def _dropout_scale(self, layer: Layer, context: StackContext, channels: int) -> Tensor:
        """The dropout mask as factors 0 and 1 / (1 - rate)."""
        keep_BtC = context.keep_mask(layer, self.dropout, channels)
        return dropout(torch.ones_like(keep_BtC, dtype=context.dtype), keep_BtC, self.dropout)

    def _pre_norm(self, layer: Layer) -> PreNorm:
        return cast(PreNorm, self.layers[LAYER_NAMES[layer.kind]])

    def _moe(self, layer: Layer) -> Moe:
        return cast(Moe, self._pre_norm(layer).inner)

    def set_precision(self, precision: Precision, tally: LossTally, kernels: BlockKernels | None) -> None:
        """Quantise the products of all layers, from the next forward on."""
        self.is_quantised = True
        for layer in self.block.layers:
            set_precision(self._pre_norm(layer).inner, precision, self.groups, tally, kernels)

    # --------------------------------------------------------------------- introspection and cost

    def mixers(self) -> Iterator[tuple[Layer, Mixer]]:
        """The layers that mix tokens (attention, Mamba-2, delta net), which need a cache in generation."""
        for layer in self.block.layers:
            inner = self._pre_norm(layer).inner
            if not isinstance(inner, Mlp | Moe):
                yield layer, inner

    def moe(self) -> tuple[Layer, Moe] | None:
        """The MoE layer that closes the block, if any."""
        last = self.block.layers[-1]
        return (last, self._moe(last)) if last.kind is Kind.MOE else None

    @property
    def form(self) -> tuple[object, ...]:
        """What the work and the cost of a block depend on, besides what all blocks of a model share."""
        layers = (self._pre_norm(layer) for layer in self.block.layers)
        return self.is_quantised, tuple((type(each.inner), each.inner.shape, each.post) for each in layers)

    def output_weights(self, layer: Layer) -> Iterator[Tensor]:
        """The weights that a layer's output meets: those of its norm, if it stands after the layer, and its
        LayerScale."""
        pre_norm = self._pre_norm(layer)
        if pre_norm.post:
            yield from pre_norm.norm.parameters()
        if pre_norm.scale is not None:
            yield from pre_norm.scale.parameters()

    def canonical(self) -> dict[str, Canonical]:
        tensors: dict[str, Canonical] = {}
        for name, module in self.layers.items():
            pre_norm = cast(PreNorm, module)
            tensors |= under(f"{name}.norm", f"layers.{name}.norm", pre_norm.norm.canonical())
            tensors |= under(name, f"layers.{name}.inner", pre_norm.inner.canonical())
            if pre_norm.scale is not None:
                tensors |= under(f"{name}.scale", f"layers.{name}.scale", pre_norm.scale.canonical())
            if pre_norm.connection is not None:
                at = f"layers.{name}.connection"
                tensors |= under(f"{name}.connection", at, pre_norm.connection.canonical())
        return tensors

    def cost(self, workload: Workload, *, input_saved: bool = True) -> Cost:
        """The cost of all layers. The stream, its gradient and recomputed activations are transient.
        `input_saved`: whether the input streams are saved, if hyper-connections are recomputed."""
        no_recompute = replace(workload, recompute=frozenset())
        full, costs, dropped = Cost(), Cost(), list[int]()
        for layer in self.block.layers:
            layer_full = layer_cost = self._layer_cost(layer, no_recompute)
            if workload.recompute:
                layer_cost = self._layer_cost(layer, workload)
            full, costs = full + layer_full, costs + layer_cost
            dropped.append(layer_full.kept - layer_cost.kept)
        recomputed = max(dropped) if workload.fine and self.moe() is not None else sum(dropped)
        channels = self._pre_norm(self.block.layers[0]).norm.channels
        one_stream = workload.local_tokens(self.groups.tp_cp) * channels * workload.narrow
        stream = one_stream * self.streams
        if workload.recomputes("block"):
            costs = self._recomputed_cost(workload, full, stream, one_stream)
            recomputed = full.kept - costs.kept
        elif workload.recomputes("hyper") and self.hyper:
            costs += Cost(kept=stream if input_saved else 0)
            recomputed = workload.span * (full.kept - costs.kept)
        scaled = one_stream if self.residual_scale != 1 else 0  # the gradient of a layer's output
        return replace(costs, passing=costs.passing + recomputed + 2 * stream + scaled)

    def _layer_cost(self, layer: Layer, workload: Workload) -> Cost:
        pre_norm, tokens = self._pre_norm(layer), workload.local_tokens(self.groups.tp_cp)
        if pre_norm.post:  # The layer reads the residual stream itself, which no norm can recompute.
            workload = replace(workload, recompute=workload.recompute - {"norm"})
        stream = tokens * pre_norm.norm.channels * workload.narrow
        norm, dropped = pre_norm.norm.cost(workload, tokens), Cost(kept=stream if self.dropout else 0)
        if workload.recomputes("norm"):
            norm = replace(norm, kept=stream, adopted=stream if pre_norm.norm.upcasts(workload) else 0)
        cost = self._with_precision(pre_norm.inner, workload) + dropped
        if pre_norm.scale is not None:
            cost += pre_norm.scale.cost(workload, tokens)
        if pre_norm.connection is None:
            return norm + cost
        if not workload.recomputes("hyper"):
            return norm + cost + pre_norm.connection.cost(workload)
        # The pre-mapping saves nothing, the post-mapping saves the layer's output.
        branch = 0 if pre_norm.norm.upcasts(workload) and not workload.recomputes("norm") else stream
        return replace(norm, kept=norm.kept - branch) + cost + Cost(kept=stream)

    def _with_precision(self, inner: Inner, workload: Workload) -> Cost:
        """The cost of a layer. In low precision: with what ranks tell each other about blocks that they share,
        and with what emulation takes."""
        if not self.is_quantised:
            return inner.cost(workload)
        tokens, rows = workload.local_tokens(self.groups.cp), 0
        if isinstance(inner, Moe):
            rows = inner.dispatched_rows(workload)
        calls = amax_calls(inner, tokens, rows, replayed=workload.recomputes("experts"))
        return inner.cost(workload) + Cost(calls=calls, passing=temporary_bytes(inner, tokens, rows, workload))

    def _recomputed_cost(self, workload: Workload, full: Cost, stream: int, result: int) -> Cost:
        """The cost if the whole block is recomputed: its input, the dispatch plan and what the balance losses
        need are saved; with hyper-connections or LayerScale also the experts' result."""
        found = self.moe()
        moe = Cost() if found is None else found[1].block_cost(workload)
        kept = stream + moe.kept
        if found is not None and (closing := self._pre_norm(found[0])).post:
            kept += closing.norm.cost(workload, workload.local_tokens(self.groups.tp_cp)).kept
        if found is not None and (scale := self._pre_norm(found[0]).scale) is not None:
            kept += scale.cost(workload, workload.local_tokens(self.groups.tp_cp)).kept
        if found is not None and self.hyper:
            kept += result
        calls = full.calls + recomputed_calls(full.calls, *NOT_REPEATED)
        return replace(full, kept=kept, staying=moe.staying, calls=calls)

    def flops(self, tokens: int) -> int:
        layers = [self._pre_norm(layer) for layer in self.block.layers]
        connections = (each.connection.flops(tokens) for each in layers if each.connection is not None)
        return sum(each.inner.flops(tokens) for each in layers) + sum(connections)

    def work(self, workload: Workload, load: float = 1.0) -> dict[str, Work]:
        """The work of each kind of phase; a block without MoE has only `mix`. The slowest rank of experts has
        `load` times the rows of balanced ones."""
        mix, tokens = Work(), workload.local_tokens(self.groups.tp_cp)
        for layer in self.block.layers:
            pre_norm = self._pre_norm(layer)
            if pre_norm.connection is not None:
                mix += pre_norm.connection.pre_work(workload)
            if not pre_norm.post:
                mix += pre_norm.norm.work(workload, tokens, "norm")
            added = self._add_work(pre_norm, workload, tokens)
            if isinstance(pre_norm.inner, Moe):
                phases = pre_norm.inner.work(workload, load)
                return {**phases, "mix": mix + phases["mix"], "post": phases["post"] + added}
            mix += pre_norm.inner.work(workload) + added
        return {"mix": mix}

    def _add_work(self, pre_norm: PreNorm, workload: Workload, tokens: int) -> Work:
        """Of `_add_to_stream`. Autograd adds the gradients of the residual stream and of the branch."""
        one, work = tokens * pre_norm.norm.channels * workload.narrow, Work()
        if pre_norm.post:
            work += pre_norm.norm.work(workload, tokens)
        if pre_norm.scale is not None:
            work += pre_norm.scale.work(workload, tokens)
        if self.dropout:
            work += moved(3 * one, 3 * one)
        if pre_norm.connection is not None:
            return work + pre_norm.connection.post_work(workload)
        scaled = 2 * one if self.residual_scale != 1 else 0
        return work + moved(3 * one, 3 * one + scaled, launches=(1, 2 if scaled else 1))


def _hyper_post(
    connection: HyperConnection, stream: Tensor, post_NS: Tensor, res_NSS: Tensor, y_BtC: Tensor
) -> Tensor:
    return connection.post(PostInputs(stream.flatten(0, 1), post_NS, res_NSS), y_BtC)


def _dispatch_rows(
    moe: Moe, dispatch_plans: list[DispatchPlan], rows: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Dispatch rows by the first plan of the list; the completed plan becomes the second."""
    rows, probs, dispatch_plan = moe.dispatcher.dispatch(rows, probs, dispatch_plans[0])
    dispatch_plans[1:] = [dispatch_plan]
    return rows, probs


def _run_mixer_or_mlp(inner: Inner, normed_BtC: Tensor, layer: Layer, context: StackContext) -> Tensor:
    cache = context.caches.get(layer)
    match inner:
        case Attention(shape=shape):
            rotary = None
            if shape.positions == "rope":
                rotary = context.rotary(shape.rope_dim, shape.rope_base, shape.rope_scaling)
            return inner(normed_BtC, context.spans(shape.window, causal=inner.causal), rotary, cache)
        case LatentAttention(shape=shape):
            rotary = context.rotary(shape.rope_dim, shape.rope_base, shape.rope_scaling)
            return inner(normed_BtC, context.spans(None, causal=inner.causal), rotary, cache)
        case Mamba2() | DeltaNet():
            return inner(normed_BtC, context.documents, cache)
        case _:
            return inner(normed_BtC)


def _build_layer(
    layer: Layer,
    shape: architecture.Trunk,
    kernels: Kernels,
    dispatcher: Dispatcher | None,
    on: dict[str, Any],
) -> Inner:
    """Build the module of a layer. `plan` has checked that its shape is set."""
    hidden, eps, normalize = shape.hidden, shape.norm_eps, kernels.rms_norm.function
    match layer.kind:
        case Kind.ATTENTION if shape.attention and kernels.attention and kernels.rotary:
            attend, turn = kernels.attention.function, kernels.rotary.function
            own = shape.attention.of_layer(layer.nth)
            more = {"normalize": normalize, "turn": turn, "causal": shape.causal, **on}
            return Attention(own, hidden, eps, attend, **more)
        case Kind.LATENT_ATTENTION if shape.latent_attention and kernels.attention and kernels.rotary:
            attend, turn = kernels.attention.function, kernels.rotary.function
            latent = shape.latent_attention
            more = {"normalize": normalize, "turn": turn, "causal": shape.causal, **on}
            return LatentAttention(latent, hidden, eps, attend, **more)
        case Kind.MAMBA2 if shape.mamba2 and kernels.ssd and kernels.causal_conv and kernels.gated_norm:
            conv, gate = kernels.causal_conv.function, kernels.gated_norm.function
            return Mamba2(shape.mamba2, hidden, eps, kernels.ssd.function, conv=conv, gate=gate, **on)
        case Kind.DELTA_NET if (
            shape.delta_net and kernels.delta_rule and kernels.causal_conv and kernels.gated_norm
        ):
            conv, gate = kernels.causal_conv.function, kernels.gated_norm.function
            return DeltaNet(
                shape.delta_net, hidden, eps, kernels.delta_rule.function, conv=conv, gate=gate, **on
            )
        case Kind.MLP if shape.mlp and kernels.glu:
            return Mlp(shape.mlp, hidden, kernels.glu.function, **on)
        case Kind.MOE if (
            shape.moe and kernels.grouped_mlp and kernels.permute and kernels.glu and kernels.router
        ):
            fast = (kernels.grouped_mlp.function, dispatcher, kernels.permute.function)
            return Moe(shape.moe, hidden, *fast, kernels.glu.function, kernels.router.function, **on)
        case Kind.SPARSE_ATTENTION:
            raise ValueError(f"layer {layer.number} is 'D': sparse attention is not implemented")
        case kind:
            raise ValueError(f"layer {layer.number} is {kind.value!r}, but the model has no shape for it")


class BlockCosts:
    """The cost of the blocks of a model for one micro-batch; equal blocks are counted once."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._known: dict[tuple[object, int, bool], Cost] = {}

    def of(self, block: Block, held: int, *, input_saved: bool) -> Cost:
        """That of one of the `held` blocks of a segment or an MTP depth, which a span does not exceed."""
        span = min(self.workload.span, max(held, 1))
        key = (block.form, span, input_saved)
        if key not in self._known:
            self._known[key] = block.cost(replace(self.workload, span=span), input_saved=input_saved)
        return self._known[key]
