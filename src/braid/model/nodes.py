"""Node-level forward: the computation of each phase of a pipeline schedule.

`run` executes one phase, as the `run` of a model executes one segment: with the same modules in the same order.
`model.declaration` declares phases and names the tensors they read and write. All other state of a micro-batch
is in its context, without autograd graphs, so that each phase has a graph of its own.

Shapes: B rows, t tokens of this rank, N = B · t, C hidden channels, S streams. `stream` is the residual stream:
BtC, or BtSC with hyper-connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from braid.model.block import Block, Flow
from braid.model.context import Context, StackContext
from braid.model.encoder import EncoderContext, EncoderModel
from braid.model.language import LanguageModel, Losses, sum_losses
from braid.model.mtp import Mtp, targets
from braid.schedule import Phase
from braid.schedule.phases import IN

Tensors = Mapping[str, Tensor]
AnyModel = LanguageModel | EncoderModel


def run(
    model: AnyModel, phase: Phase, context: StackContext, tensors: Tensors
) -> tuple[dict[str, Tensor], Losses | None]:
    """Run a phase on the tensors it reads. Returns the tensors it writes, and its losses if it has any."""
    inputs = tuple(tensors[name] for name in phase.reads)
    losses: Losses | None
    if phase.kind == "segment":
        assert len(model.segments) == 1, "a phase of kind `segment` does not say which segment it is"
        y, losses = _run_segments(model, context, tensors)
        return {} if y is None else dict.fromkeys(phase.writes, y), losses
    with model.save_hooks():
        if phase.block is not None:
            outputs, losses = _run_block_phase(model, phase, context, inputs)
        else:
            outputs, losses = _run_outer_phase(model, phase, context, inputs)
    return dict(zip(phase.writes, outputs, strict=True)), losses


def _run_segments(model: AnyModel, context: StackContext, tensors: Tensors) -> tuple[Tensor | None, Losses]:
    """All segments of a model. The first one of a language model reads the rows of modules."""
    if isinstance(model, EncoderModel):
        assert isinstance(context, EncoderContext)
        return model.run(model.segments, tensors.get(IN), context)
    assert isinstance(context, Context)
    rows = {name: tensor for name, tensor in tensors.items() if name != IN}
    return model.run(model.segments, tensors.get(IN), context, rows)


def weights_after_combine(model: AnyModel, phase: Phase) -> list[Tensor]:
    """The weights used after combine, if any: the up-projection of latent experts, a post-norm, LayerScale."""
    block = _block(model, phase) if phase.joins else None
    found = None if block is None else block.moe()
    if block is None or found is None:
        return []
    layer, moe = found
    up = [] if moe.latent is None else list(moe.latent.up.parameters())
    return up + list(block.output_weights(layer))


def weights_of_block(model: AnyModel, phase: Phase) -> list[Tensor]:
    """The parameters and buffers of a phase's block; those that are sharded now are left out."""
    block = _block(model, phase)
    return [each for each in (*block.parameters(), *block.buffers()) if not isinstance(each, DTensor)]


def detach_losses(losses: Losses) -> Losses:
    """Losses without graphs, to be kept after the phase's backward."""
    return replace(
        losses,
        loss_sum=losses.loss_sum.detach(),
        aux={name: value.detach() for name, value in losses.aux.items()},
        mtp=tuple((loss_sum.detach(), count) for loss_sum, count in losses.mtp),
    )


def merge_losses(model: AnyModel, pieces: Sequence[Losses]) -> Losses:
    """Merge the losses of all phases of a segment into those that `run` returns."""
    if len(pieces) == 1:
        return pieces[0]
    loss_sum, count = model.zero_loss()
    main_head = [piece for piece in pieces if not piece.mtp and not piece.balances]
    if main_head:
        loss_sum, count = main_head[0].loss_sum, main_head[0].token_count
    return Losses(
        loss_sum=loss_sum,
        token_count=count,
        aux=sum_losses([balance.losses for piece in pieces for balance in piece.balances.values()]),
        balances={layer: balance for piece in pieces for layer, balance in piece.balances.items()},
        mtp=tuple(each for piece in pieces for each in piece.mtp),
        mtp_weight=model.shape.mtp_loss if isinstance(model, LanguageModel) else 0.0,
    )


# ---------------------------------------------------------------------------------------------- blocks


