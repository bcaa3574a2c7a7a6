"""Data mixtures: deterministic weighted interleaving of sources, by largest deficit instead of at random.

Each sample comes from the source that is furthest behind its share (the first one on ties), so every prefix of
the sequence keeps the ratios. With integer shares that sum to C the sequence repeats after C samples: a table
of C entries gives random access.

Shapes: C samples of a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isfinite, lcm

import numpy as np
import numpy.typing as npt

from braid.data.source import Source
from braid.errors import DataError

MAX_CYCLE = 1 << 16
"""Longest table; weights that need a longer one are rounded to multiples of 1 / MAX_CYCLE."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Several sources and their weights."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    """Relative share of samples of each source; they need not sum to one."""

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.weights) or not self.sources:
            raise DataError(
                f"a mixture of {len(self.sources)} sources has {len(self.weights)} weights: set one each"
            )
        named = [source for source in self.sources if source.tokenizer_description is not None]
        for source in named[1:]:
            if source.tokenizer_description != named[0].tokenizer_description:
                raise DataError(
                    f"{source.path} and {named[0].path} were built with different tokenizers: "
                    "build both with the same one"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Interleave:
    """A repeating sequence of sources with random access."""

    shares: tuple[int, ...]
    """Samples of each source in one cycle."""
    source_C: npt.NDArray[np.int64]
    """The source of each sample of the cycle."""
    nth_C: npt.NDArray[np.int64]
    """How many earlier samples of the cycle come from the same source."""

    def at(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For global sample indices: the source, and the index within that source."""
        cycles, steps = np.divmod(indices, len(self.source_C))
        sources = self.source_C[steps]
        return sources, cycles * np.asarray(self.shares, np.int64)[sources] + self.nth_C[steps]


def interleave(weights: Sequence[float]) -> Interleave:
    """The largest-deficit cycle of the given weights."""
    shares = integer_shares(weights)
    cycle = sum(shares)
    deficits = np.zeros(len(shares), np.int64)
    step_gain = np.asarray(shares, np.int64)
    source_C = np.empty(cycle, np.int64)
    for step in range(cycle):
        deficits += step_gain
        source_C[step] = latest = int(np.argmax(deficits))
        deficits[latest] -= cycle
    nth_C = np.empty(cycle, np.int64)
    for source, share in enumerate(shares):
        nth_C[source_C == source] = np.arange(share)
    return Interleave(shares=shares, source_C=source_C, nth_C=nth_C)


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as integers: exact if they then sum to at most MAX_CYCLE, otherwise rounded to that sum."""
    bad = [weight for weight in weights if not (isfinite(weight) and weight > 0)]
    if bad:
        raise DataError(
            f"weights of a mixture are positive numbers, not {bad[0]}: remove a source you do not want"
        )
    exact = [Fraction(str(weight)) for weight in weights]  # via str: 0.1 means 1/10, not its binary neighbour
    scale = lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    divisor = gcd(*integers)
    if sum(integers) // divisor <= MAX_CYCLE:
        return tuple(share // divisor for share in integers)
    return _round(exact)


def _round(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Largest-remainder rounding to shares that sum to MAX_CYCLE."""
    quotas = [weight * MAX_CYCLE / sum(weights) for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: MAX_CYCLE - sum(shares)]:
        shares[i] += 1
    if min(shares) == 0:
        raise DataError(
            f"a weight of {float(min(weights))} next to {float(max(weights))} is too small to mix: "
            f"each source needs at least one sample in {MAX_CYCLE}; raise it or remove the source"
        )
    return tuple(shares)
