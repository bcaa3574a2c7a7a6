"""The model in nodes: what each phase of a schedule computes.

`run` is to a phase what `LanguageModel.run` is to a segment, and calls the same parts of the same modules in
the same order. Phases are declared in `model.declaration`; tensors come and go under the names that they have
there. What else a micro-batch knows is in its context, none of it with a graph.

Shapes: B rows, t tokens of this rank, N = B · t, C hidden channels, S streams. What is called `stream` is the
residual stream: BtC, or BtSC with hyper-connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from braid.model.block import Block, Flow
from braid.model.context import Context
from braid.model.language import LanguageModel, Losses, summed_losses
from braid.model.mtp import Mtp, targets
from braid.schedule import Phase

Tensors = Mapping[str, Tensor]


def run(
    model: LanguageModel, phase: Phase, context: Context, tensors: Tensors
) -> tuple[dict[str, Tensor], Losses | None]:
    """From the tensors that a phase reads to those that it writes; and its losses, where it has any."""
    given = tuple(tensors[name] for name in phase.reads)
    losses: Losses | None
    if phase.kind == "segment":
        assert len(model.segments) == 1, "of several segments, a phase would have to say which"
        y, losses = model.run(model.segments, given[0] if given else None, context)
        return {} if y is None else dict.fromkeys(phase.writes, y), losses
    with model.watched():
        if phase.block is not None:
            written, losses = _of_block(model, phase, context, given)
        else:
            written, losses = _around_blocks(model, phase, context, given)
    return dict(zip(phase.writes, written, strict=True)), losses


def weights_that_join(model: LanguageModel, phase: Phase) -> list[Tensor]:
    """Those that sum what has returned from experts: the projection back from a latent, where there is one."""
    found = _block(model, phase).moe() if phase.joins else None
    if found is None or found[1].latent is None:
        return []
    return list(found[1].latent.up.parameters())


def without_graph(losses: Losses) -> Losses:
    """The same figures, to be kept after the phase that told them."""
    return replace(
        losses,
        loss_sum=losses.loss_sum.detach(),
        aux={name: value.detach() for name, value in losses.aux.items()},
        mtp=tuple((loss_sum.detach(), count) for loss_sum, count in losses.mtp),
    )


def whole(model: LanguageModel, pieces: Sequence[Losses]) -> Losses:
    """The losses of all phases of a segment, as `LanguageModel.run` would tell them."""
    if len(pieces) == 1:
        return pieces[0]
    loss_sum, count = model.zero_loss()
    head_loss = [piece for piece in pieces if not piece.mtp and not piece.balances]
    if head_loss:
        loss_sum, count = head_loss[0].loss_sum, head_loss[0].token_count
    return Losses(
        loss_sum=loss_sum,
        token_count=count,
        aux=summed_losses([balance.losses for piece in pieces for balance in piece.balances.values()]),
        balances={layer: balance for piece in pieces for layer, balance in piece.balances.items()},
        mtp=tuple(each for piece in pieces for each in piece.mtp),
        mtp_weight=model.shape.mtp_loss,
    )


# ---------------------------------------------------------------------------------------------- blocks


def _of_block(
    model: LanguageModel, phase: Phase, context: Context, given: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Losses | None]:
    block = _block(model, phase)
    match phase.kind:
        case "block":
            (stream,) = given
            stream = block(stream, context)
            context.dispatch_plans.pop(block.block.layers[-1], None)
            return (stream,), _balance(model, block, context)
        case "mix":
            (stream,) = given
            flow = block.mix(stream, context)
            return tuple(tensor for tensor in flow if tensor is not None), _balance(model, block, context)
        case "dispatch":
            rows, probs = given
            flow = block.dispatch(Flow(_NOBODY, rows, probs), context)
            assert flow.rows is not None
            assert flow.probs is not None
            return (flow.rows, flow.probs), None
        case "experts":
            rows, probs = given
            flow = block.experts(Flow(_NOBODY, rows, probs), context)
            assert flow.rows is not None
            return (flow.rows,), None
        case "combine" if not phase.joins:
            (rows,) = given
            flow = block.combine(Flow(_NOBODY, rows), context)
            assert flow.rows is not None
            return (flow.rows,), None
        case kind:
            flow = _returning(model, given)
            stream = block.post(block.combine(flow, context) if kind == "combine" else flow, context)
            del context.dispatch_plans[block.block.layers[-1]]
            return (stream,), None


def _returning(model: LanguageModel, given: tuple[Tensor, ...]) -> Flow:
    """What a phase that joins is given: the residual stream, rows, a shared expert's output where there is one,
    and with hyper-connections the ways between streams."""
    if model.shape.hyper is None:
        stream, rows, *shared = given
        return Flow(stream, rows, None, *shared)
    stream, rows, *shared, post_NS, res_NSS = given
    return Flow(stream, rows, None, shared[0] if shared else None, post_NS, res_NSS)


_NOBODY = torch.empty(0)
"""Stands for the residual stream where a phase does not see it."""


def _balance(model: LanguageModel, block: Block, context: Context) -> Losses | None:
    """The auxiliary losses of a block's router. What stays in the context has no graph."""
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


def _around_blocks(
    model: LanguageModel, phase: Phase, context: Context, given: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Losses | None]:
    match phase.kind:
        case "embed":
            return (model.embedded(context),), None
        case "pass":
            return given, None
        case "enter":
            assert model.embedding is not None
            assert phase.depth is not None
            (before,), shown = given, targets(context.batch, phase.depth)
            return (_depth(model, phase).enter(before, model.embedding(shown.tokens_BT)),), None
        case "final_norm":
            normed = model.normed if phase.depth is None else _depth(model, phase).normed
            return (normed(*given),), None
        case "head":
            return (), _told(model, phase, context, *given)
        case kind:
            raise ValueError(f"no model has a phase {kind!r}")


def _told(model: LanguageModel, phase: Phase, context: Context, hidden_BtC: Tensor) -> Losses:
    batch = context.batch
    if phase.depth is None:
        loss_sum, count = model.head_loss(hidden_BtC, batch.labels_BT, batch.loss_mask_BT)
        return Losses(loss_sum=loss_sum, token_count=count, aux={}, balances={})
    shown = targets(batch, phase.depth)
    mtp = model.head_loss(hidden_BtC, shown.labels_BT, shown.loss_mask_BT)
    loss_sum, count = model.zero_loss()
    weight = model.shape.mtp_loss / len(model.mtp)
    return Losses(loss_sum=loss_sum, token_count=count, aux={}, balances={}, mtp=(mtp,), mtp_weight=weight)


def _block(model: LanguageModel, phase: Phase) -> Block:
    blocks = model.stack.blocks if phase.depth is None else _depth(model, phase).blocks
    return cast(Block, blocks[str(phase.block)])


def _depth(model: LanguageModel, phase: Phase) -> Mtp:
    return cast(Mtp, model.mtp[str(phase.depth)])
