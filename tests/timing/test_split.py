"""Pipelines cut by predicted time: no other placement of `|` has a faster slowest rank that fits."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest

from braid.cli import main
from braid.config import Run
from braid.errors import ExitCode
from braid.pattern import compact, cut_into, joined, parse
from braid.planning.estimate import estimate
from braid.planning.plan import draft
from braid.timing.calibration import load
from braid.timing.meter import ClusterMeter
from braid.timing.search.by_time import cut_by_time
from braid.timing.search.choices import Space
from braid.timing.search.simulate import Setting, timed
from braid.timing.split import split_by_time
from braid.timing.step import Stepper
from tests.timing.test_step import CLUSTER, qwen

COMPUTED = ("products", "attention", "scans", "memory", "tp")
"""Parts of a step that a rank is busy with, besides exchanges with experts that nothing hides."""
CASES = {
    "1f1b": qwen("[*E]x2[*][*E]", micro_batches=2, pp=3, ep=2, shard="optimizer"),
    "recompute": qwen("[*]x3[*E]x3", micro_batches=2, pp=2, ep=2, shard="optimizer", recompute=("full",)),
    "dual_pipe_v": qwen(
        "[*][*E]x3", micro_batches=4, pp=2, ep=2, shard="optimizer", schedule="dual_pipe_v", overlap=True
    ),
    "tensor parallel": qwen("[*E]x2[*]x3", micro_batches=2, pp=2, tp=2, shard="optimizer"),
}


def every_cut(run: Run) -> Iterator[Run]:
    """The run with `|` in all places."""
    layout = joined(parse(run.model.pattern))
    count = run.mesh.pp * (2 if run.mesh.schedule == "dual_pipe_v" else 1)
    for places in combinations_with_replacement(range(len(layout.blocks) + 1), count - 1):
        sizes = [end - start for start, end in pairwise([0, *places, len(layout.blocks)])]
        yield replace(run, model=replace(run.model, pattern=compact(cut_into(layout, sizes))))


def slowest(run: Run, world: int) -> float:
    """What the slowest rank computes in a step, by its whole simulation."""
    made = draft(run, world)
    step = Stepper(made).step(ClusterMeter(made, CLUSTER, load("h100")))
    names = COMPUTED if run.mesh.overlap else (*COMPUTED, "ep_etp")
    return max(sum(parts.get(name, 0.0) for name in names) for parts in step.stations)


def peak(run: Run, world: int) -> int:
    return estimate(draft(run, world)).peak


def world_of(run: Run) -> int:
    return 2 * run.mesh.pp


@pytest.mark.parametrize("name", CASES)
def test_no_placement_has_a_faster_slowest_rank(name: str) -> None:
    run, world = CASES[name], world_of(CASES[name])
    found = split_by_time(run, world, CLUSTER)
    best = min(slowest(each, world) for each in every_cut(run))
    assert slowest(found.run, world) == pytest.approx(best, rel=1e-9)
    # What a block recomputes depends a little on whether it is the last of its segment.
    assert found.seconds * run.train.micro_batches == pytest.approx(best, rel=1e-3)
    assert found.before * run.train.micro_batches == pytest.approx(slowest(run, world), rel=1e-3)
    assert replace(found.run, model=run.model) == run, "nothing else changes"


@pytest.mark.parametrize("name", ["1f1b", "dual_pipe_v"])
def test_no_placement_that_fits_is_faster(name: str) -> None:
    run, world = CASES[name], world_of(CASES[name])
    cuts = [(slowest(each, world), peak(each, world)) for each in every_cut(run)]
    fastest = peak(split_by_time(run, world, CLUSTER).run, world)
    limit = max(bytes_ for _, bytes_ in cuts if bytes_ < fastest)
    found = split_by_time(run, world, CLUSTER, limit=limit)
    assert found.fits
    assert peak(found.run, world) <= limit
    best = min(seconds for seconds, bytes_ in cuts if bytes_ <= limit)
    assert slowest(found.run, world) == pytest.approx(best, rel=1e-9)


def test_where_nothing_fits_the_fastest_placement_is_said_not_to() -> None:
    run = CASES["1f1b"]
    found = split_by_time(run, world_of(run), CLUSTER, limit=1)
    assert not found.fits
    assert not found.before_fits
    assert found.run == split_by_time(run, world_of(run), CLUSTER).run


def test_the_command_prints_the_pattern_to_train_with(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "qwen3-30b-a3b",
        "--world",
        "6",
        "--mesh.pp",
        "3",
        "--mesh.ep",
        "2",
        "--cluster",
        "h100-ib",
    ]
    words += ["--train.batch-samples", "4", "--train.micro-batches", "2", "--mesh.tp", "1"]
    assert main([*words, "--model.pattern", "[*E]x5", "--split-by-time"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("to train with it: "))
    option, pattern = shlex.split(line.removeprefix("to train with it: "))
    assert main([*words, "--model.pattern", "[*E]x5", "--split-by-time", "--json"]) == ExitCode.OK
    cut = json.loads(capsys.readouterr().out)
    assert cut["split_by_time"]["pattern"] == pattern
    assert main([*words, option, pattern, "--json"]) == ExitCode.OK
    by_hand = json.loads(capsys.readouterr().out)
    assert (by_hand["time"], by_hand["stages"]) == (cut["time"], cut["stages"])


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--mesh.pp", "2"], "needs --cluster"),
        (["--cluster", "h100-ib"], "cuts a pipeline, but mesh.pp is 1"),
    ],
    ids=["no cluster", "no pipeline"],
)
def test_what_cannot_be_cut_by_time_is_refused(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny", "--world", "2", "--split-by-time", *words]) == ExitCode.CONFIG
    assert rule in capsys.readouterr().err


def test_candidates_of_a_search_are_cut_by_time_where_that_is_faster_and_fits() -> None:
    run = qwen("[*E]x4", micro_batches=4, pp=2, ep=2, shard="optimizer")
    space = Space(run=run, world=4, most_tp=8)
    setting = Setting(space=space, cluster=CLUSTER, calibration=load("h100"))
    plain = timed(setting, space.own())
    (cut,) = cut_by_time(setting, [plain], limit=10**15)
    assert cut.run.model.pattern == split_by_time(run, 4, CLUSTER).run.model.pattern
    assert cut.seconds < plain.seconds
    assert timed(setting, space.own(), cut.run) == cut
    assert cut_by_time(setting, [plain], limit=1) == [plain], "no cut fits into a byte"
