"""Collectives between ranks: on a group that is handed in, differentiable; on a group of one, nothing at all.

Every rank of a group calls the same function in the same order. What backward sends is the transpose of what
forward sent: a gather's backward scatters sums, a scatter's backward gathers.

Shapes: N rows, P ranks of the group.
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
    """Ranks that work together, as one of them sees them."""

    name: str
    """Its family, for people: `tp`, `dp_cp`."""
    size: int
    """How many ranks there are."""
    rank: int
    """Which of them this process is, from 0."""
    handle: dist.ProcessGroup | None
    """The communicator; None where there is a single rank."""


# Their names since torch 2.13; before, they have others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

ALONE = Group(name="alone", size=1, rank=0, handle=None)
"""The group of a process that needs nobody."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups that one process is in. Alone, every group is itself."""

    tp: Group = ALONE
    """Tensor parallel: ranks that share the heads and channels of dense layers, and the tokens between
    layers."""
    cp: Group = ALONE
    """Context parallel: ranks that share the tokens of a sequence."""
    dp: Group = ALONE
    """Ranks that share the samples of a micro-batch."""
    pp: Group = ALONE
    """Ranks that share the blocks of a model."""
    ends: Group = ALONE
    """The first and the last of them, for these two: both may hold the embedding. Others are alone."""
    tp_cp: Group = ALONE
    """Ranks that together hold every token of their sequences, each a slice: cp outside, tp inside."""
    dp_cp: Group = ALONE
    """Ranks that hold the same dense weights."""
    slab: Group = ALONE
    """All ranks of a pipeline stage: together they hold every token of a micro-batch, each token once."""
    ep: Group = ALONE
    """Ranks that share the experts of a layer."""
    etp: Group = ALONE
    """Ranks that share the ffn channels of an expert."""
    ep_etp: Group = ALONE
    """Ranks that together hold every expert of a layer: ep outside, etp inside."""
    travel: Group = ALONE
    """The same ranks once more, with a communicator of their own for what travels while others compute."""
    edp: Group = ALONE
    """Ranks that hold the same experts' weights."""
    world: Group = ALONE
    """All ranks of the grid."""
    tp_runs: Mapping[int, Group] = field(default_factory=lambda: MappingProxyType({}))
    """By length: the run of so many neighbours within tp that this process is in."""

    def tp_run(self, length: int) -> Group:
        """The group of the `length` neighbours within tp that hold the same copy of something."""
        if length == 1:
            return ALONE
        return self.tp if length == self.tp.size else self.tp_runs[length]


# --------------------------------------------------------------------------------------- with gradients


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Every rank's slice, joined along `dim` in rank order. The gradient of a slice is summed over ranks."""
    return x if group.handle is None else _AllGather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum over ranks."""
    return x if group.handle is None else _ReduceScatter.apply(x, group, dim)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which each of them goes on with in its own way: gradients are summed as well."""
    return x if group.handle is None else _AllReduce.apply(x, group)


def all_to_all(x: Tensor, group: Group, *, split: int, join: int) -> Tensor:
    """Cut along the dim `split`, give every rank its slice, and join what comes back along the dim `join`: from
    all heads of some tokens to some heads of all tokens, and the other way round."""
    return x if group.handle is None else _AllToAll.apply(x, group, split, join)


def all_to_all_v(x_N: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows to other ranks and rows from them: `send[r]` of this rank's rows, in order, go to rank r, and
    `receive[r]` come from it."""
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
    """Every rank's slice, joined along `dim` in rank order."""
    if group.handle is None:
        return x
    x = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    _all_gather(whole, x, group=group.handle)
    return whole.movedim(0, dim)


def reduce_scatter_no_grad(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum over ranks."""
    if group.handle is None:
        return x
    x = x.movedim(dim, 0).contiguous()
    part = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    _reduce_scatter(part, x, group=group.handle)
    return part.movedim(0, dim)


def all_reduce_no_grad(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, in a tensor of its own."""
    if group.handle is None:
        return x
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group.handle)
    return whole


def all_reduce_max_no_grad(x: Tensor, group: Group) -> Tensor:
    """The highest value of any rank, element by element, in a tensor of its own."""
    if group.handle is None:
        return x
    most = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group.handle)
    return most


def all_to_all_no_grad(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """Cut along the dim `split`, give every rank its slice, join what comes back along the dim `join`."""
    if group.handle is None:
        return x
    away = torch.stack(x.chunk(group.size, split))
    back = torch.empty_like(away)
    dist.all_to_all_single(back, away, group=group.handle)
    return torch.cat(back.unbind(0), join)


def all_to_all_v_no_grad(x_N: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """`send[r]` of this rank's rows, in order, go to rank r; `receive[r]` come from it."""
    if group.handle is None:
        return x_N
    back = x_N.new_empty(sum(receive), *x_N.shape[1:])
    dist.all_to_all_single(back, x_N.contiguous(), list(receive), list(send), group=group.handle)
    return back


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal slice of what all ranks have."""
    return x if group.handle is None else x.chunk(group.size, dim)[group.rank]
