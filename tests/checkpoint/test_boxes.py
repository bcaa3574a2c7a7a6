"""Boxes cut, intersect and cover as a plain count of elements says."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.checkpoint.boxes import Box, cover_fault, cut, overlap

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def shape_and_boxes(draw, most=4):
    shape = draw(shapes)
    boxes = []
    for _ in range(draw(st.integers(0, most))):
        starts = [draw(st.integers(0, size)) for size in shape]
        ends = [draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        boxes.append(Box(offset=tuple(starts), shape=sizes))
    return shape, boxes


def counted(shape, boxes):
    """How many boxes hold each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[box.within(Box.whole(shape))] += 1
    return counts


def expected_fault(shape, boxes):
    counts = counted(shape, boxes)
    for element in itertools.product(*map(range, shape)):
        if counts[element] != 1:
            return element, int(counts[element])
    return None


@settings(deadline=None)
@given(shape_and_boxes())
def test_cover_fault_names_the_first_element_not_held_once(case):
    shape, boxes = case
    assert cover_fault(shape, boxes) == expected_fault(shape, boxes)


@settings(deadline=None)
@given(shape_and_boxes(most=1), st.integers(1, 30), st.data())
def test_cuts_cover_exactly_and_a_lost_or_doubled_one_is_seen(case, most, data):
    shape, _ = case
    boxes = list(cut(Box.whole(shape), most))
    assert all(0 < box.numel <= most for box in boxes)
    assert cover_fault(shape, boxes) is None
    if boxes:
        chosen = data.draw(st.sampled_from(boxes))
        assert cover_fault(shape, [box for box in boxes if box != chosen]) == (chosen.offset, 0)
        assert cover_fault(shape, [*boxes, chosen]) == (chosen.offset, 2)


@settings(deadline=None)
@given(shape_and_boxes(most=1), st.integers(1, 30))
def test_a_cut_is_one_run_of_memory(case, most):
    shape, _ = case
    tensor = torch.empty(shape)
    for box in cut(Box.whole(shape), most):
        assert tensor[box.within(Box.whole(shape))].is_contiguous()


@settings(deadline=None)
@given(shape_and_boxes(most=2))
def test_overlap_holds_the_elements_of_both(case):
    shape, boxes = case
    if len(boxes) == 2:
        both = counted(shape, boxes) == 2
        shared = overlap(*boxes)
        assert torch.equal(counted(shape, [shared] if shared else []) == 1, both)
