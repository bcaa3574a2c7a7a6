"""Expert load balancing: auxiliary losses, router z-loss, the aux-loss-free selection bias, load statistics.

The load-balancing loss (Switch Transformer, arXiv 2101.03961) over T tokens is

    experts / (top_k · T²) · Σ_e count_e · Σ_t share_te

    count_e   number of tokens with e in the top-k of their raw scores
    share_te  score of e for token t, normalized over experts

It is 1 if the load is even and at most the number of experts. Gradients flow through the shares only. It uses
raw scores: selection bias, groups and capacity have no influence. All losses are means over tokens without
padding, so that a micro-batch can be weighted by its fraction of the step's tokens. There are three scopes:

- micro-batch: the tokens of all ranks that share it;
- sequence: each row on its own, then the mean over rows (DeepSeek-V3, arXiv 2412.19437);
- step: shares of this micro-batch, counts of this and the earlier micro-batches of the step.

Each rank computes its *part* of a loss: counts are all-reduced, shares are those of its own tokens divided by
the number of all tokens. The parts of all ranks add up to the loss of a single process.

Shapes: B rows, T tokens of a row, N = B · T, E experts, S = top_k slots of a token, M = N · S slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups, all_reduce_no_grad
from braid.nn.cost import INDEX_BYTES, Call, Cost, Workload, no_grad_call
from braid.nn.moe.routing import Routing
from braid.nn.moe.token_ids import Tokens
from braid.nn.work import Work, moved


class Balance(NamedTuple):
    """Auxiliary losses and expert counts of one layer for a micro-batch. Counts exclude padding."""

    losses: dict[str, Tensor]
    """This rank's parts of the enabled losses by name, weighted: load_balance, sequence_balance,
    global_balance, router_z."""
    counts_E: Tensor
    """Tokens routed to each expert. Summed over a step and its ranks, they drive the selection bias."""
    kept_E: Tensor
    """The same, without tokens dropped by capacity."""
    raw_counts_E: Tensor
    """Tokens with each expert in the top-k of their raw scores; all-reduced if a loss needs it. Summed over the
    micro-batches of a step so far, they are the next one's `earlier_E`."""


def measure_balance(
    routing: Routing,
    shape: architecture.Moe,
    tokens: Tokens,
    earlier_E: Tensor | None = None,
    groups: Groups = Groups(),
) -> Balance:
    """Losses and counts of a routing. `earlier_E` sums `raw_counts_E` over the step's earlier micro-batches;
    None for the first."""
    choice, shares_NE, total_tokens = routing.choice, routing.shares_NE, tokens.total_tokens
    valid_N = None if tokens.padding_BT is None else tokens.valid_N()
    counts_E = raw_counts_E = count(choice.experts_NS, valid_N, shape.experts)
    if choice.raw_top_k_NS is not choice.experts_NS:
        raw_counts_E = count(choice.raw_top_k_NS, valid_N, shape.experts)
    if shape.aux_loss or shape.global_aux_loss:
        raw_counts_E = all_reduce_no_grad(raw_counts_E, groups.slab)
    step_E = raw_counts_E if earlier_E is None else raw_counts_E + earlier_E
    losses: dict[str, Tensor] = {}
    if shape.aux_loss:
        loss = load_balance(shares_NE, raw_counts_E, valid_N, total_tokens)
        losses["load_balance"] = shape.aux_loss * loss
    if shape.sequence_aux_loss:
        loss = sequence_balance(shares_NE, choice.raw_top_k_NS, tokens, groups.tp_cp)
        losses["sequence_balance"] = shape.sequence_aux_loss * loss
    if shape.global_aux_loss:
        losses["global_balance"] = shape.global_aux_loss * load_balance(
            shares_NE, step_E, valid_N, total_tokens
        )
    if shape.z_loss:
        losses["router_z"] = shape.z_loss * z_loss(routing.logits_NE, valid_N, total_tokens)
    kept_E = counts_E if choice.kept_NS is None else count(choice.experts_NS, choice.kept_NS, shape.experts)
    return Balance(losses, counts_E, kept_E, raw_counts_E)


# ---------------------------------------------------------------------------------------------- losses


def load_balance(
    shares_NE: Tensor, counts_E: Tensor, valid_N: Tensor | None = None, total_tokens: int | None = None
) -> Tensor:
    """This rank's part of the load-balancing loss of a micro-batch, with counts of the micro-batch or of the
    step so far. `total_tokens` are those of all ranks without padding, by default those given here; `valid_N`
    is False for padding, by default there is none."""
    valid_NE = shares_NE if valid_N is None else shares_NE * valid_N[:, None]
    # Few ops: they are tiny, and a device waits for the host that issues them.
    counts_E = counts_E.to(shares_NE.dtype)
    assigned_E = counts_E / counts_E.sum().clamp(min=1)
    scale = len(counts_E) / _token_count(len(shares_NE), valid_N, total_tokens)
    return scale * torch.dot(assigned_E, valid_NE.sum(0))


