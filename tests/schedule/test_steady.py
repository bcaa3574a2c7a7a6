"""The steady part of a timeline: one period, repeated, is the whole again."""

from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from braid.schedule import Costs, Options, draw, dual_pipe_v, one_f_one_b, overlapped, simulate
from braid.schedule.steady import find_steady, shortened
from tests.schedule.cases import fine


def phased(pattern, pp, micro_batches, build=overlapped, **options):
    found = fine(pattern, 2 * pp if build is dual_pipe_v else pp, late_weights=False)
    return build(found, pp=pp, micro_batches=micro_batches, options=Options(**options))


SCHEDULES = {
    "overlap": phased("[*E]" * 4, 1, 12),
    "overlap, weights delayed": phased("[*E]" * 4, 2, 14, delayed=True),
    "dual_pipe_v": phased("[*E]" * 4, 2, 16, dual_pipe_v),
    "1f1b": one_f_one_b(4, 16),
}


def key(span, *, by=0, later=0.0):
    op = span.op if span.op.micro_batch is None else replace(span.op, micro_batch=span.op.micro_batch + by)
    return str(op), round(span.start + later, 6), round(span.end + later, 6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_period_repeated_is_the_whole(name):
    timeline = simulate(SCHEDULES[name], Costs(message=0.1))
    steady = find_steady(timeline)
    assert steady is not None
    assert steady.count >= 2
    short = shortened(timeline, steady)
    slack = 1e-6 * steady.length
    for row, kept in zip(timeline.spans, short.spans, strict=True):
        again = Counter()
        for span in kept:
            if span.start < steady.begin - slack:
                again[key(span)] += 1
            elif span.start < steady.end - slack:
                repeated = range(steady.count)
                again.update(key(span, by=n * steady.micro_batches, later=n * steady.length) for n in repeated)
            else:
                again[key(span, later=steady.removed)] += 1
        whole = Counter(key(span) for span in row if span.end > span.start and span.op.act.computes)
        assert whole.keys() - again.keys() == again.keys() - whole.keys() == set()
        assert whole == again


def test_without_a_period_there_is_none():
    assert find_steady(simulate(one_f_one_b(4, 2), Costs())) is None
    assert find_steady(simulate(one_f_one_b(2, 1), Costs())) is None


def test_a_short_drawing_has_one_period_and_a_legend_of_phases():
    whole = simulate(phased("[*E]" * 8, 1, 60), Costs())
    steady = find_steady(whole)
    long, short = draw(whole), draw(whole, shorten=True)
    assert len(short) < len(long) / 5
    texts = [each.text for each in ElementTree.fromstring(short).iter("{http://www.w3.org/2000/svg}text")]
    assert f"one of {steady.count} equal periods" in texts
    assert {"warm-up", "cool-down"} <= set(texts)
    assert any("mix, dispatch, experts, combine" in (text or "") for text in texts)
    assert texts[0] in long, "the title is that of the whole"
    assert short.count("<g><title>") == sum(
        span.end > span.start and span.op.act.value in "FBW"
        for row in shortened(whole, steady).spans
        for span in row
    )


def test_what_has_no_phases_is_drawn_as_ever():
    timeline = simulate(one_f_one_b(4, 16), Costs())
    assert draw(timeline, shorten=True) == draw(timeline)
