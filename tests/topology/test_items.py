"""The table of items: it comes together from the ranks that read the samples, and every rank finds the same
problems in it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.topology.items import Refusal, SampleItems, TableShape, decode, encode, problems_of
from tests.topology.transfer_cases import drawn_samples, nearest_cut, table_of

SEEDS = st.integers(0, 2**32)


def summed(tables) -> list[int]:
    return [sum(numbers) for numbers in zip(*tables, strict=True)]


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_the_sum_over_the_lanes_that_read_samples_is_the_whole_table(seed):
    chance = random.Random(seed)
    each, lanes, slices = chance.randint(1, 3), chance.randint(1, 4), chance.randint(1, 4)
    samples = drawn_samples(chance, each * lanes, slices)
    shape = TableShape(samples=len(samples), items=5, slices=slices)
    parts = [encode(shape, lane * each, samples[lane * each :][:each]) for lane in range(lanes)]
    numbers = summed([*parts, encode(shape, 0, ())])
    assert numbers == encode(shape, 0, samples)
    assert problems_of(shape, numbers, 0, "vision") == []
    table = decode(shape, numbers)
    assert table == table_of(samples)
    assert table.counts == tuple(len(sample.rows) for sample in samples)
    assert table.rows == tuple(rows for sample in samples for rows in sample.rows)
    assert table.patches == tuple(patches for sample in samples for patches in sample.patches)
    assert table.placeholders == tuple(count for sample in samples for count in sample.placeholders)


# ------------------------------------------------------------------------------------------------ lanes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 9))
def test_lanes_are_cut_where_patches_are_nearest_to_even(patches, lanes):
    sample = SampleItems(rows=(1,) * len(patches), patches=tuple(patches), placeholders=(len(patches),))
    table = table_of((sample,))
    items = [table.items_of_lane(lane, lanes) for lane in range(lanes)]
    assert [item for lane in items for item in lane] == list(range(len(patches)))
    assert [lane.start for lane in items] == [nearest_cut(patches, lane, lanes) for lane in range(lanes)]
    for lane in items:
        load = sum(patches[lane.start : lane.stop])
        assert load * lanes <= sum(patches) + lanes * max(patches, default=0)


def test_more_lanes_than_items():
    table = table_of((SampleItems(rows=(4, 4), patches=(16, 16), placeholders=(8,)),))
    assert [len(table.items_of_lane(lane, 5)) for lane in range(5)] == [0, 1, 0, 1, 0]


# --------------------------------------------------------------------------------------------- problems

SHAPE = TableShape(samples=3, items=2, slices=2)
GOOD = SampleItems(rows=(4, 9), patches=(16, 36), placeholders=(6, 7))


@pytest.mark.parametrize(
    ("placeholders", "problem", "counts"),
    [
        ((6, 6), ", item 1: 8 are left for its 9 rows", "12 placeholder tokens for 13 rows"),
        ((3, 0), ", item 0: 3 are left for its 4 rows", "3 placeholder tokens for 13 rows"),
        ((10, 5), ", item 1: 2 follow this last item", "15 placeholder tokens for 13 rows"),
    ],
)
def test_rows_and_placeholders_that_differ_are_told_with_sample_and_item(placeholders, problem, counts):
    wrong = SampleItems(rows=GOOD.rows, patches=GOOD.patches, placeholders=placeholders)
    needed = f"'vision' needs one for each row, the sample has {counts}"
    assert problems_with(wrong) == [f"sample 301{problem}; {needed}"]


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (
            SampleItems(placeholders=(0, 2)),
            ": no items; 'vision' needs one for each row, the sample has 2 placeholder tokens for 0 rows",
        ),
        (
            SampleItems(rows=(4, Refusal.KIND), patches=(16, 0), placeholders=(4, 0)),
            ", item 1: 'vision' cannot encode it: no module encodes items of its kind",
        ),
        (
            SampleItems(rows=(Refusal.SIZE, 9), patches=(0, 36), placeholders=(4, 5)),
            ", item 0: 'vision' cannot encode it: the encoder does not take its size",
        ),
        (
            SampleItems(rows=(Refusal.EMPTY, 3), patches=(0, 12), placeholders=(0, 0)),
            ", item 0: 'vision' cannot encode it: it makes no rows",
        ),
        (
            SampleItems(rows=(1, 1, 1), patches=(4, 4, 4), placeholders=(1, 1)),
            ", item 2: the sample has 3 items for 'vision', and may have 2",
        ),
    ],
)
def test_items_that_cannot_be_encoded_are_told_with_their_sample(sample, problem):
    assert problems_with(sample) == [f"sample 301{problem}"]


def problems_with(sample: SampleItems) -> list[str]:
    """Of a micro-batch that two ranks read, where the second sample is this one."""
    numbers = summed([encode(SHAPE, 0, (GOOD,)), encode(SHAPE, 1, (sample, GOOD))])
    return problems_of(SHAPE, numbers, 300, "vision")


def test_every_problem_is_listed():
    bad = SampleItems(rows=(Refusal.SIZE, Refusal.KIND), patches=(0, 0), placeholders=(0, 0))
    short = SampleItems(rows=(4,), patches=(16,), placeholders=(0, 1))
    problems = problems_of(SHAPE, encode(SHAPE, 0, (bad, GOOD, short)), 0, "audio")
    assert [problem.partition(":")[0] for problem in problems] == [
        "sample 0, item 0",
        "sample 0, item 1",
        "sample 2, item 0",
    ]


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_any_other_number_of_placeholders_is_a_problem_of_that_sample(seed):
    chance = random.Random(seed)
    samples = list(drawn_samples(chance, 4, 2))
    place, other = chance.randrange(4), chance.choice([-3, -1, 1, 2])
    left, right = samples[place].placeholders
    if right + other < 0:
        other = 1
    wrong = SampleItems(
        rows=samples[place].rows, patches=samples[place].patches, placeholders=(left, right + other)
    )
    samples[place] = wrong
    shape = TableShape(samples=4, items=5, slices=2)
    (problem,) = problems_of(shape, encode(shape, 0, samples), 40, "vision")
    assert problem.startswith(f"sample {40 + place}")
    assert problem.endswith(f"has {sum(wrong.placeholders)} placeholder tokens for {sum(wrong.rows)} rows")
