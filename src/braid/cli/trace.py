"""`braid trace summary`: where the steps of a trace went, by kind, waiting included, and the slowest rank."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from braid.cli.args import parse_options, split_positional, wants_help
from braid.console import table
from braid.errors import ConfigError, ExitCode
from braid.schedule.trace_summary import RankSeconds, rank_seconds, slowest

HELP = """usage: braid trace summary FILE [--json]

  summary  show where the steps of a trace went, and the slowest rank: of `braid train --trace` or
           `braid plan --trace`

Run `braid trace summary --help` for the options."""
MOST_RANKS = 16
"""Ranks that get a column; of more, the least and the most of any rank are shown."""


@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """Where the steps of a trace went, for `braid train --trace` and `braid plan --trace`."""

    json: bool = False
    """Print every step of every rank as JSON."""


def trace(args: list[str]) -> int:
    """Summarise the trace in a file."""
    if wants_help(args):
        print(HELP)
        return ExitCode.OK
    if not args or args[0] != "summary":
        given = f", got {args[0]!r}" if args else ""
        raise ConfigError(f"`braid trace` needs what to do{given}: braid trace summary FILE")
    if wants_help(args[1:]):
        parse_options(SummaryOptions, args[1:], "braid trace summary FILE")
    name, rest = split_positional(args[1:], "trace summary", "FILE")
    opts = parse_options(SummaryOptions, rest, "braid trace summary FILE")
    file = Path(name)
    try:
        found = rank_seconds(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot summarise {file}: it is not JSON; give a file that --trace wrote") from error
    except ValueError as error:
        raise ConfigError(f"cannot summarise {file}: {error}; give a file that --trace wrote") from error
    if opts.json:
        print(json.dumps([_json(each) for each in found]))
    else:
        print("\n".join(summary_lines(found)))
    return ExitCode.OK


def _json(each: RankSeconds) -> dict[str, object]:
    parts, phases = dict(each.parts), dict(each.phases)
    return {"rank": each.rank, "step": each.step, "seconds": each.seconds, "parts": parts, "phases": phases}


def summary_lines(found: Sequence[RankSeconds]) -> Iterator[str]:
    """The summary, as lines."""
    ranks, steps = sorted({each.rank for each in found}), list(dict.fromkeys(each.step for each in found))
    lengths = [max(each.seconds for each in found if each.step == step) for step in steps]
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    names = ", ".join(f"{step} {_time(length)}" for step, length in zip(steps, lengths, strict=True))
    yield f"{count}, {names}"
    yield ""
    yield from _table(found, ranks, lambda each: each.parts, "part")
    if len({phase for each in found for phase in each.phases}) > 1:
        yield ""
        yield from _table(found, ranks, lambda each: each.phases, "computation by phase")
    if len(ranks) > 1:
        yield ""
        yield from _about_ranks(found, ranks)


def _table(
    found: Sequence[RankSeconds],
    ranks: Sequence[int],
    of: Callable[[RankSeconds], object],
    head: str,
) -> Iterator[str]:
    """Seconds of a step on average, over all ranks and by rank, the largest part first."""
    by_rank = {rank: _means([each for each in found if each.rank == rank], of) for rank in ranks}
    names = dict.fromkeys(name for parts in by_rank.values() for name in parts)
    mean = {name: statistics.fmean(parts.get(name, 0.0) for parts in by_rank.values()) for name in names}
    length = statistics.fmean(each.seconds for each in found)
    each_shown = 1 < len(ranks) <= MOST_RANKS
    columns = [head, "mean", "share"]
    if len(ranks) > 1:
        columns += [f"rank {rank}" for rank in ranks] if each_shown else ["least", "most"]
    rows = []
    for name in sorted(names, key=lambda each: -mean[each]):
        values = [parts.get(name, 0.0) for parts in by_rank.values()]
        cells = values if each_shown else [min(values), max(values)]
        more = map(_time, cells) if len(ranks) > 1 else ()
        rows.append([name, _time(mean[name]), f"{mean[name] / length:.1%}", *more])
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for first, *rest in [columns, *rows]:
        aligned = (cell.rjust(wide) for cell, wide in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *aligned])


def _means(found: Sequence[RankSeconds], of: Callable[[RankSeconds], object]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for each in found:
        parts = of(each)
        assert isinstance(parts, dict)
        for name, seconds in parts.items():
            sums[name] = sums.get(name, 0.0) + seconds / len(found)
    return sums


def _about_ranks(found: Sequence[RankSeconds], ranks: Sequence[int]) -> Iterator[str]:
    most = slowest(found)
    waiting = {rank: statistics.fmean(each.waiting for each in found if each.rank == rank) for rank in ranks}
    longest = max(waiting, key=lambda each: waiting[each])
    factor = f", {most.computing / most.median:.2f} times the median" if most.median > 0 else ""
    yield table(
        [
            ("slowest", f"rank {most.rank} computes {_time(most.computing)} of a step{factor}"),
            (
                "waits most",
                f"rank {longest}: {_time(waiting[longest])} of a step; rank {most.rank}: "
                f"{_time(waiting[most.rank])}",
            ),
        ]
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
