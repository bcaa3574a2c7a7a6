"""What a layer costs a rank in one micro-batch: bytes that autograd keeps, bytes that backward needs, calls.

Every module has a method `cost(portion)`, in closed form. So that nothing is counted twice, a module counts

    its input, where an op of it keeps that,
    everything that it makes and that is kept,
    but not its output: that is for whoever takes it as input.

Bytes are those of whole storages: a slice that is kept keeps all of the tensor that it was cut from. Routing
and the lengths of documents depend on the data; here rows are single documents without padding, and every
expert has its even share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from braid.distributed.collectives import Group

Op = Literal["gather", "scatter", "sum", "swap", "exchange"]
"""The collectives, as `braid.distributed.collectives` names them."""

INDEX = 8
"""Bytes of a place or a count."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What a rank is given in one micro-batch, and in which arithmetic."""

    rows: int
    """Rows of this rank."""
    tokens: int
    """Tokens of a row, those of all ranks that share it."""
    dtype: torch.dtype
    """Of the activations."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Some ops keep more on a CPU, where they are put together from smaller ones."""
    recompute: frozenset[str] = frozenset()
    """What is made again in backward: the kinds of `nn.recompute`."""
    span: int = 1
    """Blocks between residual streams that are kept, where hyper-connections are made again."""
    fine: bool = False
    """Whether blocks with experts go into phases. All that is made again of a phase is there at once."""

    @property
    def narrow(self) -> int:
        """Bytes of an activation."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of what is float32 or better."""
        return torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def mixed(self) -> bool:
        """Whether the two differ, so that widening makes a copy."""
        return self.narrow != self.wide

    def again(self, name: str) -> bool:
        """Whether regions of this kind are made again."""
        return name in self.recompute

    def normed(self, kept: int, gathered: bool) -> int:
        """What a layer keeps of its normed input: nothing where that is made again, unless it was gathered from
        other ranks first."""
        return 0 if self.again("norm") and not gathered else kept

    def places(self, *sharers: Group) -> int:
        """Tokens of all rows, where these ranks share them."""
        ranks = 1
        for group in sharers:
            ranks *= group.size
        return self.rows * self.tokens // ranks


class Call(NamedTuple):
    """One kind of collective call of a rank."""

    op: Op
    family: str
    """Name of the group that it is over."""
    ranks: int
    """How many ranks that group has."""
    purpose: str
    """What is sent, and in which pass."""
    payload: int
    """Bytes that the rank hands in at each call."""
    times: int = 1

    @property
    def sent(self) -> int:
        """Bytes that leave the rank over all times, as a ring sends them."""
        others = self.ranks - 1
        match self.op:
            case "gather":
                each = self.payload * others
            case "sum":
                each = 2 * self.payload * others // self.ranks
            case _:
                each = self.payload * others // self.ranks
        return each * self.times


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What something costs; several costs add up."""

    kept: int = 0
    """Bytes that autograd keeps from forward to backward."""
    passing: int = 0
    """The most bytes by which its backward, letting go of those, exceeds them for a moment; weights and their
    gradients do not count. This alone is an estimate."""
    calls: tuple[Call, ...] = ()
    """Forward and backward together, and what is sent again in between."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            kept=self.kept + other.kept,
            passing=max(self.passing, other.passing),
            calls=self.calls + other.calls,
        )

    def times(self, count: int) -> Cost:
        """So many of it, one after the other."""
        calls = tuple(m._replace(times=m.times * count) for m in self.calls)
        return replace(self, kept=self.kept * count, calls=calls)


# ------------------------------------------------------------------------------------------ calls


def sent_again(calls: tuple[Call, ...], *once_only: str) -> tuple[Call, ...]:
    """What a replay sends of the calls of a forward and its backward; some are for one time only."""
    forward = (call for call in calls if not call.purpose.endswith(_BACKWARD) and call.purpose not in once_only)
    return tuple(call._replace(purpose=f"{call.purpose}, again") for call in forward)


_BACKWARD = ", backward"


def gather_cost(group: Group, part: int, purpose: str) -> tuple[Call, ...]:
    """`collectives.gather` of `part` bytes from each rank, and the scatter of its backward."""
    return _there_and_back("gather", part, "scatter", part * group.size, group, purpose)


def scatter_cost(group: Group, whole: int, purpose: str) -> tuple[Call, ...]:
    """`collectives.scatter` of `whole` bytes, and the gather of its backward."""
    return _there_and_back("scatter", whole, "gather", whole // group.size, group, purpose)


def total_cost(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    """`collectives.total`, forward and backward."""
    return _there_and_back("sum", payload, "sum", payload, group, purpose)


def swap_cost(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    """`collectives.swap`, forward and backward."""
    return _there_and_back("swap", payload, "swap", payload, group, purpose)


def exchange_cost(group: Group, payload: int, purpose: str) -> tuple[Call, ...]:
    """`collectives.exchange` where every rank gets as much as it gives, forward and backward."""
    return _there_and_back("exchange", payload, "exchange", payload, group, purpose)


def once(op: Op, group: Group, payload: int, purpose: str, times: int = 1) -> tuple[Call, ...]:
    """A collective without a gradient."""
    if group.size == 1 or not times:
        return ()
    return (Call(op, group.name, group.size, purpose, payload, times),)


def _there_and_back(
    op: Op, payload: int, back: Op, back_payload: int, group: Group, purpose: str
) -> tuple[Call, ...]:
    return once(op, group, payload, purpose) + once(back, group, back_payload, f"{purpose}{_BACKWARD}")
