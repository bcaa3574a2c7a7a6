"""The tables of docs/schedules.md, by the simulator: `python -m tests.schedule.table` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from braid.schedule import (
    Act,
    Chain,
    Costs,
    Options,
    Schedule,
    dual_pipe_v,
    interleaved,
    one_f_one_b,
    overlapped,
    simulate,
)
from tests.schedule.cases import fine

SIZES = ((2, 4), (2, 16), (4, 4), (4, 8), (4, 32), (8, 16), (8, 64))
"""Pipeline ranks and micro-batches."""

COMPUTE = Costs(phases={"mix": 1.0})
"""F, B and W of a segment take 1 each."""

EXPERTS = Costs()
"""For experts: mix and experts take 1 each, dispatch and combine a half."""


def of_segments(text: str, pp: int) -> tuple[Chain, ...]:
    """A pipeline of equal segments, two for each rank."""
    return fine("|".join([text] * (2 * pp)), pp)


def held_peaks(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, how many segments of micro-batches hold activations at the peak: from the first phase of
    their forward to the last op about them, weight gradients included."""
    peaks = []
    for ops in schedule.ops:
        last = {(op.micro_batch, op.segment): place for place, op in enumerate(ops) if op.act.computes}
        held, peak = set[tuple[int | None, int | None]](), 0
        for place, op in enumerate(ops):
            if not op.act.computes:
                continue
            turn = (op.micro_batch, op.segment)
            held |= {turn} if op.act is Act.F else set()
            peak = max(peak, len(held))
            held -= {turn} if last[turn] == place else set()
        peaks.append(peak)
    return tuple(peaks)


def computing() -> Iterator[list[str]]:
    """Without experts: idle time of a rank in forwards of a segment, bubble, and segments held at the peak."""
    for pp, micro_batches in SIZES:
        made = (
            (one_f_one_b(pp, micro_batches), Costs(forward=2.0, backward=4.0), 2),
            (interleaved(pp, 2, micro_batches), Costs(forward=1.0, backward=2.0), 1),
            (
                dual_pipe_v(of_segments("-", pp), pp=pp, micro_batches=micro_batches, overlap=False),
                COMPUTE,
                1,
            ),
        )
        row = [str(pp), str(micro_batches)]
        for schedule, costs, size in made:
            timeline, peaks = simulate(schedule, costs), held_peaks(schedule)
            spread = sorted({size * min(peaks), size * max(peaks)})
            row += [f"{max(timeline.idle):g}", f"{timeline.bubble:.1%}", " to ".join(map(str, spread))]
        yield row


def exchanging() -> Iterator[list[str]]:
    """With experts: how long a step takes, in forwards of one `mix`, and segments held at the peak where phases
    run beside each other. What is computed takes 12 for each micro-batch."""
    for pp, micro_batches in SIZES:
        found = of_segments("[*E]", pp)
        apart = dual_pipe_v(found, pp=pp, micro_batches=micro_batches, overlap=False)
        beside = dual_pipe_v(found, pp=pp, micro_batches=micro_batches)
        late = overlapped(found, pp=pp, micro_batches=micro_batches, options=Options(delayed=True))
        spans = [
            simulate(one_f_one_b(pp, micro_batches), Costs(forward=6.0, backward=10.0)).makespan,
            simulate(interleaved(pp, 2, micro_batches), Costs(forward=3.0, backward=5.0)).makespan,
            *(simulate(schedule, EXPERTS).makespan for schedule in (late, apart, beside)),
        ]
        held = [str(max(held_peaks(schedule))) for schedule in (late, beside)]
        yield [str(pp), str(micro_batches), str(12 * micro_batches), *(f"{span:g}" for span in spans), *held]


def table(head: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> tuple[str, str]:
    three = ("1F1B", "interleaved", "DualPipeV")
    head = ["pp", "micro-batches", *(f"{name} {what}" for name in three for what in ("idle", "bubble", "held"))]
    names = ["computed", "1F1B", "interleaved", "overlapped", "DualPipeV", "DualPipeV, overlap"]
    names += ["overlapped held", "DualPipeV held"]
    return table(head, computing()), table(["pp", "micro-batches", *names], exchanging())


if __name__ == "__main__":
    print("\n\n".join(tables()))