def sequence_balance(
    shares_NE: Tensor, raw_top_k_NS: Tensor, tokens: Tokens, row_group: Group = ALONE
) -> Tensor:
    """This rank's part of the mean over rows of each row's load-balancing loss; rows of padding only contribute
    zero. `row_group` are the ranks that split rows."""
    rows, experts, valid_N = tokens.rows, shares_NE.shape[-1], tokens.valid_N()
    row_N1 = torch.arange(rows, device=valid_N.device).repeat_interleave(tokens.row_tokens)[:, None]
    counts_BE = count(row_N1 * experts + raw_top_k_NS, valid_N, rows * experts).view(rows, experts)
    counts_BE = all_reduce_no_grad(counts_BE, row_group).to(shares_NE.dtype)
    slots_B1 = counts_BE.sum(1, keepdim=True).clamp(min=1)
    sums_BE = (shares_NE * valid_N[:, None]).unflatten(0, (rows, tokens.row_tokens)).sum(1)
    top_k = raw_top_k_NS.shape[1]
    return experts * top_k * (counts_BE / slots_B1 * sums_BE / slots_B1).sum() / max(tokens.total_rows, 1)


def z_loss(logits_NE: Tensor, valid_N: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
    """This rank's part of the router z-loss (ST-MoE, arXiv 2202.08906): the mean of logsumexp(logits)²."""
    wide = torch.promote_types(logits_NE.dtype, torch.float32)
    squares_N = logits_NE.to(wide).logsumexp(-1).square()
    squares_N = squares_N if valid_N is None else squares_N * valid_N
    return squares_N.sum() / _token_count(len(squares_N), valid_N, total_tokens)


def _token_count(here: int, valid_N: Tensor | None, total_tokens: int | None) -> int | Tensor:
    """The denominator of a mean over tokens; at least 1."""
    if total_tokens is None and valid_N is not None:
        return valid_N.sum().clamp(min=1)
    return max(here if total_tokens is None else total_tokens, 1)


def count(experts_NS: Tensor, counted: Tensor | None, experts: int) -> Tensor:
    """How often each expert was selected. `counted` masks tokens or slots; None counts all."""
    slots_M = experts_NS.flatten()
    if counted is not None:
        slots_M = torch.where(counted if counted.ndim == 2 else counted[:, None], experts_NS, experts).flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=slots_M.device)
    # Not bincount: it synchronizes with the device to find the maximum.
    return counts.scatter_add_(0, slots_M, torch.ones_like(slots_M))[:experts]


def balance_cost(shape: architecture.Moe, workload: Workload, wide: int, groups: Groups) -> Cost:
    """The cost of `measure_balance`; scores have `wide` bytes. Batches with padding save a byte more per
    token."""
    tokens, experts = workload.local_tokens(groups.tp_cp), shape.experts
    batch_losses = bool(shape.aux_loss) + bool(shape.global_aux_loss)
    kept, calls = batch_losses * experts * wide, tuple[Call, ...]()
    if batch_losses:
        calls += no_grad_call("all_reduce", groups.slab, experts * INDEX_BYTES, "expert counts")
    if shape.sequence_aux_loss:
        kept += tokens + workload.rows * (experts + 1) * wide
        calls += no_grad_call(
            "all_reduce", groups.tp_cp, workload.rows * experts * INDEX_BYTES, "expert counts of rows"
        )
    if batch_losses or shape.sequence_aux_loss:
        kept += tokens * wide * (experts if shape.softmax_after_top_k else shape.score != "softmax")
    if shape.z_loss:
        logits_kept = shape.softmax_after_top_k or shape.score == "sqrt_softplus"
        kept += tokens * wide * (1 if logits_kept else 1 + experts)
    return Cost(kept=kept, calls=calls)


def balance_work(shape: architecture.Moe, workload: Workload, wide: int, groups: Groups) -> Work:
    """The work of `measure_balance`: slots are counted, and losses read all scores or logits; their gradients
    are added to those of the probabilities, those of shares after another normalization."""
    tokens = workload.local_tokens(groups.tp_cp)
    scores, slots = tokens * shape.experts * wide, tokens * shape.top_k * INDEX_BYTES
    batch = moved(scores, 3 * shape.experts * wide, launches=(8, 3))
    work = moved(4 * slots, launches=3) + batch.times(bool(shape.aux_loss) + bool(shape.global_aux_loss))
    if shape.sequence_aux_loss:
        work += moved(4 * slots, launches=3) + moved(3 * scores + 6 * slots, 3 * scores, launches=(20, 7))
    if shape.z_loss:
        work += moved(2 * scores, 10 * scores, launches=(5, 9))
    if shape.aux_loss or shape.global_aux_loss or shape.sequence_aux_loss:
        work += moved(backward=3 * scores)
        if shape.score != "softmax":
            work += moved(backward=14 * scores, launches=7)
    return work


# ---------------------------------------------------------------------------------------- after a step


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Update the selection bias after a step (aux-loss-free balancing, arXiv 2408.15664): up by `rate` for
    experts with less than the mean load, down for those with more. `counts_E` sums all micro-batches and
    ranks."""
    counts_E = counts_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E)


class Load(NamedTuple):
    """Load statistics of one layer's experts over a step, for metrics."""

    max_over_mean: float
    """1 if balanced; the number of experts if one expert gets all tokens."""
    min_over_mean: float
    """1 if balanced; 0 if an expert gets no token."""
    entropy: float
    """Entropy of the load relative to the maximum: 1 if balanced, 0 if one expert gets all tokens."""
    dropped: float
    """Fraction of assignments dropped by capacity."""


def load(counts_E: Tensor, kept_E: Tensor) -> Load:
    """Load statistics from `Balance.counts_E` and `Balance.kept_E`, or sums of them."""
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
