"""Mutation testing: plant faults in a copy of the sources, run tests, report which faults survive."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.mutants.by_hand import FAULTS
from scripts.mutants.child import warm_up
from scripts.mutants.drawing import Drawn, draw
from scripts.mutants.mutant import Mutant, StaleFaultError, package_of, planted
from scripts.mutants.record import Record, finding_of, key_of, known, open_record
from scripts.mutants.report import MOST_MISSED, described, lines, share_missed, spoken
from scripts.mutants.running import CannotRunError, Job, Limits, Result, run_jobs
from scripts.mutants.scratch import copy_of
from scripts.mutants.selection import Stage, elsewhere, function_at, stages

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
DRAWN = 70
OUT = Path("mutants.jsonl")

_Run = Callable[[Iterator[Job]], Iterator[Result]]


def main(words: Sequence[str] | None = None) -> int:
    chosen = _options(words)
    try:
        by_hand = [planted(fault, ROOT) for fault in FAULTS]
    except StaleFaultError:
        return _tell_stale()
    if chosen.check:
        print(f"{len(by_hand)} faults written by hand apply to the sources")
        return 0
    drawn = draw(ROOT, chosen.seed, chosen.drawn) if chosen.drawn else Drawn([], [])
    placed = [replace(each, function=function_at(ROOT, each.file, each.line)) for each in by_hand]
    mutants = [each for each in (*placed, *drawn.mutants) if _is_wanted(each, chosen.only)]
    print(f"{len(mutants)} mutants; {chosen.drawn} are drawn from seed {chosen.seed}")
    if chosen.list:
        print("\n".join(line for mutant in mutants for line in described(mutant, ROOT)))
        return 0
    resume = chosen.resume or chosen.retry_missed or chosen.report
    record = open_record(chosen.out, resume=resume, retry_missed=chosen.retry_missed)
    began = time.monotonic()
    try:
        if not chosen.report and not _campaign(chosen, mutants, record):
            return 2
    except CannotRunError as error:
        print(f"tests cannot be run: {error}; --resume continues from here", file=sys.stderr)
        return 2
    found = known(mutants, record, ROOT)
    took = time.monotonic() - began
    for line in lines(found, drawn.equivalent, ROOT, left_out=record.left_out, seed=chosen.seed, seconds=took):
        print(line)
    return 1 if share_missed(found) > MOST_MISSED else 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=2, help="mutants at a time, each on one core (default 2)")
    add("--only", action="append", help="a package, or part of a mutant's name; may be repeated")
    add("--seed", type=int, default=SEED, help=f"seed of the random mutants (default {SEED})")
    add("--drawn", type=int, default=DRAWN, help=f"number of random mutants (default {DRAWN})")
    add("--out", type=Path, default=OUT, help=f"file for the results, as JSON lines (default {OUT})")
    add("--resume", action="store_true", help="continue an interrupted run: skip mutants that are in --out")
    add("--retry-missed", action="store_true", help="like --resume, but run the missed ones again")
    add("--suite", type=Path, default=ROOT, help="checkout whose tests run on the sources of this one")
    add("--no-baseline", action="store_true", help="skip the run of the tests on the unmodified sources")
    add(
        "--leave-out-failing",
        action="store_true",
        help="leave out tests that fail on the unmodified sources, and list them",
    )
    add("--no-confirm", action="store_true", help="do not repeat a failing test to confirm the failure")
    add("--own", action="store_true", help="quick look: run only the tests of the mutant's package")
    add("--elsewhere", action="store_true", help="also run all other tests on missed mutants")
    add(
        "--timeout",
        type=float,
        default=Limits.unknown_s,
        help="seconds of a stage that has no baseline",
    )
    add("--check", action="store_true", help="only check that the faults written by hand apply to the sources")
    add("--list", action="store_true", help="list the mutants without running anything")
    add("--report", action="store_true", help="print the results in --out again")
    return parser.parse_args(words)


def _tell_stale() -> int:
    for fault in FAULTS:
        try:
            planted(fault, ROOT)
        except StaleFaultError as error:
            print(error, file=sys.stderr)
    return 2


def _is_wanted(mutant: Mutant, only: Sequence[str] | None) -> bool:
    """By its package; by its name where no package is meant."""
    packages = {package_of(fault.file) for fault in FAULTS}
    return not only or any(word == mutant.package if word in packages else word in mutant.name for word in only)


# ---------------------------------------------------------------------------------------------- campaign


def _campaign(chosen: argparse.Namespace, mutants: Sequence[Mutant], record: Record) -> bool:
    """Run everything of which nothing is known; whether the tests pass without a fault."""
    suite = chosen.suite.resolve()
    left = [mutant for mutant in mutants if key_of(mutant, ROOT) not in record.findings]
    limits = Limits(unknown_s=chosen.timeout)
    warm_up()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # copies are removed, and children end
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_of(ROOT, suite, Path(folder) / str(number)) for number in range(chosen.jobs)]

        def run(jobs: Iterator[Job]) -> Iterator[Result]:
            return run_jobs(
                jobs,
                copies,
                lambda stage: limits.of(stage, record.seconds),
                confirms=not chosen.no_confirm,
                left_out=record.left_out,
            )

        def faced(mutant: Mutant) -> tuple[Stage, ...]:
            found = stages(mutant, suite, record.seconds)
            if chosen.own:
                return found[:1]
            return (*found, elsewhere(mutant, suite, record.seconds)) if chosen.elsewhere else found

        jobs = {mutant.name: Job(name=mutant.name, mutant=mutant, stages=faced(mutant)) for mutant in left}
        leaves_out = chosen.leave_out_failing
        if not chosen.no_baseline and not _baseline(run, jobs.values(), record, leaves_out=leaves_out):
            return False
        # Now it is known how long tests take.
        jobs = {mutant.name: Job(name=mutant.name, mutant=mutant, stages=faced(mutant)) for mutant in left}
        _face(run, list(jobs.values()), record)
    return True


def _baseline(run: _Run, jobs: Iterable[Job], record: Record, *, leaves_out: bool) -> bool:
    """Whether all tests that are needed pass on the sources as they are, but for those that may be left out."""
    folders: dict[str, list[str]] = {}
    for file in sorted({file for job in jobs for stage in job.stages for file in stage.files}):
        folders.setdefault(file.rpartition("/")[0], []).append(file)
    wanted = [
        Job(name=name, mutant=None, stages=(Stage(name=name, files=tuple(found)),))
        for name, found in folders.items()
        if not record.seconds.keys() >= set(found)
    ]
    sound = True
    for result in run(iter(wanted)):
        name, took = result.job.name, spoken(result.seconds)
        if result.verdict == "missed":
            print(f"without a fault {name} passes, in {took}", flush=True)
            record.add_baseline({file: result.of_files.get(file, 0.0) for file in folders[name]})
        elif leaves_out and result.failures:
            print(
                f"without a fault {name} takes {took}; left out, since they fail:",
                *result.failures,
                sep="\n    ",
            )
            record.leave_out(result.failures)
            record.add_baseline({file: result.of_files.get(file, 0.0) for file in folders[name]})
        else:
            sound = False
            print(f"without a fault {name} fails: {result.by}\n{result.told}", flush=True)
    return sound


def _face(run: _Run, jobs: Sequence[Job], record: Record) -> None:
    """Let every mutant face its tests, and tell what becomes of it."""
    began = time.monotonic()
    for done, result in enumerate(run(iter(jobs)), start=1):
        mutant, by = result.job.mutant, ""
        assert mutant is not None
        if result.stage == "elsewhere":
            result, by = replace(result, verdict="missed", stage="", by=""), result.by
        record.add(finding_of(result, key_of(mutant, ROOT), by))
        elapsed = time.monotonic() - began
        left = elapsed / done * (len(jobs) - done)
        print(f"[{done}/{len(jobs)}] {result.verdict:<7}{mutant.place}  {_called(mutant)}")
        print(f"    {result.by or by or 'by nobody'}  {spoken(result.seconds)}", end="")
        print(f"; {spoken(elapsed)} so far, about {spoken(left)} left", flush=True)


def _called(mutant: Mutant) -> str:
    return mutant.kind if mutant.drawn else mutant.name


if __name__ == "__main__":
    sys.exit(main())
