"""A whole MoE layer for tests: weights from a seed, its parts run in the order in which a block runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from braid import architecture
from braid.kernels.grouped_mlp import REFERENCE, GroupedMlp
from braid.nn.init import initialize
from braid.nn.moe.layer import Moe
from braid.nn.moe.routing import ExpertChoice, Routing
from braid.nn.moe.token_ids import Tokens


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
    initialize(tensors(moe), moe.canonical(), seed=1, std=0.5, layers=1)
    return moe


def tensors(moe: Moe) -> dict[str, Tensor]:
    """All that canonical tensors lie in."""
    return dict(moe.named_parameters()) | dict(moe.named_buffers())


def of_rows(rows: int, row_tokens: int, **changes: object) -> Tokens:
    """Tokens of some rows, with samples numbered from 100."""
    given = {"sample_B": torch.arange(rows) + 100, "position_T": torch.arange(row_tokens), "training": True}
    return Tokens(**(given | changes))  # type: ignore[arg-type]


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forward(
    moe: Moe, x_NC: Tensor, tokens: Tokens, replayed: ExpertChoice | None = None
) -> tuple[Tensor, Routing]:
    """What the layer adds to the residual stream, and its routing."""
    routing = moe.router(x_NC, tokens, replayed)
    dispatch_plan = moe.dispatch_plan(routing, tokens, replayed=replayed is not None)
    rows, probs = moe.pack(x_NC, routing.probs_NS, dispatch_plan)
    rows, probs, dispatch_plan = moe.dispatcher.dispatch(rows, probs, dispatch_plan)
    rows = moe.dispatcher.combine(moe.run_experts(rows, probs, dispatch_plan), dispatch_plan)
    y_NC = moe.unpack(rows, dispatch_plan)
    shared_BTC = moe.shared_output(x_NC.unflatten(0, (tokens.rows, -1)))
    return y_NC if shared_BTC is None else y_NC + shared_BTC.flatten(0, 1), routing


def grads(moe: Moe) -> dict[str, Tensor]:
    """Every canonical tensor's gradient; zero where there is none."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in tensors(moe).items()}
    return {name: tensor.read(found[tensor.parameter]) for name, tensor in moe.canonical().items()}
