"""Copies to the host and back: one at a time each way, none late that need not be, within bounds of memory."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from braid.schedule.host_link import Back, Out, placed_back, placed_out

LISTS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@st.composite
def outs(draw: st.DrawFn) -> tuple[list[int], list[Out]]:
    """How long the ops of a list last, and copies of what they make."""
    seconds = draw(LISTS)
    places = st.integers(0, len(seconds))
    made = sorted(draw(st.lists(places, max_size=5)))
    bounds = sorted(draw(st.lists(places, min_size=len(made), max_size=len(made))))
    copies = [
        Out(made=first, seconds=draw(st.integers(0, 9)), free_by=max(first, bound))
        for first, bound in zip(made, bounds, strict=True)
    ]
    return seconds, copies


@st.composite
def backs(draw: st.DrawFn) -> tuple[list[int], list[Back]]:
    seconds = draw(LISTS)
    places = st.integers(0, len(seconds) - 1)
    needed = sorted(draw(st.lists(places, max_size=5)))
    bounds = sorted(draw(st.lists(places, min_size=len(needed), max_size=len(needed))))
    copies = [
        Back(needed=last, seconds=draw(st.integers(0, 9)), reload_from=min(last, bound))
        for last, bound in zip(needed, bounds, strict=True)
    ]
    return seconds, copies


def begins_of(seconds: list[int]) -> list[int]:
    return list(accumulate(seconds, initial=0))


@settings(deadline=None)
@given(outs())
def test_copies_out_run_one_after_another_and_are_freed_when_done(case: tuple[list[int], list[Out]]) -> None:
    seconds, copies = case
    begins, found = begins_of(seconds), placed_out(begins_of(seconds), copies)
    assert all(one.end <= other.start for one, other in pairwise(found))
    waited = 0
    for copy, placed in zip(copies, found, strict=True):
        assert copy.made <= placed.place <= copy.free_by
        assert placed.start >= begins[copy.made]
        assert placed.end - placed.start == copy.seconds
        assert placed.late == max(0, placed.end - waited - begins[placed.place])
        if placed.late:
            assert placed.place == copy.free_by, "it waits only where memory is bounded"
        waited += placed.late
    if found and not waited:  # the first place that does not wait
        for copy, placed in zip(copies, found, strict=True):
            assert placed.place == copy.made or begins[placed.place - 1] < placed.end


@settings(deadline=None)
@given(backs())
def test_copies_back_end_before_they_are_needed_unless_memory_forbids_it(
    case: tuple[list[int], list[Back]],
) -> None:
    seconds, copies = case
    begins, found = begins_of(seconds), placed_back(begins_of(seconds), copies)
    assert all(one.place <= other.place for one, other in pairwise(found)), "in the order of the link"
    for copy, placed in zip(copies, found, strict=True):
        assert copy.reload_from <= placed.place <= copy.needed
        assert begins[placed.place] <= placed.start
    if not any(placed.late for placed in found):
        assert all(one.end <= other.start for one, other in pairwise(found))
        assert all(placed.end <= begins[copy.needed] for copy, placed in zip(copies, found, strict=True))


@settings(deadline=None)
@given(backs())
def test_a_list_that_is_followed_waits_only_for_copies_that_are_late(
    case: tuple[list[int], list[Back]],
) -> None:
    """Followed op by op, with copies that start where `RELOAD` stands and the link is free."""
    seconds, copies = case
    found = placed_back(begins_of(seconds), copies)
    now, link, waits, back = 0, 0, 0, dict[int, int]()
    for place, length in enumerate(seconds):
        for number, (copy, placed) in enumerate(zip(copies, found, strict=True)):
            if placed.place == place:
                link = back[number] = max(now, link) + copy.seconds
        until = max([now, *(back[number] for number, copy in enumerate(copies) if copy.needed == place)])
        waits, now = waits + until - now, until + length
    assert waits <= sum(placed.late for placed in found)
    if copies and not any(placed.late for placed in found):
        assert waits == 0


@settings(deadline=None)
@given(backs())
def test_a_copy_is_late_only_if_no_time_between_its_bounds_is_left(case: tuple[list[int], list[Back]]) -> None:
    """With bounds at the begin of the list, a copy is late only if the copies up to some other last longer than
    there is time until that one is needed."""
    seconds, copies = case
    begins = begins_of(seconds)
    free = [Back(needed=each.needed, seconds=each.seconds, reload_from=0) for each in copies]
    late = any(placed.late for placed in placed_back(begins, free))
    sums = list(accumulate(each.seconds for each in free))
    assert late == any(total > begins[each.needed] for total, each in zip(sums, free, strict=True))
