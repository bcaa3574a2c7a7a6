"""The end of a campaign: what was caught, what was missed, and what nobody could have caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.mutants.equivalent import Equivalent
from scripts.mutants.mutant import SOURCES, Mutant
from scripts.mutants.record import Finding

MOST_MISSED = 0.05
"""A suite that misses a larger share is not good enough."""

Found = Sequence[tuple[Mutant, Finding]]


def share_missed(found: Found) -> float:
    missed = sum(finding.verdict == "missed" for _, finding in found)
    return missed / len(found) if found else 0.0


def lines(
    found: Found,
    equivalent: Sequence[tuple[Mutant, Equivalent]],
    root: Path,
    *,
    left_out: Sequence[str] = (),
    seed: int,
    seconds: float,
) -> Iterator[str]:
    """The report, line by line."""
    yield ""
    yield f"{'package':<14}{'mutants':>9}{'caught':>9}{'hangs':>9}{'missed':>9}{'seconds':>10}"
    packages = sorted({mutant.package for mutant, _ in found})
    for package in packages:
        yield _row(package, [finding for mutant, finding in found if mutant.package == package])
    yield _row("all", [finding for _, finding in found])
    for drawn, word in ((False, "by hand"), (True, f"drawn, seed {seed}")):
        yield _row(word, [finding for mutant, finding in found if mutant.drawn == drawn])
    missed = [(mutant, finding) for mutant, finding in found if finding.verdict == "missed"]
    if missed:
        yield "\nmissed:"
    for mutant, finding in missed:
        yield from described(mutant, root)
        if finding.elsewhere:
            yield f"    caught elsewhere, by {finding.elsewhere}"
    if equivalent:
        yield "\nequivalent, and drawn again:"
    for mutant, known in equivalent:
        yield from described(mutant, root)
        yield f"    {known.why}"
    unsteady = Counter(test for _, finding in found for test in finding.unsteady)
    if unsteady:
        yield "\nflaky tests, which failed once and passed when repeated:"
    yield from (f"  {count:>3} times  {test}" for test, count in unsteady.most_common())
    if left_out:
        yield "\nleft out, since they fail without a fault on this machine:"
    yield from (f"  {test}" for test in left_out)
    yield ""
    share = share_missed(found)
    verdict = "within" if share <= MOST_MISSED else "above"
    yield f"{len(missed)} of {len(found)} mutants missed: {share:.1%}, {verdict} the limit of {MOST_MISSED:.0%}"
    yield f"seed {seed}; {spoken(seconds)}"


def described(mutant: Mutant, root: Path) -> Iterator[str]:
    """Where a mutant is, and what it changes in the sources under `root`."""
    where = f" in {mutant.function}" if mutant.function else ""
    yield f"  {mutant.place}{where}: {mutant.name if not mutant.drawn else mutant.kind}"
    source = (root / SOURCES / mutant.file).read_bytes()
    yield from (f"    {line}" for line in mutant.difference(source))
    if mutant.why:
        yield f"    so that {mutant.why}"


def _row(name: str, findings: Sequence[Finding]) -> str:
    verdicts = Counter(finding.verdict for finding in findings)
    counts = f"{len(findings):>9}{verdicts['caught']:>9}{verdicts['hangs']:>9}{verdicts['missed']:>9}"
    return f"{name:<14}{counts}{sum(finding.seconds for finding in findings):>10.0f}"


def spoken(seconds: float) -> str:
    """`41s`, `12m05s`, `3h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
