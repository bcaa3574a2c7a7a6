"""Traces: every op of a list once and in order, in boxes that never overlap within a thread."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.schedule import (
    Costs,
    OpSpan,
    Options,
    Schedule,
    Stream,
    build,
    overlapped,
    parse_op,
    simulate,
    with_sums,
)
from braid.schedule.trace import Lane, RankStep, chrome_trace, lane_of, predicted_trace
from tests.schedule.cases import fine


def boxes_of(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The ops of each process, in the order in which they began."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] not in ("step", "host"):
            found[event["pid"]].append(event)
    return found


def check_well_formed(trace: dict[str, Any]) -> None:
    """What a viewer relies on."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event.keys() >= {"name", "ph", "pid", "tid"}
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= begin + 1e-2 for (_, end), (begin, _) in itertools.pairwise(row))
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)


def check_arrows(trace: dict[str, Any]) -> int:
    """Every message begins once and ends once, not before; returns how many there are."""
    ends = {phase: {} for phase in "sf"}
    for event in trace["traceEvents"]:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event["ts"]
    assert ends["s"].keys() == ends["f"].keys()
    assert all(ends["f"][name] >= sent for name, sent in ends["s"].items())
    return len(ends["s"])


def piped(pp: int, virtual: int, micro_batches: int) -> Schedule:
    name = "1f1b" if virtual == 1 else "interleaved"
    built = build(name, pp=pp, virtual=virtual, micro_batches=micro_batches)
    return with_sums(built, {"embedding": (0, pp - 1)}) if pp > 1 else built


def phased(micro_batches: int) -> Schedule:
    built = fine("[*E]-[*E]", shared_experts=True)
    return overlapped(built, pp=1, micro_batches=micro_batches, options=Options(delayed=True))


@pytest.mark.parametrize(
    "schedule",
    [piped(1, 1, 3), piped(3, 1, 5), piped(2, 2, 4), phased(1), phased(3)],
    ids=["alone", "1f1b", "interleaved", "overlapped, one micro-batch", "overlapped"],
)
def test_a_predicted_trace_has_every_op_of_the_plan_once(schedule):
    trace = predicted_trace(simulate(schedule, Costs(message=0.1)), range(0, 4 * schedule.pp, 4), second=1e-3)
    check_well_formed(trace)
    boxes = boxes_of(trace)
    assert sorted(boxes) == [4 * stage for stage in range(schedule.pp)]
    for stage, ops in enumerate(schedule.ops):
        assert sorted(box["name"] for box in boxes[4 * stage]) == sorted(map(str, ops))
    if not schedule.phases:
        for stage, ops in enumerate(schedule.ops):
            by_time = sorted(boxes[4 * stage], key=lambda box: (box["ts"], box["ts"] + box["dur"]))
            order = {str(op): place for place, op in enumerate(ops)}
            computing = [order[box["name"]] for box in by_time if parse_op(box["name"]).act.computes]
            assert computing == sorted(computing)
    assert check_arrows(trace) == sum(op.act.sends for ops in schedule.ops for op in ops)


def test_phases_stand_on_the_thread_of_their_stream():
    trace = predicted_trace(simulate(phased(2)), [0])
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for box in boxes_of(trace)[0]:
        communicates = box["args"]["phase"].endswith(("dispatch", "combine")) and box["cat"] != "W"
        assert names[box["tid"]] == ("communication" if communicates else "compute")


def test_a_predicted_receive_lasts_as_long_as_nothing_is_computed():
    """Rank 0 reaches the receive of a gradient long before it arrives, and computes in between."""
    built = fine("[*E][*E]", 2)
    timeline = simulate(overlapped(built, pp=2, micro_batches=6), Costs(message=0.3))
    boxes = boxes_of(predicted_trace(timeline, [0, 1]))
    waited = 0.0
    for rank in boxes:
        computing = [box for box in boxes[rank] if box["cat"] in "FB" and ":" in box["name"]]
        computing = [box for box in computing if not box["name"].endswith(("dispatch", "combine"))]
        for box in boxes[rank]:
            if box["cat"].startswith("RECV") and box["dur"]:
                waited += box["dur"]
                within = (box["ts"], box["ts"] + box["dur"])
                assert not any(
                    c["ts"] < within[1] - 1 and c["ts"] + c["dur"] > within[0] + 1 for c in computing
                )
    assert waited > 0


def test_every_act_has_its_lane():
    lanes = {
        "F0.0": Lane.COMPUTE,
        "B0.0:0.mix": Lane.COMPUTE,
        "SEND_F0.0>1": Lane.MESSAGES,
        "RECV_B0.0<1": Lane.MESSAGES,
        "SUM_COPIES[embedding:grad@0,1]": Lane.COMMUNICATION,
        "UNSHARD(head)": Lane.WEIGHTS,
        "FINISH": Lane.WEIGHTS,
    }
    assert {text: lane_of(parse_op(text), None) for text in lanes} == lanes
    assert lane_of(parse_op("F0.0:0.dispatch"), Stream.COMMUNICATION) is Lane.COMMUNICATION


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F0.0", "UNSHARD(a)", "RECV_F0.0<1", "SUM_COPIES"]),
            st.integers(0, 50),
            st.integers(0, 20),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_boxes_of_a_thread_never_overlap_whatever_the_times(given_spans, steps):
    strips = [
        RankStep(
            rank=5,
            stage=0,
            pipeline=0,
            step=step,
            begin=100.0 * step,
            end=100.0 * step + 90,
            spans=tuple(
                OpSpan(op=parse_op(op), start=100.0 * step + start, end=100.0 * step + start + length)
                for op, start, length in given_spans
            ),
        )
        for step in range(steps)
    ]
    trace = chrome_trace(strips, lambda op: None, title="measured ")
    check_well_formed(trace)
    assert len(boxes_of(trace)[5]) == steps * len(given_spans)
    marks = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert [mark["name"] for mark in marks] == [f"step {step}" for step in range(steps)]


def test_a_trace_of_nothing_is_a_trace():
    assert chrome_trace([], lambda op: None)["traceEvents"] == []
