"""Transfers between the grids of two modules: every row arrives once, at the rank whose tokens it replaces."""

from collections import Counter, defaultdict
from itertools import pairwise
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.distributed.collectives import Group, own_slice
from braid.topology import standard
from braid.topology.items import ItemTable, SampleItems
from braid.topology.transfer import Interval, Lanes, Piece, Tokens, Transfer, held, local_rows, transfer
from tests.topology.transfer_cases import Ends, Pair, drawn_pair, ends_of_rows, table_of

SEEDS = st.integers(0, 2**32)


def plans_of(pair: Pair) -> dict[int, Transfer]:
    """Of all ranks of both grids."""
    source, target = pair.sides()
    return {rank: transfer(source, target, rank) for rank in {*pair.source.ranks, *pair.target.ranks}}


def rows_of(intervals) -> list[int]:
    return [row for interval in intervals for row in range(interval.start, interval.stop)]


# --------------------------------------------------------------------------------------------- any pair


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_every_row_goes_once_from_the_rank_that_makes_it_to_the_rank_that_reads_it(seed):
    pair = drawn_pair(seed)
    moved = Counter()
    for rank, plan in plans_of(pair).items():
        for peer, start, stop in plan.sends:
            moved.update((row, rank, peer) for row in range(start, stop))
        moved.update((row, rank, rank) for row in rows_of(plan.kept))
    assert moved == Counter((row, *ends) for row, ends in enumerate(ends_of_rows(pair)))


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_both_sides_agree_and_backward_swaps_the_roles(seed):
    pair = drawn_pair(seed)
    source, target = pair.sides()
    sent, received = defaultdict(list), defaultdict(list)
    for rank, plan in plans_of(pair).items():
        for peer, start, stop in plan.sends:
            sent[rank, peer].append((start, stop))
        for peer, start, stop in plan.receives:
            received[peer, rank].append((start, stop))
        assert transfer(target, source, rank) == plan.backward()
        for pieces in (plan.sends, plan.receives, plan.kept):
            assert list(pieces) == sorted(pieces, key=lambda piece: piece.start)
            assert all(piece.start < piece.stop for piece in pieces)
    assert sent == received


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_a_rank_holds_its_rows_in_as_few_intervals_as_can_be(seed):
    pair = drawn_pair(seed)
    for side, name in zip(pair.sides(), Ends._fields, strict=True):
        ends = [getattr(ends, name) for ends in ends_of_rows(pair)]
        assert list(side) == sorted(side)
        assert len(side) == len(set(side))
        for rank in side:
            assert rows_of(side[rank]) == [row for row, holder in enumerate(ends) if holder == rank]
            assert all(left.stop < right.start for left, right in pairwise(side[rank]))


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_places_in_the_tensors_of_ranks_bring_every_row_where_it_belongs(seed):
    pair = drawn_pair(seed)
    source, target = pair.sides()
    plans = plans_of(pair)
    buffers, arrived = {}, {}
    for rank, plan in plans.items():
        rows, places = rows_of(source.get(rank, ())), local_rows(plan.sends, plan.kept)
        assert places.count == len(rows)
        for peer, parts in places.by_peer.items():
            buffers[rank, peer] = [rows[place] for place in rows_of(parts)]
        arrived[rank] = dict(
            zip(
                rows_of(local_rows(plan.receives, plan.kept).kept),
                [rows[place] for place in rows_of(places.kept)],
                strict=True,
            )
        )
    for rank, plan in plans.items():
        places = local_rows(plan.receives, plan.kept)
        for peer, parts in places.by_peer.items():
            arrived[rank] |= dict(zip(rows_of(parts), buffers.pop((peer, rank)), strict=True))
        wanted = rows_of(target.get(rank, ()))
        assert [arrived[rank][place] for place in range(places.count)] == wanted
    assert not buffers


# ---------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_a_rank_wants_the_rows_of_the_placeholders_among_its_own_tokens(tp, cp):
    """Its own tokens are those that the language model gives it: a slice over cp, and of that one over tp."""
    grid, placeholder, slices = standard(tp=tp, cp=cp, dp=2, pp=2), 7, tp * cp
    tokens_BT = torch.where(torch.rand(4, 6 * slices) < 0.4, placeholder, 1)
    tokens_BT[2] = 1
    is_row_BT = tokens_BT == placeholder
    row_BT = (is_row_BT.flatten().cumsum(0) - 1).view_as(tokens_BT)
    samples = tuple(
        SampleItems(
            rows=(int(each.sum()),) if each.any() else (),
            patches=(1,) if each.any() else (),
            placeholders=tuple(int(part.sum()) for part in each.chunk(slices)),
        )
        for each in is_row_BT
    )
    wanted = held(Tokens(stage=1), grid, table_of(samples))
    assert list(wanted) == list(range(2 * slices, 4 * slices))
    for rank in wanted:
        at = grid.coordinates(rank)
        own = slice(2 * at["dp"], 2 * at["dp"] + 2)
        rows, mask = row_BT[own], is_row_BT[own]
        for axis, size in (("cp", cp), ("tp", tp)):
            group = Group(name=axis, size=size, rank=at[axis], handle=object())
            rows, mask = own_slice(rows, group, 1), own_slice(mask, group, 1)
        assert rows_of(wanted[rank]) == rows[mask].tolist()


