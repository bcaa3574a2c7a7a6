"""How evenly experts are loaded: losses that even it out, a bias that does so without a loss, and figures.

All losses are means over tokens that are not padding, so that a micro-batch may weigh them by its share of a
step's tokens. They look at raw scores: neither selection biases, groups nor capacity have a part in them. With

    count_e  how often e is among the best raw scores of a token     share_te  e's part in token t's scores

a load-balancing loss over T tokens is  experts / (top_k · T²) · Σ_e count_e · Σ_t share_te:  1 where the load
is even, and at most the number of experts. Gradients flow through the shares alone.

- over a micro-batch: its tokens, those of all ranks that share it;
- over a sequence: each row by itself, then the mean over rows;
- over a step: shares of this micro-batch, counts of this one and of those before it in the step.

Ranks that share a micro-batch each compute their *part* of a loss: counts are those of all ranks, shares those
of a rank's own tokens, divided by the number of all. The parts add up to the loss that one process would have.

Shapes: B rows, T tokens of a row, N = B · T, E experts, S = top_k slots of a token, M = N · S slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups, all_reduce_no_grad
from braid.nn.cost import INDEX, Call, Cost, Portion, once
from braid.nn.moe.routing import Routing
from braid.nn.moe.token_ids import Tokens


class Balance(NamedTuple):
    """What this rank's tokens of a micro-batch did to one layer's experts. All counts leave padding out."""

    losses: dict[str, Tensor]
    """This rank's parts of the weighted losses by name, those that are turned on: load_balance,
    sequence_balance, global_balance, router_z."""
    counts_E: Tensor
    """How many tokens chose each expert: the selection bias follows these, summed over a step and its ranks."""
    kept_E: Tensor
    """How many of them found a place."""
    favourites_E: Tensor
    """How often each expert is among the best raw scores, over all ranks where a loss looks at it; summed over
    a step's micro-batches so far, they are the next one's `earlier_E`."""


def examine(
    routing: Routing,
    shape: architecture.Moe,
    tokens: Tokens,
    earlier_E: Tensor | None = None,
    groups: Groups = Groups(),
) -> Balance:
    """Losses and counts of a routing. `earlier_E` holds favourites of the step's earlier micro-batches; without
    it this is the first."""
    choice, shares_NE, everywhere = routing.choice, routing.shares_NE, tokens.count_everywhere
    valid_N = None if tokens.padding_BT is None else tokens.valid_N()
    counts_E = favourites_E = count(choice.experts_NS, valid_N, shape.experts)
    if choice.favourites_NS is not choice.experts_NS:
        favourites_E = count(choice.favourites_NS, valid_N, shape.experts)
    if shape.aux_loss or shape.global_aux_loss:
        favourites_E = all_reduce_no_grad(favourites_E, groups.slab)
    step_E = favourites_E if earlier_E is None else favourites_E + earlier_E
    losses: dict[str, Tensor] = {}
    if shape.aux_loss:
        loss = load_balance(shares_NE, favourites_E, valid_N, everywhere)
        losses["load_balance"] = shape.aux_loss * loss
    if shape.sequence_aux_loss:
        loss = sequence_balance(shares_NE, choice.favourites_NS, tokens, groups.tp_cp)
        losses["sequence_balance"] = shape.sequence_aux_loss * loss
    if shape.global_aux_loss:
        losses["global_balance"] = shape.global_aux_loss * load_balance(shares_NE, step_E, valid_N, everywhere)
    if shape.z_loss:
        losses["router_z"] = shape.z_loss * z_loss(routing.logits_NE, valid_N, everywhere)
    kept_E = counts_E if choice.kept_NS is None else count(choice.experts_NS, choice.kept_NS, shape.experts)
    return Balance(losses, counts_E, kept_E, favourites_E)


# ---------------------------------------------------------------------------------------------- losses


def load_balance(
    shares_NE: Tensor, counts_E: Tensor, valid_N: Tensor | None = None, everywhere: int | None = None
) -> Tensor:
    """These tokens' part of the load-balancing loss of a micro-batch, from counts of its own or of the step so
    far. `everywhere` is how many tokens it has that are not padding; without it, these are all. Without
    `valid_N` none is padding."""
    valid_NE = shares_NE if valid_N is None else shares_NE * valid_N[:, None]
    mean_E = valid_NE.sum(0) / _tokens(len(shares_NE), valid_N, everywhere)
    assigned_E = counts_E.to(shares_NE.dtype) / counts_E.sum().clamp(min=1)
    return len(counts_E) * (assigned_E * mean_E).sum()


def sequence_balance(
    shares_NE: Tensor, favourites_NS: Tensor, tokens: Tokens, row_group: Group = ALONE
) -> Tensor:
    """These tokens' part of the mean over rows of each row's load-balancing loss; a row of padding alone has
    none. `row_group` are the ranks that share rows."""
    rows, experts, valid_N = tokens.rows, shares_NE.shape[-1], tokens.valid_N()
    row_N1 = torch.arange(rows, device=valid_N.device).repeat_interleave(tokens.row_tokens)[:, None]
    counts_BE = count(row_N1 * experts + favourites_NS, valid_N, rows * experts).view(rows, experts)
    counts_BE = all_reduce_no_grad(counts_BE, row_group).to(shares_NE.dtype)
    slots_B1 = counts_BE.sum(1, keepdim=True).clamp(min=1)
    sums_BE = (shares_NE * valid_N[:, None]).unflatten(0, (rows, -1)).sum(1)
    top_k = favourites_NS.shape[1]
    return experts * top_k * (counts_BE / slots_B1 * sums_BE / slots_B1).sum() / tokens.rows_everywhere


def z_loss(logits_NE: Tensor, valid_N: Tensor | None = None, everywhere: int | None = None) -> Tensor:
    """These tokens' part of the mean of logsumexp²: router logits that grow cost."""
    wide = torch.promote_types(logits_NE.dtype, torch.float32)
    squares_N = logits_NE.to(wide).logsumexp(-1).square()
    squares_N = squares_N if valid_N is None else squares_N * valid_N
    return squares_N.sum() / _tokens(len(squares_N), valid_N, everywhere)


