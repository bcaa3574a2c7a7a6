"""Spikes, against means and deviations by `statistics`."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.optim.spikes import SpikeRecord, SpikeWindow

HOST = torch.device("cpu")


def judged(window, norm, loss, policy="skip", sigma=3.0, most_skipped=5):
    numbers = torch.tensor([norm, loss], dtype=torch.float64)
    apply, (a, b, skipped) = window.judge(
        *numbers.unbind(), policy=policy, sigma=sigma, most_skipped=most_skipped
    )
    return bool(apply), (float(a), float(b)), bool(skipped)


values = st.one_of(st.floats(0, 10), st.sampled_from([1e8, math.nan, math.inf]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, values), min_size=1, max_size=30), st.integers(2, 8), st.integers(0, 3))
def test_limits_and_decisions_are_those_of_plain_statistics(steps, size, most_skipped):
    window = SpikeWindow(size, HOST)
    seen: list[tuple[float, float]] = []
    in_a_row = 0
    for place, step in enumerate(steps):
        recent = seen[-size:]
        limits = [math.inf, math.inf]
        if len(recent) >= max(2, size // 2):
            limits = [statistics.fmean(c) + 3 * statistics.pstdev(c) for c in zip(*recent, strict=True)]
        apply, found, skipped = judged(window, *step, most_skipped=most_skipped)
        assert found == pytest.approx(limits, rel=1e-6, abs=1e-9)
        finite = all(map(math.isfinite, step))
        clear = all(abs(v - limit) > 1e-6 * (1 + abs(v)) for v, limit in zip(step, found, strict=True))
        if finite and clear:
            beyond = any(v > limit for v, limit in zip(step, limits, strict=True))
            assert skipped == (beyond and in_a_row < most_skipped)
        assert apply == (finite and not skipped)
        if finite:
            seen.append(step)
            in_a_row = in_a_row + 1 if skipped else 0
        if place % 5 == 4:  # a resume changes nothing
            stored = json.loads(json.dumps(window.record().to_json()))
            window = SpikeWindow(size, HOST)
            window.restore(SpikeRecord.from_json(stored))


def test_off_only_refuses_what_is_not_finite():
    window = SpikeWindow(2, HOST)
    for norm in (1.0, 1.0, 1e9):
        assert judged(window, norm, 1.0, policy="off") == (True, (math.inf, math.inf), False)
    assert not judged(window, math.nan, 1.0, policy="off")[0]
    assert window.record() == SpikeRecord()


def test_a_warning_applies_the_step_and_a_level_that_stays_is_no_spike_any_more():
    window = SpikeWindow(4, HOST)
    for _ in range(4):
        judged(window, 1.0, 2.0, policy="warn")
    apply, (limit, _), skipped = judged(window, 9.0, 2.0, policy="warn")
    assert (apply, limit, skipped) == (True, 1.0, False)
    assert judged(window, 9.0, 2.0, policy="warn")[1][0] > 9.0


def test_another_window_takes_the_newest():
    window = SpikeWindow(6, HOST)
    for norm in range(6):
        judged(window, float(norm), 0.0, policy="warn")
    shorter = SpikeWindow(2, HOST)
    shorter.restore(window.record())
    assert shorter.record().values[0] == (4.0, 5.0)
    longer = SpikeWindow(9, HOST)
    longer.restore(window.record())
    assert longer.record() == window.record()


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0], ["1", 2.0], [True, 2.0]])
def test_a_stored_window_with_impossible_numbers_is_refused(values):
    with pytest.raises(ValueError, match="finite numbers"):
        SpikeRecord.from_json({"grad_norm": values, "loss": [1.0, 2.0], "skipped_in_a_row": 0})
