"""Writes docs/invariance.md: `python -m tests.topology.table` runs the whole matrix, the long part as well.

With `--rows FILE` it keeps the rows as JSON, or, where the file is there already, writes the page from it.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.topology import report
from tests.topology.cases import NO_GRADIENT
from tests.topology.compare import FLOOR, FP64_BOUND, IDLE_STEP, ROUNDING, STREAMS_FLOOR
from tests.topology.matrix import larger
from tests.topology.report import COMPARED, NARROW, SABOTAGED, Row
from tests.topology.test_matrix import QUICK
from tests.topology.test_precision import BF16_FACTOR, BF16_LOSS_BOUND, FP32_BOUND

PAGE = Path(__file__).parents[2] / "docs" / "invariance.md"

TEXT = """\
# The topology never changes the answer

This page is written by `python -m tests.topology.table`, which runs everything that it tells of. {where}.

{summary}

## What is compared

A step is M micro-batches of fixed global samples, whatever the ranks. The reference is one process with the
same M. Each topology trains two steps from the same seed on the same samples, evaluates, and saves; then it
is compared to the reference on

- every figure of every step: loss, auxiliary and MTP losses, load of experts, length of the gradient;
- every gradient of the first step, before clipping, canonical tensor by canonical tensor;
- every weight and every selection bias after two steps;
- the validation loss;
- every tensor of the checkpoint that all ranks wrote together, the moments of AdamW among them;
- copies: whatever several ranks hold or tell is the same on all of them to the last bit, and what was saved is
  what they hold.

The deviation of a tensor is ‖found - reference‖ / ‖reference‖, where a reference shorter than {floor:.0e}
counts as that long ({floor_squared:.0e} for second moments; {streams:.0e} and its square for hyper-connections,
whose gradients are what is left of terms that cancel); that of a figure is relative in the same way.

One rule is for tensors whose reference gradient is shorter than {rounding:.0e}: it is nothing but rounding, and
ranks have their own. Their gradients and moments are within {rounding:.0e} of the reference, entry by entry,
and their weights within {idle:.0e} for each step, which is the most that AdamW makes of it. These are
{no_gradient}; a test fails where there are others. A
column of a table shows the worst deviation of anything that it stands for. Bounds:

| arithmetic | optimizer | routing | bound |
|---|---|---|---|
| float64 | AdamW | each its own | {fp64:.0e} for everything |
| float32 | gradient descent | recorded by one process, replayed by ranks | {fp32:.0e} for everything |
| bfloat16 | AdamW | recorded by one process, replayed by ranks | {bf16_loss:.0e} for the first loss; below |

A topology is written as its axes of more than one rank, then what data-parallel ranks share (`none`,
`optimizer`, `gradients`, `all`), then the dispatcher where one was asked for, `dual` for DualPipeV and
`overlap`. `v2` are two segments on each
pipeline rank, `replicate2` two copies of the shards. Models are in `tests/topology/cases.py`, topologies in
`tests/topology/matrix.py`: `make test` compares a cover of every pair of choices (model, axes, sharding,
dispatcher, schedule), `make test-long` one of every three and a sample that is drawn from the commit.

    make test                                        {quick} of these comparisons, all sabotages, resharding
    make test-long                                   {long} more, and 24 that are drawn from the commit
    python -m pytest tests/topology -k hybrid-8      some of them
    python -m tests.topology.table                   all of it, and this page

## It can fail

Each of these breaks one reduction, collective or rule, on all ranks alike, and must turn the comparison red;
its test names the check that is there for it. Listed are all checks that saw it.

{sabotages}

## Checkpoints travel

`tests/topology/test_reshard.py` hands a run on from topology to topology (on so many ranks), a step on each:

{chains}

What is loaded and saved again is the same to the last bit, moments and counters included, and the losses are
those of a run that never changed its topology, within {fp64:.0e}. A checkpoint that lacks a tensor, has one too
many or one of another shape is refused on all ranks with the same words, as is one that a single rank cannot
read; a disk that fails on one rank fails the save on all of them and leaves the checkpoint before it.

## bfloat16

Weights are stored, reduced and updated in float32 and gathered in bfloat16, but for routers and the scalars of
heads, which are gathered in float32; a test looks at each of these dtypes. In bfloat16 one process is itself
far from float64. Ranks may be {bf16_factor:g} times as far: the table has the distance of the first
gradient, all weights together, from that of float64 with the same routing.

{narrow}

## All topologies

{compared}
"""


class Collector:
    """A plugin that keeps the reports of all tests."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.reports.append(report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="where rows are kept as JSON")
    chosen = parser.parse_args()
    if chosen.rows is not None and chosen.rows.exists():
        rows = json.loads(chosen.rows.read_text())
    else:
        collector = Collector()
        failed = pytest.main(["-n", "2", "-m", "not exhaustive", "tests/topology"], plugins=[collector])
        if failed:
            return int(failed)
        rows = {kind: report.rows_of(collector.reports, kind) for kind in report.TITLES}
        if chosen.rows is not None:
            chosen.rows.write_text(json.dumps(rows))
    PAGE.write_text(page(rows))
    return 0


def page(rows: Mapping[str, Sequence[Row]]) -> str:
    from tests.topology.test_reshard import CHAINS

    chains = [" → ".join(f"{words or 'dp'} ({world})" for world, words in chain) for chain in CHAINS]
    return TEXT.format(
        where=f"Last: torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        summary=summary(rows),
        floor=FLOOR,
        floor_squared=FLOOR**2,
        streams=STREAMS_FLOOR,
        rounding=ROUNDING[torch.float64],
        idle=IDLE_STEP[torch.float64],
        no_gradient="; ".join(
            f"of `{model}`: {', '.join(sorted(names))}" for model, names in NO_GRADIENT.items()
        ),
        fp64=FP64_BOUND,
        fp32=FP32_BOUND,
        bf16_loss=BF16_LOSS_BOUND,
        bf16_factor=BF16_FACTOR,
        quick=len(QUICK),
        long=len(larger(QUICK)),
        chains="\n".join(f"- {chain}" for chain in chains),
        sabotages="\n".join(report.markdown(rows[SABOTAGED])),
        narrow="\n".join(report.markdown(rows[NARROW])),
        compared="\n".join(report.markdown(rows[COMPARED])),
    )


def summary(rows: Mapping[str, Sequence[Row]]) -> str:
    """Two sentences with the figures that matter."""
    exact = [row for row in rows[COMPARED] if row["dtype"] == "fp64"]
    different = {(row["ranks"], row["topology"]) for row in exact}
    worst = max(row[column] for row in exact for column in report.COLUMNS if row[column] is not None)
    return (
        f"**{len(different)} topologies on 2 to 8 ranks, {len(exact)} comparisons in float64: "
        f"the worst deviation of anything is {worst:.0e}.** {len(rows[SABOTAGED])} sabotages, all seen."
    )


if __name__ == "__main__":
    raise SystemExit(main())
