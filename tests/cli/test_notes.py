"""What a plan says besides its numbers: its schedule, choices without effect, memory that is not counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from braid.architecture import HyperConnections
from braid.cli import main
from braid.cli.plan_notes import ineffective_options, schedule_summary
from braid.config import Mesh, Run
from braid.errors import ExitCode
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.schedule import simulate
from braid.schedule.simulate import PHASES
from tests.runs import small_run


def run_of(pattern: str, *, micro_batches: int = 2, hyper: bool = False, **train: object) -> Run:
    run = small_run()
    streams = HyperConnections(streams=2) if hyper else None
    return replace(
        run,
        model=replace(run.model, pattern=pattern, hyper=streams),
        train=replace(run.train, micro_batches=micro_batches, **train),  # type: ignore[arg-type]
    )


def notes(run: Run, world: int = 1) -> list[str]:
    return list(ineffective_options(plan(run, world)))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == ExitCode.OK
    return capsys.readouterr().out


OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_release": True},
    {"paired_ends": True},
    {"delay_weights": True},
    {"delay_weights": True, "late_weights": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_schedule_is_summed_up_with_its_options(options: dict[str, Any]) -> None:
    summary = schedule_summary(plan(replace(run_of("[*E][*E]"), mesh=Mesh(overlap=True, **options)), 1))
    assert ("early release" in summary) == ("early_release" in options)
    assert ("paired ends" in summary) == ("paired_ends" in options)
    assert ("delayed weight gradients" in summary) == ("delay_weights" in options)
    assert ("late " in summary) == ("late_weights" in options)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_overlap_that_hides_nothing_is_told(options: dict[str, Any], micro_batches: int) -> None:
    run = run_of("[*E][*E]", micro_batches=micro_batches)
    run = replace(run, mesh=Mesh(overlap=True, **options))
    timeline = simulate(plan(run, 1).schedule)
    hidden = sum(span.end - span.start for span in timeline.spans[0]) - timeline.makespan
    found = notes(run)
    assert len(found) == (micro_batches == 1)
    for note in found:
        assert "set train.micro_batches to 2 or more" in note
        assert ("only delayed weight gradients hide transfers" in note) == (hidden > 1e-9)


def test_without_overlap_one_micro_batch_is_nothing_to_tell() -> None:
    assert notes(run_of("[*E]", micro_batches=1)) == []


@pytest.mark.parametrize(
    ("hyper", "recompute"),
    [
        *((False, names) for names in [(), ("norm",), ("block",), ("full",)]),
        *(
            (True, names)
            for names in [(), ("norm",), ("hyper",), ("hyper", "norm"), ("hyper", "block"), ("full",)]
        ),
    ],
)
def test_a_span_that_changes_nothing_is_told(hyper: bool, recompute: tuple[str, ...]) -> None:
    runs = [
        run_of("[*-][*-][*-][*-]", hyper=hyper, recompute=recompute, recompute_span=span)
        for span in (0, 1, 2, 4)
    ]
    kept = {estimate(plan(run, 1), "cpu").stages[0].memory.activations for run in runs}
    assert notes(runs[0]) == []
    for run in runs[1:]:
        assert len(notes(run)) == (len(kept) == 1)
        for note in notes(run):
            assert note.startswith(f"train.recompute_span {run.train.recompute_span} changes nothing")
            assert "leave it out" in note


def test_notes_are_in_the_plan_and_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tiny", "--train.recompute-span", "2", "--mesh.overlap", "True", "--mesh.early-release", "True")
    text, found = told(capsys, *words), json.loads(told(capsys, *words, "--json"))
    assert len(found["notes"]) == 2
    assert len(found["not_counted"]) == 1
    for note in found["notes"]:
        assert f"\nnote: {note}\n" in text
    for note in found["not_counted"]:
        assert f"\nnot counted: {note}\n" in text


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({}, []),
        ({"overlap": True}, []),
        ({"overlap": True, "early_release": True}, ["earlier: the peak may be lower"]),
        ({"overlap": True, "delay_weights": True}, ["higher"]),
        (
            {"overlap": True, "delay_weights": True, "late_weights": True},
            ["mesh.late_weights: the peak may be higher"],
        ),
        ({"schedule": "dual_pipe_v", "pp": 2}, ["higher"]),
        ({"overlap": True, "delay_weights": True, "early_release": True}, ["higher", "lower"]),
    ],
)
def test_memory_that_is_not_counted_is_told(
    mesh: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        word for field, value in mesh.items() for word in (f"--mesh.{field.replace('_', '-')}", str(value))
    ]
    more = (
        "--train.micro-batches",
        "4",
        "--model.pattern",
        "[*E][*E][*E][*E]",
        "--world",
        str(mesh.get("pp", 1)),
    )
    lines = [
        line for line in told(capsys, "tiny", *given, *more).splitlines() if line.startswith("not counted")
    ]
    assert [line.endswith(word) for line, word in zip(lines, words, strict=True)] == [True] * len(words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), None),
        (("--train.recompute", "norm", "core"), "recompute of norm and core"),
        (("--mesh.overlap", "True"), "overlapped"),
        (
            ("--mesh.overlap", "True", "--mesh.delay-weights", "True", "--mesh.paired-ends", "True"),
            "overlapped, delayed weight gradients, paired ends",
        ),
        (("--world", "2", "--mesh.pp", "2", "--model.pattern", "[*-]|[*-]"), "1f1b"),
    ],
)
def test_a_plan_names_its_schedule(
    words: tuple[str, ...], line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "tiny", "--train.micro-batches", "4", *words)
    assert [each for each in text.splitlines() if each.startswith("schedule: ")] == (
        [] if line is None else [f"schedule: {line}"]
    )


@pytest.mark.parametrize(
    ("pattern", "pp", "longest"),
    [("[*-]" * 6, 1, 6), ("[*-]|[*-][*-]", 1, 3), ("[*-]|[*-][*-]", 2, 2), ("[*-]", 1, 1)],
)
def test_the_span_that_a_plan_chooses_is_named(pattern: str, pp: int, longest: int) -> None:
    """One rank holds one segment, whatever the pattern says."""

    def planned(span: int) -> tuple[str, int]:
        run = run_of(pattern, hyper=True, recompute=("norm", "hyper"), recompute_span=span)
        worked_out = plan(replace(run, mesh=Mesh(pp=pp)), pp)
        return schedule_summary(worked_out), estimate(worked_out, "cpu").peak

    def told(span: int) -> str:
        spans = f"spans of {span} {'block' if span == 1 else 'blocks'}"
        return f"{'1f1b, ' if pp > 1 else ''}recompute of norm and hyper ({spans})"

    words, peak = planned(0)
    (chosen,) = (span for span in range(1, 7) if words == told(span))
    assert planned(chosen) == (words, peak)
    assert planned(100)[0] == told(longest), "a span ends with its segment"


def test_a_plan_without_spans_names_none() -> None:
    run = run_of("[*-][*-]", hyper=True, recompute=("full",))
    assert schedule_summary(plan(run, 1)) == "full recompute"


def test_help_tells_how_long_phases_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "tiny", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "mix and experts take 1 forward and 2 backward with their weight gradients" in text
    assert "dispatch and combine 0.5 each way, all others nothing" in text
    assert PHASES == {"block": 1, "mix": 1, "experts": 1, "dispatch": 0.5, "combine": 0.5}
    spent: dict[tuple[str, str], set[float]] = {}
    for hidden in (16, 32):
        run = run_of("[*E][*-E]")
        run = replace(run, model=replace(run.model, hidden=hidden), mesh=Mesh(overlap=True))
        for span in simulate(plan(run, 1).schedule).spans[0]:
            kind = (span.op.phase or "").rpartition(".")[2]
            spent.setdefault((span.op.act.value, kind), set()).add(round(span.end - span.start, 9))
    assert {kind for kind, lengths in spent.items() if lengths != {0}} == {
        (act, kind) for act in "FB" for kind in PHASES if kind != "block"
    }
    assert spent["B", "mix"] == spent["B", "experts"] == {2}
    assert spent["B", "dispatch"] == spent["F", "combine"] == {0.5}
