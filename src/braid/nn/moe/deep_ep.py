"""The DeepEP token dispatcher (github.com/deepseek-ai/DeepEP), for NVLink and RDMA; imported only if chosen.

DeepEP sends a token once to each rank that has one of its experts and sums what these return; what remains is
to permute received tokens to the local experts. It carries bfloat16, and probabilities as float32. Dispatch and
combine are each other's transpose, so the backward of one calls the other.

Shapes: N tokens, R received tokens, S slots of a token (one per shard of its experts), C channels.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from braid.distributed.collectives import Group
from braid.errors import ConfigError
from braid.nn.moe.dispatch_plan import DispatchPlan, Slots, record_stream
from braid.nn.moe.permute import order_by_expert


class DeepEp:
    """Tokens are sent as they are, and arrive once per rank with their slots for the local experts."""

    def __init__(
        self, *, group: Group, dispatch_group: Group, local_experts: int, etp: int, channels: int
    ) -> None:
        """`channels` is the width of a row; for the other arguments see `all_to_all.AllToAll`."""
        self.local_experts, self.etp = local_experts, etp
        self.shards = group.size * local_experts
        self.buffer = _buffer(dispatch_group, channels)

    def dispatch_plan(self, slots: Slots) -> DispatchPlan:
        slots = slots.to_expert_shards(self.local_experts, self.etp)
        shards_NS = slots.experts_NS
        if slots.kept_NS is not None:
            shards_NS = torch.where(slots.kept_NS, shards_NS, -1)
        to_ranks, to_nodes, to_shards, in_rank, _ = self.buffer.get_dispatch_layout(shards_NS, self.shards)
        return DispatchPlan(
            handle={
                "topk_idx": shards_NS,
                "num_tokens_per_rank": to_ranks,
                "num_tokens_per_rdma_rank": to_nodes,
                "num_tokens_per_expert": to_shards,
                "is_token_in_rank": in_rank,
            }
        )

    def dispatch(
        self, x: Tensor, probs: Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[Tensor, Tensor, DispatchPlan]:
        record_stream(*dispatch_plan.handle.values())
        probs_NS = probs.to(torch.float32).repeat_interleave(self.etp, dim=1)
        x_RC, probs_RS, experts_RS, counts, handle = _DeepEpDispatch.apply(
            x, probs_NS, self.buffer, dispatch_plan.handle
        )
        recv_order = order_by_expert(experts_RS, self.local_experts, experts_RS >= 0, sum(counts))
        return x_RC, probs_RS, DispatchPlan(recv_order=recv_order, counts_E=recv_order.counts_E, handle=handle)

    def combine(self, y: Tensor, dispatch_plan: DispatchPlan) -> Tensor:
        return _DeepEpCombine.apply(y, self.buffer, dispatch_plan.handle)


def _buffer(group: Group, channels: int) -> Any:
    """DeepEP's communication buffer, of the size that it recommends."""
    try:
        buffer = import_module("deep_ep").Buffer
    except ImportError as error:
        raise ConfigError(
            "the dispatcher deep_ep needs the package deep_ep, which is not installed: build it for this "
            "CUDA and torch (https://github.com/deepseek-ai/DeepEP), or choose all_to_all"
        ) from error
    row_bytes = channels * torch.bfloat16.itemsize
    configs = (buffer.get_dispatch_config(group.size), buffer.get_combine_config(group.size))
    return buffer(
        group.handle,
        max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs),
    )


class _DeepEpDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, probs_NS: Tensor, buffer: Any, layout: dict[str, Any]) -> Any:
        x_RC, experts_RS, probs_RS, counts, handle, _ = buffer.dispatch(
            x_NC.contiguous(), topk_weights=probs_NS, **layout
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(experts_RS)
        return x_RC, probs_RS, experts_RS, counts, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        x_RC, probs_RS, *_ = grads
        x_NC, probs_NS, _ = ctx.buffer.combine(
            x_RC.contiguous(), ctx.handle, topk_weights=probs_RS.contiguous()
        )
        return x_NC, probs_NS, None, None


class _DeepEpCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RC: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        y_NC: Tensor = buffer.combine(y_RC.contiguous(), handle)[0]
        return y_NC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        y_RC: Tensor = ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0]
        return y_RC, None, None
