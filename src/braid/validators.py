"""Validators of single settings. Each yields a `Problem` if the value is invalid, and nothing otherwise:

    yield from at_least("optim.warmup_steps", self.warmup_steps, 0)

Validators never raise, so that all problems of a run can be collected and shown together.
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
        yield Problem(field=field, value=value, rule="must be a finite number", remedy="a finite number")


def fraction(field: str, value: float, *, one_allowed: bool = False) -> Iterator[Problem]:
    """`value` must be in [0, 1), or in [0, 1] with `one_allowed`."""
    if not (0 <= value < 1 or (one_allowed and value == 1)):
        bound = "to 1" if one_allowed else "to below 1"
        yield Problem(field=field, value=value, rule=f"must be a fraction, 0 {bound}", remedy=f"0 {bound}")


def seed(field: str, value: int) -> Iterator[Problem]:
    if not 0 <= value < 2**63:
        yield Problem(field=field, value=value, rule="must be from 0 to 2^63 - 1", remedy="a smaller number")


def must_be(field: str, value: object, only: object, *, rule: str, otherwise: str) -> Iterator[Problem]:
    """`value` must be `only`, because another setting rules out the rest; `otherwise` changes that setting."""
    if value != only:
        yield Problem(field=field, value=value, rule=rule, remedy=f"{only}, or {otherwise}")


def multiple_of(field: str, value: int, unit: int, unit_name: str | None = None) -> Iterator[Problem]:
    """`value` must be a multiple of `unit`, a constant or the value of the setting `unit_name`."""
    if unit > 0 and value > 0 and value % unit:
        near = sorted({max(unit, value // unit * unit), -(-value // unit) * unit})
        yield Problem(
            field=field,
            value=value,
            rule=f"must be a multiple of {f'{unit_name} ({unit})' if unit_name else unit}",
            remedy=" or ".join(str(n) for n in near),
        )


def divides(field: str, value: int, total: int, total_name: str, *, also: int = 0) -> Iterator[Problem]:
    """`value` must divide `total`, the value of the setting `total_name`. Proposed values divide `also` too."""
    if value > 0 and total > 0 and total % value:
        divisors = [n for n in range(1, total + 1) if total % n == 0 and also % n == 0]
        smaller, larger = [n for n in divisors if n < value], [n for n in divisors if n > value]
        yield Problem(
            field=field,
            value=value,
            rule=f"must divide {total_name} ({total})",
            remedy=" or ".join(str(n) for n in (*smaller[-1:], *larger[:1])),
        )


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the most similar candidate, or an empty string if none is similar."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
