"""The router: top-k expert selection and routing probabilities.

    logits = x · W + b    scores = softmax | sigmoid | sqrt(softplus)        experts = top-k(scores + bias)

The router is replicated and every rank routes its own tokens; capacity and sinkhorn consider whole sequences.

Shapes: B rows, T tokens of a row, N = B · T, C hidden channels, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups
from braid.kernels.router import PLAIN, RouterKernels, splits
from braid.nn.canonical import Canonical
from braid.nn.cost import INDEX_BYTES, Cost, Workload
from braid.nn.moe.capacity import within_capacity
from braid.nn.moe.jitter import jitter
from braid.nn.moe.routing import ExpertChoice, Routing
from braid.nn.moe.score_function import probabilities, scores, shares
from braid.nn.moe.sinkhorn import sinkhorn
from braid.nn.moe.token_ids import Tokens, by_row, own_part, whole_rows
from braid.nn.moe.top_k import round_robin, top_k_experts
from braid.nn.work import Piece, Product, Work, moved


class Router(nn.Module):
    """The router of one MoE layer."""

    def __init__(
        self,
        shape: architecture.Moe,
        hidden: int,
        kernels: RouterKernels = PLAIN,
        *,
        groups: Groups = Groups(),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups, self.kernels = shape, groups, kernels
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(shape.experts, hidden, device=device, dtype=wide))
        self.bias: Tensor | None
        """The aux-loss-free selection bias (DeepSeek-V3). It has no gradient; `balance.updated_bias` updates
        it."""
        bias_E = torch.empty(shape.experts, device=device, dtype=wide) if shape.selection_bias else None
        self.register_buffer("bias", bias_E)
        logit_bias_E = torch.empty(shape.experts, device=device, dtype=wide) if shape.router_bias else None
        self.logit_bias = None if logit_bias_E is None else nn.Parameter(logit_bias_E)

    def forward(
        self, x_NC: Tensor, tokens: Tokens | None = None, replayed: ExpertChoice | None = None
    ) -> Routing:
        """`tokens` defaults to one row without padding, not in training."""
        tokens = Tokens.one_row(len(x_NC), x_NC.device) if tokens is None else tokens
        logits_NE = self.logits(x_NC, tokens)
        return route(logits_NE, self.shape, tokens, self.bias, replayed, self.groups.tp_cp, self.kernels)

    def logits(self, x_NC: Tensor, tokens: Tokens) -> Tensor:
        dtype = logit_dtype(self.shape, x_NC.dtype)
        if self.shape.jitter and tokens.training:
            x_NC = x_NC.to(dtype) * jitter(self.shape.jitter, tokens, x_NC.shape[-1], dtype)
        logits_NE = self.kernels.logits(x_NC, self.weight, dtype)
        return logits_NE if self.logit_bias is None else logits_NE + self.logit_bias.to(dtype)

    def canonical(self) -> dict[str, Canonical]:
        shape = tuple(self.weight.shape)
        tensors = {"weight": Canonical(parameter="weight", shape=shape, fill="normal", copies=self.groups.tp)}
        if self.bias is not None:
            tensors["bias"] = Canonical(parameter="bias", shape=shape[:1], fill="zeros")
        if self.logit_bias is not None:
            tensors["logit_bias"] = Canonical(
                parameter="logit_bias", shape=shape[:1], fill="zeros", copies=self.groups.tp
            )
        return tensors

    def cost(self, workload: Workload) -> Cost:
        """Saves the input, the scores, and the chosen experts with their probabilities."""
        shape, tokens = self.shape, workload.local_tokens(self.groups.tp_cp)
        narrow = logit_dtype(shape, workload.dtype)
        wide = probability_dtype(shape, workload.dtype).itemsize
        saved = workload.dtype if saves_input(shape, workload) else narrow
        kept = tokens * self.weight.shape[1] * saved.itemsize * (2 if shape.jitter else 1)
        if narrow != self.weight.dtype:
            kept += self.weight.numel() * narrow.itemsize
        score_tensors = 3 if shape.score == "sqrt_softplus" else 1
        chosen = shape.top_k if shape.softmax_after_top_k else shape.top_k + 1 if shape.normalize_top_k else 0
        kept += tokens * ((shape.experts * score_tensors + chosen) * wide + shape.top_k * INDEX_BYTES)
        return Cost(kept=kept, passing=tokens * shape.experts * wide)

    def flops(self, tokens: int) -> int:
        return 2 * tokens * self.weight.numel()

    def work(self, workload: Workload) -> Work:
        """Logits by one product with the three narrow parts of the weight, where it splits; else in float32,
        from an upcast input. Then scores, their top-k and probabilities."""
        shape, (experts, channels) = self.shape, self.weight.shape
        tokens = workload.local_tokens(self.groups.tp_cp)
        split = splits("cuda", workload.dtype, logit_dtype(shape, workload.dtype)) and not shape.jitter
        wide = probability_dtype(shape, workload.dtype).itemsize
        counted, parts = self.flops(tokens), 3 if split else 1
        logits = Work(
            (Piece(Product(tokens, parts * experts, channels, counted=counted)),),
            (
                Piece(Product(tokens, channels, parts * experts, counted=counted)),
                Piece(Product(parts * experts, channels, tokens, counted=counted), counts_as="wgrad"),
            ),
        )
        weights, scores = self.weight.numel() * wide, tokens * experts * wide
        if split:  # parts of the weight, sums of products with them; in backward those of the gradient too
            logits += moved(3 * weights + 6 * scores, 6 * weights + 3 * scores, launches=(3, 4))
        elif workload.mixed:
            upcast = tokens * channels * (workload.narrow + wide)
            logits += moved(upcast * (2 if shape.jitter else 1), upcast)
        return logits + self._choice_work(scores, tokens * shape.top_k * wide)

    def _choice_work(self, scores: int, chosen: int) -> Work:
        """Of scores and their top-k, by passes over bytes of all scores: the score function, the shares of
        experts, the selection bias, the best groups; then the probabilities of chosen experts."""
        shape, normalized, grouped = self.shape, self.shape.score != "softmax", self.shape.groups > 1
        functions, biased = 3 if shape.score == "sqrt_softplus" else 1, bool(shape.selection_bias)
        top_k, adds_up = 1 + _needs_raw_top_k(shape), shape.normalize_top_k
        passes = 2 * functions + 3 * normalized + 2 * biased + 8 * grouped + top_k
        kernels = functions + 3 * normalized + biased + 6 * grouped + top_k
        return moved(
            passes * scores + (12 if adds_up else 6) * chosen,
            3 * (1 + functions) * scores + (12 if adds_up else 3) * chosen,
            launches=(kernels + (5 if adds_up else 2), functions + (10 if adds_up else 3)),
        )


def saves_input(shape: architecture.Moe, workload: Workload) -> bool:
    """Whether the router saves its input as it is, not an upcast or jittered copy."""
    narrow = logit_dtype(shape, workload.dtype)
    split = splits(workload.device, workload.dtype, narrow) and workload.may_fuse("router")
    return not shape.jitter and (split or narrow == workload.dtype)


def logit_dtype(shape: architecture.Moe, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the logits, for activations of `dtype`."""
    dtypes = {"input": dtype, "float32": torch.float32, "float64": torch.float64}
    return torch.promote_types(dtype, dtypes[shape.router_dtype])


