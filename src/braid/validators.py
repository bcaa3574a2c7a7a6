"""Validators: rules that the values of a run must keep: each yields a `Problem` where it is broken, and nothing
where not.

    yield from at_least("optim.warmup_steps", self.warmup_steps, 0)

Rules never raise, so that all problems of a run can be collected and shown together.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator

from braid.errors import Problem


def at_least(field: str, value: float, low: float) -> Iterator[Problem]:
    if not (value >= low and math.isfinite(value)):
        rule = f"must be a number of at least {low}"
        yield Problem(field=field, value=value, rule=rule, remedy=f"{low} or more")


def above(field: str, value: float, low: float) -> Iterator[Problem]:
    if not (value > low and math.isfinite(value)):
        yield Problem(
            field=field, value=value, rule=f"must be a number above {low}", remedy=f"a number above {low}"
        )


def finite(field: str, value: float) -> Iterator[Problem]:
    if not math.isfinite(value):
        yield Problem(field=field, value=value, rule="must be a number", remedy="a number")


def share(field: str, value: float, *, one_allowed: bool = False) -> Iterator[Problem]:
    """From 0 up to 1, with 1 itself only where allowed."""
    if not (0 <= value < 1 or (one_allowed and value == 1)):
        bound = "to 1" if one_allowed else "to below 1"
        yield Problem(field=field, value=value, rule=f"is a share, from 0 {bound}", remedy=f"0 {bound}")


def seed(field: str, value: int) -> Iterator[Problem]:
    if not 0 <= value < 2**63:
        yield Problem(field=field, value=value, rule="must be from 0 to 2^63 - 1", remedy="a smaller number")


def multiple_of(field: str, value: int, unit: int, unit_is: str | None = None) -> Iterator[Problem]:
    """`value` must be a multiple of `unit`, a plain number or the value of the field `unit_is`."""
    if unit > 0 and value > 0 and value % unit:
        near = sorted({max(unit, value // unit * unit), -(-value // unit) * unit})
        yield Problem(
            field=field,
            value=value,
            rule=f"must be a multiple of {f'{unit_is} ({unit})' if unit_is else unit}",
            remedy=" or ".join(str(n) for n in near),
        )


def divides(field: str, value: int, whole: int, whole_is: str, *, also: int = 0) -> Iterator[Problem]:
    """`value` must divide `whole`, which is named by `whole_is`. What is proposed divides `also` too."""
    if value > 0 and whole > 0 and whole % value:
        fitting = [n for n in range(1, whole + 1) if whole % n == 0 and also % n == 0]
        below, over = [n for n in fitting if n < value], [n for n in fitting if n > value]
        yield Problem(
            field=field,
            value=value,
            rule=f"must divide {whole_is} ({whole})",
            remedy=" or ".join(str(n) for n in (*below[-1:], *over[:1])),
        )


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the most similar word, or nothing where none is similar."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
