"""Where the steps of a trace went: seconds of each rank by kind, waiting included, and the slowest rank.

Every moment of a step counts once, for the first of these that is there: computation; what a rank waits for
while it computes nothing (messages, communication on the other stream, weights, copies); what the host does
around the ops (the batch, the norm, the optimizer); nothing at all. The parts of a rank add up to its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

KINDS = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "W": "weight gradients",
        "RECOMPUTE": "recompute",
        "RECV_F": "waiting for activations",
        "RECV_B": "waiting for gradients",
        "SEND_F": "sending",
        "SEND_B": "sending",
        "SUM_COPIES": "all-reduce of copies",
        "UNSHARD": "gathering weights",
        "WAIT": "gathering weights",
        "RESHARD": "freeing weights",
        "ACCUM": "accumulating gradients",
        "REDUCE_GRAD": "reducing gradients",
        "FINISH": "reducing gradients",
        "OFFLOAD": "copies to the host",
        "FREE": "copies to the host",
        "RELOAD": "copies to the host",
    }
)
"""The words for ops, by their category in a trace."""
EXPERTS = "exchange with experts"
REST = "nothing"
ORDER = ("compute", "messages", "communication", "weights", "copies", "host")
"""Threads of a rank, by what counts first."""
WAITING = (
    "waiting for activations",
    "waiting for gradients",
    "all-reduce of copies",
    "gathering weights",
    "reducing gradients",
    EXPERTS,
    REST,
)
"""Kinds in which a rank may wait for another."""


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """The parts of one step on one rank."""

    rank: int
    step: str
    seconds: float
    parts: Mapping[str, float]
    """By kind; they add up to the step."""
    phases: Mapping[str, float]
    """Of the computation, by phase: its kind, such as `mix`, or `segment`."""

    @property
    def computing(self) -> float:
        return sum(self.parts.get(KINDS[act], 0.0) for act in ("F", "B", "W", "RECOMPUTE"))

    @property
    def waiting(self) -> float:
        return sum(self.parts.get(kind, 0.0) for kind in WAITING)


def rank_seconds(trace: Mapping[str, Any]) -> list[RankSeconds]:
    """The parts of every step on every rank of a trace. Raises a `ValueError` if it has none."""
    try:
        events = [event for event in trace["traceEvents"] if event.get("ph") in ("X", "M")]
        threads = {
            (event["pid"], event["tid"]): str(event["args"]["name"]).partition(" ")[0]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        spans = [event for event in events if event["ph"] == "X"]
        steps = [event for event in spans if event.get("cat") == "step"]
        by_rank: dict[int, list[Any]] = {}
        for span in spans:
            if span.get("cat") != "step":
                by_rank.setdefault(span["pid"], []).append(span)
        found = [_rank_seconds(step, by_rank.get(step["pid"], ()), threads) for step in steps]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no trace of braid: {error!r}") from error
    if not found:
        raise ValueError("it has no steps")
    return found


def _rank_seconds(
    step: Mapping[str, Any], spans: Iterable[Mapping[str, Any]], threads: Mapping[tuple[int, int], str]
) -> RankSeconds:
    begin, end = step["ts"], step["ts"] + step["dur"]
    boxes = []
    for span in spans:
        start, stop = max(begin, span["ts"]), min(end, span["ts"] + span["dur"])
        if stop > start:
            thread = threads.get((span["pid"], span["tid"]), "host")
            boxes.append((start, stop, ORDER.index(thread) if thread in ORDER else len(ORDER), span))
    parts: dict[str, float] = {}
    phases: dict[str, float] = {}
    for seconds, counted in _exclusive(boxes, begin, end):
        kind = REST if counted is None else _kind(counted)
        parts[kind] = parts.get(kind, 0.0) + seconds / 1e6
        if counted is not None and counted.get("cat") in ("F", "B", "W", "RECOMPUTE"):
            phase = str(counted["args"].get("phase") or "segment").split(".")[-1]
            phases[phase] = phases.get(phase, 0.0) + seconds / 1e6
    return RankSeconds(
        rank=step["pid"], step=step["name"], seconds=step["dur"] / 1e6, parts=parts, phases=phases
    )


def _kind(span: Mapping[str, Any]) -> str:
    phase = str(span["args"].get("phase") or "")
    if phase.endswith(("dispatch", "combine")):
        return EXPERTS
    return KINDS.get(str(span.get("cat")), str(span["name"]))


def _exclusive(
    boxes: Sequence[tuple[float, float, int, Mapping[str, Any]]], begin: float, end: float
) -> Iterator[tuple[float, Mapping[str, Any] | None]]:
    """Every moment from begin to end once, with the box that counts for it."""
    edges = sorted({begin, end, *(edge for box in boxes for edge in box[:2])})
    opening = sorted(range(len(boxes)), key=lambda place: boxes[place][0])
    active: dict[int, tuple[int, float]] = {}
    following = 0
    for start, stop in pairwise(edges):
        while following < len(opening) and boxes[opening[following]][0] <= start:
            place = opening[following]
            active[place] = (boxes[place][2], -boxes[place][0])  # of one thread, the one that began last
            following += 1
        for place in [place for place in active if boxes[place][1] <= start]:
            del active[place]
        best = min(active, key=lambda place: active[place]) if active else None
        yield stop - start, None if best is None else boxes[best][3]


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """The rank that computes for longest, so that others wait for it."""

    rank: int
    computing: float
    """Seconds of a step, on average."""
    median: float
    """Of all ranks."""


def slowest(ranks: Sequence[RankSeconds]) -> Slowest:
    """Over all steps that are there."""
    by_rank: dict[int, list[float]] = {}
    for each in ranks:
        by_rank.setdefault(each.rank, []).append(each.computing)
    means = {rank: statistics.fmean(values) for rank, values in by_rank.items()}
    rank = max(means, key=lambda each: (means[each], -each))
    return Slowest(rank=rank, computing=means[rank], median=statistics.median(means.values()))
