"""How close schedules of modules come to the shortest possible: `python -m tests.schedule.module_table [COUNT]`

The makespan over a bound that no schedule can beat, over random graphs (`module_cases.drawn`) of whole
segments, in training, with messages that take no time.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from dataclasses import replace

from braid.schedule import Costs, multimodule, simulate
from tests.schedule.module_cases import PLACES, Case, drawn, shortest

AHEADS = ("all", "2 lead", "lead")


def costs(case: Case) -> Costs:
    return Costs(
        forward=tuple(float(each.forward) for each in case.segments),
        backward=tuple(float(each.backward) for each in case.segments),
    )


def ratios(count: int) -> dict[tuple[str, str], list[float]]:
    """By place and `ahead`, the ratios of so many cases, in order."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in range(count):
        case = drawn(seed)
        if case.language.phases or not case.language.backward:
            continue
        for ahead in AHEADS if case.place != "disjoint" else AHEADS[1:2]:
            case = replace(case, ahead=ahead)
            schedule = multimodule(case.language, case.segments, case.edges, ahead=case.aheads())
            found[case.place, ahead].append(simulate(schedule, costs(case)).makespan / shortest(case))
    return {key: sorted(each) for key, each in found.items()}


def medians(count: int) -> dict[tuple[str, str], float]:
    return {key: statistics.median(each) for key, each in ratios(count).items()}


def table(count: int) -> str:
    lines = ["| | ahead | graphs | median | 9 of 10 below |", "|---|---|---:|---:|---:|"]
    found = ratios(count)
    for place in PLACES:
        for ahead in AHEADS:
            if each := found.get((place, ahead)):
                ninth = each[int(0.9 * len(each))]
                lines.append(
                    f"| {place} | {ahead} | {len(each)} | {statistics.median(each):.2f} | {ninth:.2f} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
