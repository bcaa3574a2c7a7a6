"""Every collective on gloo ranks, against the same thing written out in one process, forward and backward.

All inputs come from seeds, so each rank knows those of all ranks. It writes out what every rank should get,
lets autograd find the gradients of that, and compares its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid.distributed import collectives
from braid.distributed.collectives import ALONE, Group, Groups
from tests.ranks import run_ranks

Shape = tuple[int, ...]


class Case(NamedTuple):
    """A collective on given inputs, and what it does, written out."""

    name: str
    inputs: Sequence[Tensor]
    """Of every rank."""
    function: Callable[[Tensor, Group], Tensor]
    plain: Callable[[Sequence[Tensor], int], Tensor]
    """From the inputs of all ranks to the output of one."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def strided(*shape: int, seed: int) -> Tensor:
    """Not contiguous in any of its dims."""
    wide = normal(*(2 * size for size in reversed(shape)), seed=seed)
    return wide.permute(tuple(reversed(range(len(shape)))))[(slice(None, None, 2),) * len(shape)]


def make(ranks: int, shape: Shape) -> list[Sequence[Tensor]]:
    """Inputs of one shape for all ranks, contiguous and not."""
    return [[maker(*shape, seed=rank) for rank in range(ranks)] for maker in (normal, strided)]


# ----------------------------------------------------------------------------------------------- written out


def joined(inputs: Sequence[Tensor], rank: int, *, dim: int) -> Tensor:
    return torch.cat(list(inputs), dim)


def sliced(inputs: Sequence[Tensor], rank: int, *, dim: int) -> Tensor:
    return added(inputs, rank).tensor_split(len(inputs), dim)[rank]


def added(inputs: Sequence[Tensor], rank: int) -> Tensor:
    return torch.stack(list(inputs)).sum(0)


def largest(inputs: Sequence[Tensor], rank: int) -> Tensor:
    return torch.stack(list(inputs)).amax(0)


def traded(inputs: Sequence[Tensor], rank: int, *, split: int, join: int) -> Tensor:
    return torch.cat([x.tensor_split(len(inputs), split)[rank] for x in inputs], join)


def posted(inputs: Sequence[Tensor], rank: int, *, counts: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([x.split(list(sent))[rank] for x, sent in zip(inputs, counts, strict=True)])


def post(x: Tensor, group: Group, *, counts: Sequence[Sequence[int]]) -> Tensor:
    """`exchange` where `counts[a][b]` rows go from rank a to rank b."""
    receive = [sent[group.rank] for sent in counts]
    return collectives.all_to_all_v(x, group, counts[group.rank], receive)


# ----------------------------------------------------------------------------------------------------- cases


def exchanges(ranks: int) -> dict[str, list[list[int]]]:
    """Rows from every rank to every rank."""
    return {
        "uneven": [[(3 * a + 5 * b + a * b) % 4 for b in range(ranks)] for a in range(ranks)],
        "to the last rank": [[2 * (b == ranks - 1) for b in range(ranks)] for _ in range(ranks)],
        "from the first rank": [[(a == 0) * (b + 1) for b in range(ranks)] for a in range(ranks)],
        "to oneself": [[(a == b) * 3 for b in range(ranks)] for a in range(ranks)],
        "nothing": [[0] * ranks for _ in range(ranks)],
    }


def cases(ranks: int) -> list[Case]:
    found = []
    for dim in (0, 1, 2, -1):
        shape = [3, 2, 5]
        for inputs in make(ranks, tuple(shape)):
            gather = partial(collectives.all_gather, dim=dim)
            found.append(Case(f"gather {dim}", inputs, gather, partial(joined, dim=dim)))
        shape[dim] *= ranks
        for inputs in make(ranks, tuple(shape)):
            scatter = partial(collectives.reduce_scatter, dim=dim)
            found.append(Case(f"scatter {dim}", inputs, scatter, partial(sliced, dim=dim)))
    for shape in ((4, 3), (1,), (), (0, 3)):
        for inputs in make(ranks, shape):
            found.append(Case(f"total {shape}", inputs, collectives.all_reduce, added))
    for split, join in ((2, 1), (1, 2), (0, 3), (3, 0), (1, 1), (-2, 1)):
        shape = [2, 3, 1, 2]
        shape[split] *= ranks
        for inputs in make(ranks, tuple(shape)):
            swap = partial(collectives.all_to_all, split=split, join=join)
            found.append(Case(f"swap {split} {join}", inputs, swap, partial(traded, split=split, join=join)))
    for name, counts in exchanges(ranks).items():
        for rest in ((), (3,), (2, 2)):
            for maker in (normal, strided):
                inputs = [maker(sum(sent), *rest, seed=rank) for rank, sent in enumerate(counts)]
                exchange, plain = partial(post, counts=counts), partial(posted, counts=counts)
                found.append(Case(f"exchange {name} {rest}", inputs, exchange, plain))
    return found


# ------------------------------------------------------------------------------------------------ on the ranks


def open_group(rank: int, world: int, members: Sequence[Sequence[int]]) -> Group:
    """The group that this rank is in, of groups that share all ranks."""
    handles = {tuple(ranks): dist.new_group(list(ranks)) for ranks in members}
    (mine,) = [ranks for ranks in handles if rank in ranks]
    return Group(name="test", size=len(mine), rank=mine.index(rank), handle=handles[mine])


def check_gradients(rank: int, world: int, members: Sequence[Sequence[int]]) -> int:
    """Outputs and gradients of all cases; how many there were."""
    group = open_group(rank, world, members)
    found = cases(group.size)
    for case in found:
        own = case.inputs[group.rank].detach().requires_grad_()
        output = case.function(own, group)
        leaves = [x.detach().requires_grad_() for x in case.inputs]
        outputs = [case.plain(leaves, place) for place in range(group.size)]
        torch.testing.assert_close(output, outputs[group.rank], rtol=1e-14, atol=1e-14, msg=case.name)
        probes = [strided(*out.shape, seed=100 + place) for place, out in enumerate(outputs)]
        sum((out * probe).sum() for out, probe in zip(outputs, probes, strict=True)).backward()  # type: ignore[union-attr]
        output.backward(probes[group.rank])
        torch.testing.assert_close(own.grad, leaves[group.rank].grad, rtol=1e-14, atol=1e-14, msg=case.name)
    return len(found)


def check_expanded_gradients(rank: int, world: int) -> None:
    """The gradient of a sum is one number seen as many; it travels like any other."""
    group = open_group(rank, world, [range(world)])
    for function, ones in (
        (partial(collectives.all_gather, dim=1), world),
        (partial(collectives.reduce_scatter, dim=1), 1),
        (collectives.all_reduce, world),
        (partial(collectives.all_to_all, split=1, join=0), 1),
    ):
        x = normal(2, 2 * world, seed=rank).requires_grad_()
        function(x, group).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, ones))


