"""Transfers between the grids of two modules over gloo: rows and gradients are those of one process, and nobody
waits for ever."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist

from braid.distributed.collectives import ALONE, Group, all_reduce_no_grad
from braid.distributed.transfer import close_edges, open_edges, post
from braid.errors import ConfigError
from braid.topology import Grid, View, standard
from braid.topology.items import Refusal, SampleItems, TableShape, encode, problems_of
from braid.topology.transfer import Interval, Piece, Transfer, transfer
from tests.ranks import run_ranks
from tests.topology.transfer_cases import Pair, drawn_pair, drawn_samples

WORLD, MICRO_BATCHES, WIDTH = 6, 4, 3
CPU = torch.device("cpu")


def scattered(*ranks: int, **sizes: int) -> Grid:
    return Grid(dense=View.of(**({"tp": 1, "cp": 1, "dp": 1, "pp": 1} | sizes)), explicit=ranks)


GRIDS = {
    "disjoint": (standard(dp=2), standard(tp=2, dp=2, offset=2)),
    "disjoint, dp 3 to 2": (standard(dp=3), standard(dp=2, offset=3)),
    "colocated": (standard(dp=6), standard(tp=3, dp=2)),
    "colocated, cp to tp": (standard(cp=2, dp=3), standard(tp=3, dp=2)),
    "partly": (standard(dp=2, cp=2), standard(tp=2, dp=2, offset=2)),
    "partly, in between": (scattered(0, 1, 2, 3, dp=4), scattered(1, 3, 4, 5, tp=2, dp=2)),
    "from one rank": (standard(offset=3), standard(cp=3, dp=2)),
    "to one rank": (standard(tp=2, dp=3), standard(offset=5)),
    "the same": (standard(dp=4), standard(dp=4)),
    "of one rank": (standard(offset=1), standard(offset=1)),
    "stages": (standard(dp=2, pp=2), standard(cp=2, pp=3)),
}


def named_pairs() -> dict[str, list[Pair]]:
    """For each name, the pair of each micro-batch: ragged items, in one text alone."""
    named = {}
    for seed, (name, (source, target)) in enumerate(GRIDS.items()):
        lanes, slices = target.dense.size_of("dp"), target.dense.size_of("tp") * target.dense.size_of("cp")
        chance = random.Random(seed)
        batches = [drawn_samples(chance, 2 * lanes, slices) for _ in range(MICRO_BATCHES)]
        batches[1] = (SampleItems(placeholders=(0,) * slices),) * len(batches[1])
        stage = source.dense.size_of("pp") - 1
        sides = {"source": source, "source_stage": stage, "target": target, "target_stage": 0}
        named[name] = [Pair(**sides, samples=samples) for samples in batches]
    return named


def drawn_pairs(count: int) -> dict[str, list[Pair]]:
    """Pairs of grids that are drawn, as far as there are ranks for them; the same items in each micro-batch."""
    drawn = {f"drawn {seed}": drawn_pair(seed, most=2) for seed in range(30 * count)}
    small = [name for name, pair in drawn.items() if max(*pair.source.ranks, *pair.target.ranks) < WORLD]
    return {name: [drawn[name]] * MICRO_BATCHES for name in small[:count]}


# ------------------------------------------------------------------------------ rows and gradients


class Alone:
    """One process, all rows: what an encoder makes of them, and what comes back."""

    def __init__(self, name: str, pairs: list[Pair]) -> None:
        torch.manual_seed(len(name))
        options = {"dtype": torch.float64}
        self.weight_C = torch.randn(WIDTH, **options, requires_grad=True)
        self.inputs = [torch.randn(sum(pair.table.rows), WIDTH, **options) for pair in pairs]
        self.factors = [torch.randn_like(inputs_RC) for inputs_RC in self.inputs]
        self.rows = [self.encode(inputs_RC, self.weight_C) for inputs_RC in self.inputs]
        for rows_RC in self.rows:
            rows_RC.retain_grad()
        sum(self.loss(*each) for each in zip(self.rows, self.factors, strict=True)).backward()

    @staticmethod
    def encode(inputs_RC, weight_C):
        return (inputs_RC * weight_C).tanh()

    @staticmethod
    def loss(rows_RC, factors_RC):
        return (factors_RC * rows_RC**2).sum()


def at(x_RC, intervals):
    return torch.cat([x_RC[:0], *(x_RC[start:stop] for start, stop in intervals)])


def both_ways(edges):
    return {(way, edge): ranks for edge, ranks in edges.items() for way in "FB"}


def check_pairs(rank, world, named, aheads):
    members = {name: {rank for side in pairs[0].sides() for rank in side} for name, pairs in named.items()}
    groups = open_edges(both_ways(members), rank, CPU)
    assert {edge for _, edge in groups} == {name for name, ranks in members.items() if rank in ranks}
    for name, ahead in product(named, aheads):
        pairs = named[name]
        alone = Alone(name, pairs)
        gradient_C = gradient_of_rank(rank, pairs, alone, [groups.get((way, name)) for way in "FB"], ahead)
        dist.all_reduce(gradient_C)
        torch.testing.assert_close(gradient_C, alone.weight_C.grad, rtol=1e-12, atol=1e-12)
    close_edges(groups)


def gradient_of_rank(rank, pairs, alone, groups, ahead):
    """What a rank does in a step, as part of an encoder, of a language model, of both or of none; the encoder
    is `ahead` micro-batches ahead."""
    forward, backward = groups
    sides = [pair.sides() for pair in pairs]
    plans = [transfer(*side, rank) for side in sides]
    weight_C = alone.weight_C.detach().clone().requires_grad_()
    nothing = torch.empty(0, WIDTH, dtype=torch.float64)
    makes, reads = rank in sides[0][0], rank in sides[0][1]
    made, pending, back = {}, {}, {}

    def send(m):
        made[m] = alone.encode(at(alone.inputs[m], sides[m][0][rank]), weight_C)
        pending[m] = post(made[m], plans[m], forward, m)

    def read(m):
        if not makes:
            pending[m] = post(nothing, plans[m], forward, m)
        rows_NC = pending[m].wait()
        wanted_NC, factors_NC = (at(each[m], sides[m][1][rank]) for each in (alone.rows, alone.factors))
        assert torch.equal(rows_NC, wanted_NC)
        assert not rows_NC.requires_grad
        rows_NC = rows_NC.clone().requires_grad_()
        alone.loss(rows_NC, factors_NC).backward()
        back[m] = post(rows_NC.grad, plans[m].backward(), backward, m)

    for m in range(MICRO_BATCHES + ahead):
        if makes and m < MICRO_BATCHES:
            send(m)
        if reads and m >= ahead:
            read(m - ahead)
    for m in range(MICRO_BATCHES) if makes else ():
        if not reads:
            back[m] = post(nothing, plans[m].backward(), backward, m)
        gradient_NC = back[m].wait()
        assert torch.equal(gradient_NC, at(alone.rows[m].grad, sides[m][0][rank]))
        made[m].backward(gradient_NC)
    for each in (*pending.values(), *back.values()):
        each.finish()
        assert each.is_completed()
    return torch.zeros_like(weight_C) if weight_C.grad is None else weight_C.grad


def test_rows_and_gradients_are_those_of_one_process():
    run_ranks(WORLD, check_pairs, named_pairs(), (0, 2, MICRO_BATCHES))


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.long)])
def test_rows_and_gradients_of_pairs_that_are_drawn(count):
    pairs = drawn_pairs(count)
    assert len(pairs) == count
    run_ranks(WORLD, check_pairs, pairs, (1,))


# ------------------------------------------------------------------------------------ within a rank


def test_a_transfer_within_a_rank_posts_and_copies_nothing():
    rows_NC = torch.randn(4, 2, requires_grad=True)
    pending = post(rows_NC, Transfer(kept=(Interval(7, 11),)), ALONE, 0)
    assert pending.is_completed()
    assert not pending.receiving
    assert not pending.sending
    assert pending.wait().data_ptr() == rows_NC.data_ptr()
    assert not pending.wait().requires_grad


def test_rows_that_the_plan_does_not_have_are_a_bug():
    with pytest.raises(AssertionError, match="3 rows, and the plan has 4"):
        post(torch.zeros(3, 2), Transfer(kept=(Interval(7, 11),)), ALONE, 0)


# --------------------------------------------------------------------------------------- the table


def problems_of_rank(rank, world):
    """Ranks 0 and 2 read a sample each, and 1 and 3 none: they hold other slices of the same tokens."""
    shape = TableShape(samples=2, items=2, slices=2)
    own = {
        0: SampleItems(rows=(4, Refusal.SIZE), patches=(16, 0), placeholders=(4, 0)),
        2: SampleItems(rows=(5,), patches=(20,), placeholders=(1, 2)),
    }
    numbers = encode(shape, rank // 2, [own[rank]] if rank in own else ())
    job = Group(name="job", size=world, rank=rank, handle=dist.group.WORLD)
    return problems_of(shape, all_reduce_no_grad(torch.tensor(numbers), job).tolist(), 10, "vision")


def test_every_rank_finds_the_same_problems_with_the_data():
    told = run_ranks(4, problems_of_rank)
    assert [problem.partition(":")[0] for problem in told[0]] == ["sample 10, item 1", "sample 11, item 0"]
    assert told == [told[0]] * 4


# ---------------------------------------------------------------------------------- communicators


def check_communicators(rank, world):
    before = len(dist.distributed_c10d._world.pg_map)
    wait = timedelta(seconds=77)
    groups = open_edges(both_ways({"vision": (2, 0), "audio": {0, 2}, "alone": (1,)}), rank, CPU, timeout=wait)
    opened = len(dist.distributed_c10d._world.pg_map) - before
    for group in groups.values():
        if group is not ALONE:
            assert group.handle._get_backend(CPU).options._timeout == wait
    found = {channel: (group.name, group.size, group.rank) for channel, group in groups.items()}
    handles = {id(group.handle) for group in groups.values()}
    close_edges(groups)
    assert len(dist.distributed_c10d._world.pg_map) == before
    return found, opened, len(handles)


def test_each_edge_has_a_communicator_for_each_direction():
    told = run_ranks(3, check_communicators)
    channels = [(direction, edge) for edge in ("vision", "audio") for direction in "FB"]
    for rank, place in ((0, 0), (2, 1)):
        named = {channel: ("-".join(channel), 2, place) for channel in channels}
        assert told[rank] == (named, 4, 4)
    assert told[1] == ({(direction, "alone"): ("alone", 1, 0) for direction in "FB"}, 0, 1)


def check_refusal(rank, world):
    with pytest.raises(ConfigError, match="gloo sends host tensors only") as caught:
        open_edges({("F", "vision"): (0, 1)}, rank, torch.device("cuda"))
    return caught.value.problems[0].remedy


def test_gloo_refuses_rows_on_a_gpu():
    assert run_ranks(2, check_refusal) == ["cpu:gloo,cuda:nccl, or train on the CPU"] * 2


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_batch_of_sends_and_receives_on_nccl(tmp_path):
    """A rank that sends to itself: one GPU is one rank of NCCL."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        group = Group(name="F-vision", size=1, rank=0, handle=dist.new_group([0]))
        x_NC = torch.randn(6, 4, device="cuda")
        pieces = (Piece(0, 0, 2), Piece(0, 3, 6))
        planned = Transfer(sends=pieces, receives=pieces, kept=(Interval(2, 3),))
        found = [post(x_NC + m, planned, group, m) for m in range(3)]
        assert [len(pending.receiving) + len(pending.sending) for pending in found] == [1, 1, 1]
        for m, pending in enumerate(found):
            assert torch.equal(pending.wait(), x_NC + m)
            pending.finish()
    finally:
        dist.destroy_process_group()