def probability_dtype(shape: architecture.Moe, dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores and probabilities, for activations of `dtype`."""
    return torch.promote_types(logit_dtype(shape, dtype), torch.float32)


def route(
    logits_NE: Tensor,
    shape: architecture.Moe,
    tokens: Tokens | None = None,
    bias_E: Tensor | None = None,
    replayed: ExpertChoice | None = None,
    row_group: Group = ALONE,
    kernels: RouterKernels = PLAIN,
) -> Routing:
    """Route tokens by their logits, or repeat the decisions of `replayed` with this run's probabilities.
    `row_group` are the ranks that split rows, each with an equal slice of the tokens."""
    tokens = Tokens.one_row(len(logits_NE), logits_NE.device) if tokens is None else tokens
    scores_NE = scores(logits_NE, shape)
    shares_NE = shares(scores_NE, shape)
    if replayed is not None:
        probs_NS = probabilities(scores_NE, replayed.experts_NS, shape)
        return Routing(replayed, probs_NS, shares_NE, logits_NE)
    experts_NS = _choose(logits_NE, scores_NE, shape, tokens, bias_E, row_group, kernels)
    probs_NS = probabilities(scores_NE, experts_NS, shape)
    raw_top_k_NS = kernels.top_k(scores_NE, shape.top_k) if _needs_raw_top_k(shape) else experts_NS
    kept_NS = _kept(experts_NS, probs_NS, shape, tokens, row_group)
    return Routing(ExpertChoice(experts_NS, raw_top_k_NS, kept_NS), probs_NS, shares_NE, logits_NE)


def _choose(
    logits_NE: Tensor,
    scores_NE: Tensor,
    shape: architecture.Moe,
    tokens: Tokens,
    bias_E: Tensor | None,
    row_group: Group,
    kernels: RouterKernels,
) -> Tensor:
    if shape.routing == "round_robin":
        return round_robin(tokens.sample_B, tokens.position_T, top_k=shape.top_k, experts=shape.experts)
    if shape.routing == "sinkhorn" and tokens.training:
        return _sinkhorn_top_k(logits_NE, shape, tokens, row_group, kernels)
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    return top_k_experts(scores_NE, shape, kernels)


def _sinkhorn_top_k(
    logits_NE: Tensor, shape: architecture.Moe, tokens: Tokens, row_group: Group, kernels: RouterKernels
) -> Tensor:
    rows, wide = tokens.rows, torch.promote_types(logits_NE.dtype, torch.float32)
    logits_BTE = by_row(whole_rows(logits_NE.to(wide), rows, row_group), rows)
    valid_BT = by_row(whole_rows(tokens.valid_N(), rows, row_group), rows)
    scores_NE = own_part(sinkhorn(logits_BTE, valid_BT).flatten(0, 1), rows, row_group)
    return kernels.top_k(scores_NE, shape.top_k)


def _needs_raw_top_k(shape: architecture.Moe) -> bool:
    """Whether a balance loss needs the top-k of the raw scores, and it can differ from the selected experts."""
    balances = any(getattr(shape, name) for name in architecture.BALANCE_LOSSES)
    return balances and (shape.groups > 1 or shape.selection_bias or shape.routing != "top_k")


def _kept(
    experts_NS: Tensor, probs_NS: Tensor, shape: architecture.Moe, tokens: Tokens, row_group: Group
) -> Tensor | None:
    rows = tokens.rows
    if shape.capacity_factor is not None and tokens.training:
        # Capacity is per sequence, so the decision is made on whole rows and does not depend on tp and cp.
        full_rows = (whole_rows(x_N, rows, row_group) for x_N in (experts_NS, probs_NS, tokens.valid_N()))
        return own_part(within_capacity(*full_rows, shape=shape, rows=rows), rows, row_group)
    return None if tokens.padding_BT is None else tokens.valid_N()[:, None].expand_as(experts_NS)
