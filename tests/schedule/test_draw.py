"""The picture: valid SVG in which nothing overlaps, nothing lies outside, and nothing is missing."""

from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from braid.schedule import Costs, Timeline, draw, forward_only, interleaved, one_f_one_b, simulate, with_sums

SCHEDULES = [
    one_f_one_b(1, 1),
    interleaved(1, 2, 1),
    one_f_one_b(2, 4),
    one_f_one_b(4, 8),
    interleaved(2, 2, 5),
    interleaved(4, 2, 8),
    interleaved(2, 12, 2),
    one_f_one_b(16, 64),
    forward_only(4, 2, 6),
    with_sums(interleaved(4, 3, 4), {"embedding": (0, 3)}),
]
IDS = [f"{s.name}-{s.pp}x{s.virtual}x{s.micro_batches}" for s in SCHEDULES]


def picture(timeline):
    return ElementTree.fromstring(draw(timeline))


def elements(root, tag):
    return list(root.iter("{http://www.w3.org/2000/svg}" + tag))


def number(element, name):
    return float(element.get(name))


def boxes(root):
    """The boxes of ops, without those of the legend, by row."""
    rows = {}
    for rect in elements(root, "rect"):
        if rect.get("class") and number(rect, "height") == 24:
            rows.setdefault(number(rect, "y"), []).append(rect)
    return rows


def extent(text):
    """A careful guess at where a text lies: (left, right, top, bottom)."""
    look = (text.get("class") or "").split()
    size = 15 if "title" in look else 8.5 if "small" in look else 11
    wide = len(text.text or "") * size * (0.62 if "title" in look else 0.56)
    left = number(text, "x") - (wide if "end" in look else wide / 2 if "mid" in look else 0)
    return left, left + wide, number(text, "y") - 0.8 * size, number(text, "y") + 0.2 * size


@pytest.fixture(params=SCHEDULES, ids=IDS)
def timeline(request):
    return simulate(request.param, Costs(message=0.1, sum_copies=0.5))


def test_every_computation_has_its_box_in_the_row_of_its_rank(timeline):
    rows = boxes(picture(timeline))
    timed = [
        sum(span.end > span.start and span.op.act.value in ("F", "B", "SUM_COPIES") for span in row)
        for row in timeline.spans
    ]
    assert [len(rows[y]) for y in sorted(rows)] == timed


def test_boxes_of_a_row_do_not_overlap(timeline):
    for row in boxes(picture(timeline)).values():
        row.sort(key=lambda rect: number(rect, "x"))
        for left, right in pairwise(row):
            assert number(left, "x") + number(left, "width") <= number(right, "x") + 0.011


def test_everything_lies_inside_the_picture(timeline):
    root = picture(timeline)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in elements(root, "rect"):
        if rect.get("x"):
            assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width
            assert 0 <= number(rect, "y") <= number(rect, "y") + number(rect, "height") <= height
    for text in elements(root, "text"):
        left, right, top, bottom = extent(text)
        assert 0 <= left < right + 1e-9 <= width or not text.text
        assert 0 <= top < bottom <= height


def test_texts_do_not_overlap(timeline):
    extents = [extent(text) for text in elements(picture(timeline), "text") if text.text]
    rows = {}
    for left, right, top, bottom in extents:
        rows.setdefault(round(bottom / 4), []).append((left, right, top, bottom))
    for row in rows.values():
        for (left, right, *_), (other_left, other_right, *_) in combinations(row[:200], 2):
            assert right <= other_left + 0.5 or other_right <= left + 0.5


def test_numbers_stay_inside_their_boxes(timeline):
    root = picture(timeline)
    rows = boxes(root)
    inside = [
        text for text in elements(root, "text") if {"large", "small"} & set((text.get("class") or "").split())
    ]
    for text in inside:
        left, right, *_ = extent(text)
        y = max(top for top in rows if top < number(text, "y"))
        assert any(
            number(rect, "x") - 1 <= left and right <= number(rect, "x") + number(rect, "width") + 1
            for rect in rows[y]
        )


def test_numbers_are_left_out_where_boxes_are_narrow():
    def numbers(schedule):
        return draw(simulate(schedule)).count('class="mid ')

    assert numbers(one_f_one_b(2, 4)) == 16
    assert numbers(one_f_one_b(16, 64)) == 16 * 64, "backwards alone have room"
    assert numbers(interleaved(16, 4, 64)) == 0


def test_the_figures_stand_in_the_title():
    svg = draw(simulate(one_f_one_b(4, 8)))
    assert "1f1b · 4 pipeline ranks · 4 segments · 8 micro-batches" in svg
    assert "33 forwards long · bubble 27.3% · live forwards 1 to 4 per rank" in svg


def test_time_is_counted_in_forwards_whatever_the_seconds():
    schedule = one_f_one_b(2, 4)
    assert draw(simulate(schedule, Costs(forward=0.003, backward=0.006))) == draw(simulate(schedule))


def test_a_measured_timeline_may_begin_at_any_time():
    timeline = simulate(one_f_one_b(2, 4))
    later = tuple(
        tuple(replace(span, start=span.start + 64, end=span.end + 64) for span in row) for row in timeline.spans
    )
    assert draw(Timeline(schedule=timeline.schedule, spans=later)) == draw(timeline)


def test_nothing_that_takes_no_time_breaks_the_picture():
    picture(simulate(one_f_one_b(2, 2), Costs(forward=0, backward=0)))


def test_names_are_escaped():
    schedule = one_f_one_b(1, 1)
    assert "&lt;&amp;&gt;" in draw(simulate(replace(schedule, name="<&>")))