def _run_block_phase(
    model: AnyModel, phase: Phase, context: StackContext, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Losses | None]:
    block = _block(model, phase)
    match phase.kind:
        case "block":
            (stream,) = inputs
            stream = block(stream, context)
            context.dispatch_plans.pop(block.block.layers[-1], None)
            return (stream,), _balance_losses(model, block, context)
        case "mix":
            (stream,) = inputs
            flow = block.mix(stream, context)
            return tuple(tensor for tensor in flow if tensor is not None), _balance_losses(
                model, block, context
            )
        case "dispatch":
            rows, probs = inputs
            flow = block.dispatch(Flow(_NO_STREAM, rows, probs), context)
            assert flow.rows is not None
            assert flow.probs is not None
            return (flow.rows, flow.probs), None
        case "experts":
            rows, probs = inputs
            flow = block.experts(Flow(_NO_STREAM, rows, probs), context)
            assert flow.rows is not None
            return (flow.rows,), None
        case "combine" if not phase.joins:
            (rows,) = inputs
            flow = block.combine(Flow(_NO_STREAM, rows), context)
            assert flow.rows is not None
            return (flow.rows,), None
        case kind:
            flow = _post_inputs(model, inputs)
            stream = block.post(block.combine(flow, context) if kind == "combine" else flow, context)
            del context.dispatch_plans[block.block.layers[-1]]
            return (stream,), None


def _post_inputs(model: AnyModel, inputs: tuple[Tensor, ...]) -> Flow:
    """The inputs of a phase that adds expert outputs to the residual stream: the stream, the rows, the shared
    expert's output if any, and with hyper-connections their mappings."""
    if model.shape.hyper is None:
        stream, rows, *shared = inputs
        return Flow(stream, rows, None, *shared)
    stream, rows, *shared, post_NS, res_NSS = inputs
    return Flow(stream, rows, None, shared[0] if shared else None, post_NS, res_NSS)


_NO_STREAM = torch.empty(0)
"""Placeholder for the residual stream in phases that do not read it."""


def _balance_losses(model: AnyModel, block: Block, context: StackContext) -> Losses | None:
    """The auxiliary losses of a block's router, if any. The context keeps them without a graph."""
    if block.moe() is None:
        return None
    layer = block.block.layers[-1]
    balance = context.balances[layer]
    aux = balance.losses
    balance = balance._replace(losses={name: value.detach() for name, value in aux.items()})
    context.balances[layer] = balance
    loss_sum, count = model.zero_loss()
    return Losses(loss_sum=loss_sum, token_count=count, aux=aux, balances={layer: balance})


# --------------------------------------------------------------------------------------- around blocks


def _run_outer_phase(
    model: AnyModel, phase: Phase, context: StackContext, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Losses | None]:
    if phase.kind == "pass":
        return inputs, None
    if isinstance(model, EncoderModel):
        assert isinstance(context, EncoderContext)
        return (_run_encoder_phase(model, phase, context, inputs),), None
    assert isinstance(context, Context)
    match phase.kind:
        case "embed":
            return (model.embed(context, dict(zip(phase.reads, inputs, strict=True))),), None
        case "enter":
            assert model.embedding is not None
            assert phase.depth is not None
            (before,), shifted = inputs, targets(context.batch, phase.depth)
            return (_mtp(model, phase).enter(before, model.embedding(shifted.tokens_BT)),), None
        case "final_norm":
            owner = model if phase.depth is None else _mtp(model, phase)
            return (owner.apply_final_norm(*inputs),), None
        case "head":
            return (), _head_losses(model, phase, context, *inputs)
        case kind:
            raise ValueError(f"unknown phase {kind!r}")


def _run_encoder_phase(
    model: EncoderModel, phase: Phase, context: EncoderContext, inputs: tuple[Tensor, ...]
) -> Tensor:
    match phase.kind:
        case "embed":
            return model.embed(context)
        case "final_norm":
            return model.apply_final_norm(*inputs)
        case "head":
            (hidden_1tC,) = inputs
            return model.project(hidden_1tC, context)
        case kind:
            raise ValueError(f"unknown phase {kind!r} of an encoder")


def _head_losses(model: LanguageModel, phase: Phase, context: Context, hidden_BtC: Tensor) -> Losses:
    batch = context.batch
    if phase.depth is None:
        loss_sum, count = model.head_loss(hidden_BtC, batch.labels_BT, batch.loss_mask_BT)
        return Losses(loss_sum=loss_sum, token_count=count, aux={}, balances={})
    shifted = targets(batch, phase.depth)
    mtp = model.head_loss(hidden_BtC, shifted.labels_BT, shifted.loss_mask_BT)
    loss_sum, count = model.zero_loss()
    weight = model.shape.mtp_loss / len(model.mtp)
    return Losses(loss_sum=loss_sum, token_count=count, aux={}, balances={}, mtp=(mtp,), mtp_weight=weight)


def _block(model: AnyModel, phase: Phase) -> Block:
    if isinstance(model, EncoderModel) or phase.depth is None:
        return cast(Block, model.stack.blocks[str(phase.block)])
    return cast(Block, _mtp(model, phase).blocks[str(phase.block)])


def _mtp(model: LanguageModel, phase: Phase) -> Mtp:
    return cast(Mtp, model.mtp[str(phase.depth)])
