"""The picture: valid SVG in which nothing overlaps, nothing lies outside, and nothing is missing."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from braid.model import declaration
from braid.schedule import (
    Costs,
    Options,
    Timeline,
    draw,
    dual_pipe_v,
    forward_only,
    interleaved,
    one_f_one_b,
    overlapped,
    parse_op,
    simulate,
    with_sums,
)
from braid.schedule import in_phases as phase_by_phase
from braid.schedule.lowering import POLICIES, lowered
from braid.schedule.recompute import with_replays
from braid.schedule.views import stream_of
from tests.schedule.cases import cut_for, fine, meshes


def in_phases(pattern, pp, micro_batches, build=overlapped, **options):
    segments = 2 * pp if build is dual_pipe_v else pp
    found = fine(pattern, segments, late_weights=options.pop("late_weights", False))
    return build(found, pp=pp, micro_batches=micro_batches, options=Options(**options))


def by_blocks(schedule, blocks, recompute=()):
    """The schedule as a plan has it: with so many blocks in each segment, and ops about weights."""
    text = "|".join(["[*-]" * blocks] * schedule.segments)
    chains = declaration.chains(cut_for(text, schedule.segments), declaration.Form())
    whole = with_replays(phase_by_phase(schedule, chains), recompute)
    return lowered(whole, meshes(text, schedule.segments), POLICIES["all"])


PHASED = [
    in_phases("[*E]", 1, 1),
    in_phases("[*-][*E][*E]", 1, 5, delayed=True, late_weights=True),
    in_phases("[*E][*E]/*E", 1, 11, paired_ends=True),
    in_phases("[*E]" * 4, 2, 4, delayed=True),
    in_phases("[*E]" * 4, 2, 3, dual_pipe_v),
    in_phases("[*E]" * 48, 1, 12),
]
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
    *PHASED,
]
IN_BLOCKS = [
    by_blocks(one_f_one_b(2, 4), 2),
    by_blocks(one_f_one_b(2, 3), 3, ("norm", "core")),
    by_blocks(interleaved(2, 2, 12), 8, ("full",)),
]
"""What is drawn by segments, as far as nothing is recomputed."""
BOXED = ("F", "B", "W", "RECOMPUTE", "SUM_COPIES")
IDS = [f"{s.name}-{s.pp}x{s.virtual}x{s.micro_batches}" for s in SCHEDULES]


def picture(timeline):
    return ElementTree.fromstring(draw(timeline))


def elements(root, tag):
    return list(root.iter("{http://www.w3.org/2000/svg}" + tag))


def number(element, name):
    return float(element.get(name))


def boxes(root):
    """The boxes of ops, without those of the legend, by the lane that they lie in."""
    rows = {}
    for group in elements(root, "g"):
        (rect,) = elements(group, "rect")
        rows.setdefault(number(rect, "y"), []).append(rect)
    return rows


def drawn(timeline):
    """What takes time, by the lane that it belongs into: (rank, whether it is the lower one)."""
    stream, lanes = stream_of(timeline.schedule), {}
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            if span.end > span.start and span.op.act.value in BOXED:
                lower = getattr(stream(span.op), "name", "") == "COMMUNICATION"
                lanes.setdefault((rank, lower), []).append(span)
    return lanes


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


@pytest.fixture(params=[*SCHEDULES, *IN_BLOCKS], ids=[*IDS, "in blocks", "norms again", "all again"])
def shown(request):
    return simulate(request.param, Costs(message=0.1, sum_copies=0.5))


def test_every_computation_has_its_box_in_the_row_of_its_rank(timeline):
    rows, lanes = boxes(picture(timeline)), drawn(timeline)
    assert [len(rows[y]) for y in sorted(rows)] == [len(lanes[lane]) for lane in sorted(lanes)]


def test_every_box_says_what_it_is_and_when(timeline):
    told = [title.text for group in elements(picture(timeline), "g") for title in elements(group, "title")]
    spans = [span for row in timeline.spans for span in row]
    timed = [span for span in spans if span.end > span.start and span.op.act.value in BOXED]
    forwards = [span for span in spans if span.op.act.value == "F"]
    turns = {(span.op.micro_batch, span.op.segment) for span in forwards}
    forward = sum(span.end - span.start for span in forwards) / len(turns)
    for title, span in zip(told, timed, strict=True):
        name, *about, when = title.split(" · ")
        op = span.op
        parts = (("micro-batch", op.micro_batch), ("segment", op.segment), ("phase", op.phase))
        assert name == str(op)
        assert about == [f"{word} {value}" for word, value in parts if value is not None]
        begin, end = map(float, re.fullmatch(r"([\d.]+) to ([\d.]+) forwards", when).groups())
        assert begin == pytest.approx(span.start / forward, abs=6e-4)
        assert end == pytest.approx(span.end / forward, abs=6e-4)


def test_boxes_of_a_row_do_not_overlap(shown):
    for row in boxes(picture(shown)).values():
        row.sort(key=lambda rect: number(rect, "x"))
        for left, right in pairwise(row):
            assert number(left, "x") + number(left, "width") <= number(right, "x") + 0.011


def test_everything_lies_inside_the_picture(shown):
    root = picture(shown)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in elements(root, "rect"):
        if rect.get("x"):
            assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width
            assert 0 <= number(rect, "y") <= number(rect, "y") + number(rect, "height") <= height
    for text in elements(root, "text"):
        left, right, top, bottom = extent(text)
        assert 0 <= left < right + 1e-9 <= width or not text.text
        assert 0 <= top < bottom <= height


def test_texts_do_not_overlap(shown):
    extents = [extent(text) for text in elements(picture(shown), "text") if text.text]
    rows = {}
    for left, right, top, bottom in extents:
        rows.setdefault(round(bottom / 4), []).append((left, right, top, bottom))
    for row in rows.values():
        for (left, right, *_), (other_left, other_right, *_) in combinations(row[:200], 2):
            assert right <= other_left + 0.5 or other_right <= left + 0.5


def test_numbers_stay_inside_their_boxes(shown):
    root = picture(shown)
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


@pytest.mark.parametrize("schedule", PHASED, ids=IDS[-len(PHASED) :])
def test_boxes_of_phases_have_the_numbers_of_their_micro_batches(schedule):
    """Each where it has room, in the lower lane as well; so have weight gradients."""
    numbered = set()
    for group in elements(picture(simulate(schedule)), "g"):
        (rect,), (title,), texts = (elements(group, tag) for tag in ("rect", "title", "text"))
        micro_batch = re.search(r"micro-batch (\d+)", title.text).group(1)
        assert [text.text for text in texts] in ([], [micro_batch])
        assert texts or number(rect, "width") < 6.8 * len(micro_batch) + 1.5, f"{title.text} has room"
        numbered |= {rect.get("class")[0] + ("" if number(rect, "height") > 10 else "*") for _ in texts}
    every = {"f", "f*", "b", "b*"} | ({"w"} if schedule.delayed else set())
    assert numbered == (set() if schedule is PHASED[-1] else every)


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


# ------------------------------------------------------------------------- phases that do not communicate


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(1, 3), one_f_one_b(4, 8), interleaved(2, 2, 5), forward_only(2, 2, 3)],
    ids=lambda schedule: schedule.name,
)
def test_phases_that_run_one_after_the_other_are_one_box(schedule, blocks):
    phased = simulate(by_blocks(schedule, blocks))
    assert any(span.op.act.value == "UNSHARD" for span in phased.spans[0])
    costs = Costs(forward=float(blocks), backward=2.0 * blocks)
    assert draw(phased) == draw(simulate(schedule, costs))


def test_what_is_recomputed_in_between_has_boxes_of_its_own():
    timeline = simulate(by_blocks(one_f_one_b(2, 2), 2, ("block",)))
    root = picture(timeline)
    told = {}
    for group in elements(root, "g"):
        (rect,), (title,) = elements(group, "rect"), elements(group, "title")
        told.setdefault(number(rect, "y"), []).append(title.text.split(" · ")[0])
    first, last = (told[y] for y in sorted(told))
    back = ["RECOMPUTE{0}.{1}:{3}.block", "B{0}.{1}:{3}.block", "RECOMPUTE{0}.{1}:{2}.block"]
    assert last == [
        text.format(m, 1, 2, 3) for m in range(2) for text in ("F{0}.{1}", *back, "B{0}.{1}:{2}.block")
    ]
    # The backward of the first segment ends in that of the embedding, which takes no time.
    ends = [text.format(m, 0, 0, 1) for m in range(2) for text in (*back, "B{0}.{1}")]
    assert first == ["F0.0", "F1.0", *ends]
    assert {number(rect, "height") for row in boxes(root).values() for rect in row} == {24}
    shown = [text.text for text in elements(root, "text")]
    assert "recompute" in shown
    assert not any("lower lane" in (text or "") for text in shown)


def test_messages_between_phases_part_them():
    """None stand there in a plan; a measured timeline may have any order."""
    schedule = by_blocks(one_f_one_b(1, 1), 2)
    (row,) = simulate(schedule).spans
    place = next(place for place, span in enumerate(row) if str(span.op) == "F0.0:1.block")
    message = replace(row[place], op=parse_op("SEND_F0.0>1"), end=row[place].start)
    told = draw(Timeline(schedule=schedule, spans=((*row[:place], message, *row[place:]),)))
    assert told.count("<title>F0.0") == 2