def test_a_lane_holds_whole_items_and_its_ranks_equal_slices_of_their_rows():
    samples = (
        SampleItems(rows=(5, 5), patches=(20, 20), placeholders=(10,)),
        SampleItems(placeholders=(0,)),
        SampleItems(rows=(4, 1), patches=(36, 4), placeholders=(5,)),
    )
    rows = held(Lanes(stage=0), standard(tp=2, cp=2, dp=2), table_of(samples))
    assert [rows[rank] for rank in range(4)] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    assert [rows[rank] for rank in range(4, 8)] == [((10, 12),), ((12, 14),), ((14, 15),), ()]


def test_one_sample_with_many_items_is_split_over_the_lanes():
    samples = (
        SampleItems(rows=(3,) * 8, patches=(12,) * 8, placeholders=(24,)),
        SampleItems(placeholders=(0,)),
    )
    rows = held(Lanes(stage=0), standard(dp=4), table_of(samples))
    assert [rows[rank] for rank in range(4)] == [((0, 6),), ((6, 12),), ((12, 18),), ((18, 24),)]


def test_a_text_only_micro_batch_moves_nothing():
    text = (SampleItems(placeholders=(0, 0)),) * 4
    pair = Pair(
        source=standard(dp=3), source_stage=0, target=standard(tp=2, dp=2), target_stage=0, samples=text
    )
    assert set(plans_of(pair).values()) == {Transfer()}


def test_the_same_grid_on_both_sides_keeps_its_rows():
    samples = (SampleItems(rows=(4,), patches=(16,), placeholders=(4,)),) * 3
    pair = Pair(source=standard(dp=3), source_stage=0, target=standard(dp=3), target_stage=0, samples=samples)
    for rank, plan in plans_of(pair).items():
        assert plan == Transfer(kept=(Interval(4 * rank, 4 * rank + 4),))
        assert plan.local


def test_an_item_whose_rows_cross_slices_goes_to_several_ranks():
    samples = (SampleItems(rows=(6,), patches=(6,), placeholders=(1, 0, 5)),)
    pair = Pair(source=standard(), source_stage=0, target=standard(cp=3), target_stage=0, samples=samples)
    plans = plans_of(pair)
    assert plans[0] == Transfer(sends=(Piece(2, 1, 6),), kept=(Interval(0, 1),))
    assert plans[1] == Transfer()
    assert plans[2] == Transfer(receives=(Piece(0, 1, 6),))


def test_ranks_of_other_stages_and_of_no_grid_do_nothing():
    samples = (SampleItems(rows=(6,), patches=(6,), placeholders=(6,)),) * 2
    source, target = standard(dp=2, pp=2), standard(dp=2, pp=2, offset=4)
    pair = Pair(source=source, source_stage=1, target=target, target_stage=0, samples=samples)
    busy = {rank for rank, plan in plans_of(pair).items() if plan != Transfer()}
    assert busy == {2, 3, 4, 5}
    assert transfer(*pair.sides(), 99) == Transfer()


# ------------------------------------------------------------------------------------------------- size


def test_a_plan_in_a_large_job_takes_steps_for_its_peers_not_for_all_ranks(monkeypatch):
    samples = tuple(
        SampleItems(rows=(3, 8, 1), patches=(12, 32, 4), placeholders=(0, 5, 0, 7))
        if number % 3
        else SampleItems(placeholders=(0,) * 4)
        for number in range(2048)
    )
    lanes, asked, most = 8192, [], 0
    cut = ItemTable.first_item_of_lane
    monkeypatch.setattr(ItemTable, "first_item_of_lane", lambda *at: asked.append(at) or cut(*at))
    table = table_of(samples)
    source = held(Lanes(stage=0), standard(dp=lanes), table)
    target = held(Tokens(stage=0), standard(tp=4, dp=2048, offset=lanes), table)
    for rank in range(0, 2 * lanes, 101):
        plan = transfer(source, target, rank)
        pieces = len(plan.sends) + len(plan.receives)
        assert len(asked) <= (pieces + 2) * (log2(lanes) + 3)
        most = max(most, pieces)
        asked.clear()
    assert most > 1