def _tokens(here: int, valid_N: Tensor | None, everywhere: int | None) -> int | Tensor:
    """How many are not padding: here, where nobody knows of others. At least one."""
    if everywhere is None and valid_N is not None:
        return valid_N.sum().clamp(min=1)
    return max(here if everywhere is None else everywhere, 1)


def count(experts_NS: Tensor, counted: Tensor | None, experts: int) -> Tensor:
    """How often each expert was chosen, where `counted` is True: one entry per token, or one per slot. None
    counts all."""
    slots_M = experts_NS.flatten()
    if counted is not None:
        slots_M = torch.where(counted if counted.ndim == 2 else counted[:, None], experts_NS, experts).flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=slots_M.device)
    # bincount would ask the device for the highest entry.
    return counts.scatter_add_(0, slots_M, torch.ones_like(slots_M))[:experts]


def examine_cost(shape: architecture.Moe, portion: Portion, wide: int, groups: Groups) -> Cost:
    """What `examine` keeps and sums, where scores take `wide` bytes each. Batches with padding keep a byte for
    each token besides."""
    tokens, experts = portion.places(groups.tp_cp), shape.experts
    over_all = bool(shape.aux_loss) + bool(shape.global_aux_loss)
    kept, calls = over_all * experts * wide, tuple[Call, ...]()
    if over_all:
        calls += once("sum", groups.slab, experts * INDEX, "expert counts")
    if shape.sequence_aux_loss:
        kept += tokens + portion.rows * (experts + 1) * wide
        calls += once("sum", groups.tp_cp, portion.rows * experts * INDEX, "expert counts of rows")
    if over_all or shape.sequence_aux_loss:
        kept += tokens * wide * (experts if shape.softmax_after_top_k else shape.score != "softmax")
    if shape.z_loss:
        logits_kept = shape.softmax_after_top_k or shape.score == "sqrt_softplus"
        kept += tokens * wide * (1 if logits_kept else 1 + experts)
    return Cost(kept=kept, calls=calls)


# ---------------------------------------------------------------------------------------- after a step


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The selection bias after a step whose tokens chose experts `counts_E` times, all micro-batches and ranks
    together: a step up where an expert was chosen less than the mean, a step down where more."""
    counts_E = counts_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E)


class Load(NamedTuple):
    """How a step loaded one layer's experts, as figures for a person."""

    max_over_mean: float
    """1 is even; the number of experts is one for all."""
    min_over_mean: float
    """1 is even; 0 is an expert that nobody visits."""
    entropy: float
    """Of the spread of tokens over experts, as a part of the highest possible: 1 is even, 0 is one for all."""
    dropped: float
    """Share of the assignments that found no place."""


def load(counts_E: Tensor, kept_E: Tensor) -> Load:
    """The figures of `Balance.counts_E` and `Balance.kept_E`, or of sums of them."""
    counts_E, experts = counts_E.double().cpu(), len(counts_E)
    total = float(counts_E.sum())
    if not total:
        return Load(max_over_mean=1.0, min_over_mean=1.0, entropy=1.0, dropped=0.0)
    shares_E = counts_E / total
    return Load(
        max_over_mean=float(shares_E.max()) * experts,
        min_over_mean=float(shares_E.min()) * experts,
        entropy=float(torch.special.entr(shares_E).sum()) / math.log(experts) if experts > 1 else 1.0,
        dropped=1 - float(kept_E.sum()) / total,
    )
