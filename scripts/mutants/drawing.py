"""Drawing mutants: the same ones for the same sources and the same seed, spread over packages and operators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from scripts.mutants.equivalent import EQUIVALENT, Equivalent
from scripts.mutants.mutant import Mutant
from scripts.mutants.sites import candidates, read_sources

LEAST = 2
"""Mutants of each package."""


class Drawn(NamedTuple):
    """What came of a draw."""

    mutants: list[Mutant]
    equivalent: list[tuple[Mutant, Equivalent]]
    """Those that were drawn, are known to change nothing, and have been replaced."""


def draw(root: Path, seed: int, count: int) -> Drawn:
    """So many mutants of the sources under `root`. Packages get more the larger they are, by the square root.
    Another equivalent in the list moves the draws of its own package alone."""
    pools: dict[str, list[Mutant]] = {}
    for mutant in candidates(read_sources(root)):
        pools.setdefault(mutant.package, []).append(mutant)
    mutants, equivalent = list[Mutant](), list[tuple[Mutant, Equivalent]]()
    for package, number in quotas({name: len(pool) for name, pool in pools.items()}, count).items():
        taken = 0
        for mutant in _order(pools[package], random.Random(f"{seed}/{package}")):
            if taken == number:
                break
            if (known := _known(mutant)) is not None:
                equivalent.append((mutant, known))
                continue
            mutants.append(mutant)
            taken += 1
    return Drawn(mutants, equivalent)


def quotas(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many each package gets of `count`, by the largest remainder; never fewer than `LEAST`."""
    weights = {name: sqrt(size) for name, size in sizes.items()}
    shares = {name: count * weight / sum(weights.values()) for name, weight in weights.items()}
    found = {name: max(LEAST, int(share)) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (found[name] - shares[name], name))
    for name in by_remainder[: max(0, count - sum(found.values()))]:
        found[name] += 1
    return found


def _order(pool: Sequence[Mutant], rng: random.Random) -> Iterator[Mutant]:
    """All mutants of a package in the order in which they are drawn: first an operator, then one of its own, so
    that constants, of which there are most, are no more frequent than others. Never two of one line."""
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in pool:
        by_operator.setdefault(mutant.kind, []).append(mutant)
    for mutants in by_operator.values():
        rng.shuffle(mutants)
    lines: set[tuple[str, int]] = set()
    while by_operator:
        operator = rng.choice(sorted(by_operator))
        mutant = by_operator[operator].pop()
        if not by_operator[operator]:
            del by_operator[operator]
        if (mutant.file, mutant.line) not in lines:
            lines.add((mutant.file, mutant.line))
            yield mutant


def _known(mutant: Mutant) -> Equivalent | None:
    return next((each for each in EQUIVALENT if each.matches(mutant)), None)
