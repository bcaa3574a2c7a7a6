"""DeepEP's interface (`deep_ep.Buffer`), on gloo: what it promises, and what it asks of its caller.

    dispatch  each token once to every rank that has one of its experts; its slots hold local experts, or -1
    combine   the sum over those ranks, of channels and of weights, where the token came from

Dtypes of channels are not looked at: DeepEP itself takes bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    """DeepEP's tuning of a kernel, of which only the sizes of buffers are asked."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """The layout of a dispatch, for whoever goes the same way again or back."""

    tokens: list[Tensor]
    """For each rank the tokens that were sent to it."""
    received: list[int]
    count: int


class Buffer:
    """Tokens to ranks and back."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.rank, self.size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        shards = torch.arange(num_experts)
        per_expert = (topk_idx[..., None] == shards).any(1).sum(0).int()
        rank_of = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.size))
        in_rank = (rank_of[..., None] == torch.arange(self.size)).any(1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            return self._there(x, handle), None, None, None, None, None
        assert is_token_in_rank is not None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank.contiguous(), group=self.group)
        tokens = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.size)]
        handle = Handle(tokens, received.tolist(), len(x))
        held = len(num_tokens_per_expert) // self.size
        experts = self._there(topk_idx, handle) - self.rank * held
        here = (experts >= 0) & (experts < held)
        experts = torch.where(here, experts, -1)
        weights = torch.where(here, self._there(topk_weights, handle), 0.0)
        counts = [int((experts == expert).sum()) for expert in range(held)]
        return self._there(x, handle), experts, weights, counts, handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        assert x.is_contiguous()
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            weights = self._back(topk_weights, handle)
        return self._back(x, handle), weights, None

    def _there(self, x: Tensor, handle: Handle) -> Tensor:
        sent = [len(tokens) for tokens in handle.tokens]
        there = x.new_empty(sum(handle.received), *x.shape[1:])
        dist.all_to_all_single(
            there, torch.cat([x[tokens] for tokens in handle.tokens]), handle.received, sent, group=self.group
        )
        return there

    def _back(self, x: Tensor, handle: Handle) -> Tensor:
        sent = [len(tokens) for tokens in handle.tokens]
        back = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(back, x, sent, handle.received, group=self.group)
        total = x.new_zeros(handle.count, *x.shape[1:])
        return total.index_add(0, torch.cat(handle.tokens), back)
