"""Collectives with autograd: all-gather, reduce-scatter, all-reduce and all-to-all over an explicit group.

The backward of each is its transpose: that of an all-gather is a reduce-scatter and vice versa; all-reduce and
all-to-all are their own. On a group of one rank every function is the identity. All ranks of a group must call
the same functions in the same order. The `_no_grad` variants are invisible to autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A process group as one of its ranks sees it."""

    name: str
    """Its family, for messages: `tp`, `dp_cp`."""
    size: int
    rank: int
    """This process's rank within the group."""
    handle: dist.ProcessGroup | None
    """The communicator; None for a single rank."""


# torch 2.13 has renamed these two.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

ALONE = Group(name="alone", size=1, rank=0, handle=None)
"""A group of one rank, without a communicator."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups that one process is in; by default, each of them is the process alone."""

    tp: Group = ALONE
    """Tensor parallel: splits the heads and channels of dense layers and, between layers, the tokens (sequence
    parallel)."""
    cp: Group = ALONE
    """Context parallel: splits the tokens of a sequence."""
    dp: Group = ALONE
    """Data parallel: splits the samples of a micro-batch."""
    pp: Group = ALONE
    """Pipeline parallel: splits the blocks of the model."""
    ends: Group = ALONE
    """The first and the last pipeline rank, which may both hold the embedding. Other ranks are alone."""
    tp_cp: Group = ALONE
    """Ranks that together hold all tokens of their sequences, a slice each; tp varies fastest."""
    dp_cp: Group = ALONE
    """Replicas of the dense weights: FSDP shards over them."""
    slab: Group = ALONE
    """All ranks of a pipeline stage: together they hold each token of a micro-batch once."""
    ep: Group = ALONE
    """Expert parallel: splits the experts of a layer."""
    etp: Group = ALONE
    """Expert tensor parallel: splits the ffn channels of each expert."""
    ep_etp: Group = ALONE
    """Ranks that together hold all experts of a layer; etp varies fastest."""
    dispatch: Group = ALONE
    """The ranks of `ep_etp` with a communicator of their own, so that token dispatch and combine can overlap
    with other collectives."""
    edp: Group = ALONE
    """Expert data parallel: replicas of the expert weights, which FSDP shards over."""
    world: Group = ALONE
    """All ranks of the grid."""
    tp_runs: Mapping[int, Group] = field(default_factory=lambda: MappingProxyType({}))
    """Subgroups of consecutive tp ranks, by length."""

    def tp_run(self, length: int) -> Group:
        """This process's subgroup of `length` consecutive tp ranks, which hold copies of the same weights."""
        if length == 1:
            return ALONE
        return self.tp if length == self.tp.size else self.tp_runs[length]


# --------------------------------------------------------------------------------------- with gradients


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather: the slices of all ranks, concatenated along `dim` in rank order. Backward: reduce-scatter."""
    return x if group.handle is None else _AllGather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Reduce-scatter: this rank's slice along `dim` of the sum over ranks. Backward: all-gather."""
    return x if group.handle is None else _ReduceScatter.apply(x, group, dim)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduce: the sum over ranks. Ranks may use the result differently, so backward is an all-reduce
    too."""
    return x if group.handle is None else _AllReduce.apply(x, group)


def all_to_all(x: Tensor, group: Group, *, split: int, join: int) -> Tensor:
    """All-to-all with equal slices: split along the dim `split`, exchange, concatenate along the dim `join`. It
    turns all heads of some tokens into some heads of all tokens, and back (as in Ulysses)."""
    return x if group.handle is None else _AllToAll.apply(x, group, split, join)


def all_to_all_v(x_N: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """All-to-all with given sizes: `send[r]` of this rank's rows, in order, go to rank r, and `receive[r]` rows
    come from it."""
    return x_N if group.handle is None else _AllToAllV.apply(x_N, group, tuple(send), tuple(receive))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_no_grad(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_no_grad(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter_no_grad(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_no_grad(grads[0], ctx.group, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_no_grad(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return all_to_all_no_grad(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_no_grad(grads[0], ctx.group, ctx.join, ctx.split), None, None, None


class _AllToAllV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: Group, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return all_to_all_v_no_grad(x_N, group, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_v_no_grad(grads[0], ctx.group, ctx.receive, ctx.send), None, None, None


# ------------------------------------------------------------------------------------ without gradients


def all_gather_no_grad(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    if group.handle is None:
        return x
    x = x.movedim(dim, 0).contiguous()
    gathered = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x, group=group.handle)
    return gathered.movedim(0, dim)


def reduce_scatter_no_grad(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    if group.handle is None:
        return x
    x = x.movedim(dim, 0).contiguous()
    shard = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    _reduce_scatter(shard, x, group=group.handle)
    return shard.movedim(0, dim)


def all_reduce_no_grad(x: Tensor, group: Group) -> Tensor:
    """Out of place, unlike `dist.all_reduce`."""
    if group.handle is None:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.handle)
    return total


def all_reduce_max_no_grad(x: Tensor, group: Group) -> Tensor:
    """Out of place, unlike `dist.all_reduce`."""
    if group.handle is None:
        return x
    highest = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group.handle)
    return highest


def all_to_all_no_grad(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    if group.handle is None:
        return x
    sent = torch.stack(x.chunk(group.size, split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.handle)
    return torch.cat(received.unbind(0), join)


def all_to_all_v_no_grad(x_N: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    if group.handle is None:
        return x_N
    received = x_N.new_empty(sum(receive), *x_N.shape[1:])
    dist.all_to_all_single(received, x_N.contiguous(), list(receive), list(send), group=group.handle)
    return received


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of a tensor that all ranks of the group hold."""
    return x if group.handle is None else x.chunk(group.size, dim)[group.rank]
