"""A whole MoE layer for tests: weights from a seed, its parts run in the order in which a block runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from braid import architecture
from braid.kernels.grouped_mlp import REFERENCE, GroupedMlp
from braid.nn.init import initialize
from braid.nn.moe.dispatch import combine, dispatch
from braid.nn.moe.layer import Moe
from braid.nn.moe.routing import Choice, Routing
from braid.nn.moe.tokens import Tokens


def shape(**changes: object) -> architecture.Moe:
    return architecture.Moe(**({"experts": 6, "top_k": 2, "ffn": 5} | changes))  # type: ignore[arg-type]


def build(
    shape: architecture.Moe,
    hidden: int = 7,
    *,
    dtype: torch.dtype = torch.float64,
    kernel: GroupedMlp = REFERENCE.function,
) -> Moe:
    moe = Moe(shape, hidden, kernel, dtype=dtype)
    initialize(dict(moe.named_parameters()), moe.canonical(), seed=1, std=0.5, layers=1)
    return moe


def of_rows(rows: int, row_tokens: int, **changes: object) -> Tokens:
    """Tokens of some rows, with samples numbered from 100."""
    given = {"sample_B": torch.arange(rows) + 100, "place_T": torch.arange(row_tokens), "training": True}
    return Tokens(**(given | changes))  # type: ignore[arg-type]


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forward(moe: Moe, x_NC: Tensor, tokens: Tokens, replayed: Choice | None = None) -> tuple[Tensor, Routing]:
    """What the layer adds to the residual stream, and its routing."""
    routing = moe.router(x_NC, tokens, replayed)
    order = moe.order(routing, tokens)
    rows_MC, probs_M = dispatch(moe.into_latent(x_NC), routing.probs_NS, order)
    y_NC = moe.out_of_latent(combine(moe.experts(rows_MC, probs_M, order.counts_E), order))
    shared_NC = moe.shared_output(x_NC)
    return y_NC if shared_NC is None else y_NC + shared_NC, routing


def grads(moe: Moe) -> dict[str, Tensor]:
    """Every canonical tensor's gradient; zero where there is none."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in moe.named_parameters()}
    return {name: tensor.read(found[tensor.parameter]) for name, tensor in moe.canonical().items()}