def check_plain_dtypes(rank: int, world: int) -> None:
    """Without gradients: ids and counts too, and what was given stays as it was."""
    group = open_group(rank, world, [range(world)])
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        inputs = [(torch.arange(4 * world).view(2, -1) * 7 % 11 + place).to(dtype).T for place in range(world)]
        own, before = inputs[rank], inputs[rank].clone()
        counts = [[(a + b) % 3 for b in range(world)] for a in range(world)]
        rows = [torch.arange(sum(sent)).to(dtype) + 20 * a for a, sent in enumerate(counts)]
        receive = [sent[rank] for sent in counts]
        assert torch.equal(collectives.all_gather_no_grad(own, group), joined(inputs, rank, dim=0))
        assert torch.equal(collectives.all_gather_no_grad(own, group, 1), joined(inputs, rank, dim=1))
        assert torch.equal(collectives.reduce_scatter_no_grad(own, group), sliced(inputs, rank, dim=0))
        assert torch.equal(collectives.all_reduce_no_grad(own, group), added(inputs, rank))
        assert torch.equal(collectives.all_reduce_max_no_grad(own, group), largest(inputs, rank))
        assert torch.equal(
            collectives.all_to_all_no_grad(own, group, 0, 1), traded(inputs, rank, split=0, join=1)
        )
        assert torch.equal(
            collectives.all_to_all_v_no_grad(rows[rank], group, counts[rank], receive),
            posted(rows, rank, counts=counts),
        )
        assert torch.equal(collectives.own_slice(inputs[0], group, 0), inputs[0].tensor_split(world)[rank])
        assert torch.equal(own, before)


def check_way_back(rank: int, world: int) -> None:
    """From some tokens to some heads and back is nothing at all, bit for bit."""
    group = open_group(rank, world, [range(world)])
    x = normal(2, 5, 3 * world, 4, seed=rank)
    heads = collectives.all_to_all(x, group, split=2, join=1)
    assert heads.shape == (2, 5 * world, 3, 4)
    assert torch.equal(collectives.all_to_all(heads, group, split=1, join=2), x)


def check_all(rank: int, world: int) -> int:
    check_expanded_gradients(rank, world)
    check_plain_dtypes(rank, world)
    check_way_back(rank, world)
    return check_gradients(rank, world, [range(world)])


# ----------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_are_what_they_say_forward_and_backward(world: int) -> None:
    assert all(count > 60 for count in run_ranks(world, check_all))


def test_groups_within_the_world_count_their_own_ranks() -> None:
    assert all(run_ranks(4, check_gradients, [[0, 2], [1, 3]]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_gather", {"dim": 1}),
        ("reduce_scatter", {"dim": 1}),
        ("all_reduce", {}),
        ("all_to_all", {"split": 0, "join": 1}),
        ("all_to_all_v", {"send": [2], "receive": [2]}),
        ("all_gather_no_grad", {}),
        ("reduce_scatter_no_grad", {}),
        ("all_reduce_no_grad", {}),
        ("all_reduce_max_no_grad", {}),
        ("all_to_all_no_grad", {"split": 0, "join": 1}),
        ("all_to_all_v_no_grad", {"send": [2], "receive": [2]}),
        ("own_slice", {"dim": 0}),
    ],
)
def test_alone_nothing_happens(name: str, arguments: dict[str, Any]) -> None:
    x = normal(2, 3, seed=0)
    assert getattr(collectives, name)(x, ALONE, **arguments) is x


def test_runs_within_tp() -> None:
    pair, four = (Group(name="tp", size=size, rank=0, handle=None) for size in (2, 4))
    groups = Groups(tp=four, tp_runs={2: pair})
    assert groups.tp_run(1) is ALONE
    assert groups.tp_run(2) is pair
    assert groups.tp_run(4) is four
    assert Groups().tp_run(1) is ALONE
