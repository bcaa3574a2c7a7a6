"""Spellings: one model, told by its files in one of several ways.

Experts lie in files as one tensor each, stacked, or one below the other, and names differ with that. Which way
it is shows in the names alone, and in the number of dims where two ways share a name. It is found for each of
the smallest sets of tensors that every spelling tells as a whole: the projections into the ffn of all experts
of a layer, say, or their biases, or one norm. Names are compared whole, never by how they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from braid.architecture import Trunk
from braid.errors import ConfigError
from braid.interchange.moves import Stacked
from braid.interchange.tables import Adapter, NameLink, check_fit, links

Choices = Mapping[int, Sequence[NameLink]]
"""The links of one set of tensors, by the number of the spelling."""


class Fit(NamedTuple):
    """How well a spelling agrees with what files hold of a set of tensors; more is better."""

    whole: bool
    """Whether all its names are there."""
    names: int
    """How many are, where some are not."""
    dims: bool
    """Whether those that are there have as many dims as it says."""


def spelled(adapter: Adapter, shape: Trunk, held: Mapping[str, Tensor]) -> list[Sequence[NameLink]]:
    """The links of a model of this shape, set by set, each in the spelling in which files hold it. What they do
    not hold at all is told in the spelling that they usually have."""
    if not adapter.others:
        return [[link] for link in links(adapter, shape)]
    fitting = [each for each in (adapter, *adapter.others) if _fits(each, shape)]
    if not fitting:
        check_fit(adapter, shape)  # raises, and says why
    every = [list(links(each, shape)) for each in fitting]
    common = set.intersection(*({(link.theirs, link.move) for link in table} for table in every))
    # A spelling of which files hold nothing of its own would only make the sets larger.
    tables = [
        table
        for table in every
        if any(link.theirs in held and (link.theirs, link.move) not in common for link in table)
    ] or every[:1]
    there = [sum(link.theirs in held for link in table) for table in tables]
    return [choices[_best(choices, held, usual=there)] for choices in _sets(tables)]


def _fits(adapter: Adapter, shape: Trunk) -> bool:
    try:
        check_fit(adapter, shape)
    except ConfigError:
        return False
    return True


def _best(choices: Choices, held: Mapping[str, Tensor], usual: Sequence[int]) -> int:
    """The spelling that fits best, the first of several. Where no name is there, the one of which most are
    there elsewhere."""
    counts = {number: sum(link.theirs in held for link in told) for number, told in choices.items()}
    if not any(counts.values()):
        return max(choices, key=lambda number: usual[number])
    whole = {number for number, count in counts.items() if count == len(choices[number])}
    named = {n: Fit(n in whole, 0 if n in whole else count, dims=True) for n, count in counts.items()}
    best = [number for number, fit in named.items() if fit == max(named.values())]
    if len(best) == 1:
        return best[0]
    # Only now are tensors looked at: they may lie in files.
    return max(best, key=lambda n: named[n]._replace(dims=all(_has_dims(link, held) for link in choices[n])))


def _has_dims(link: NameLink, held: Mapping[str, Tensor]) -> bool:
    """Whether a stack of experts has as many dims as its link says: matrices have two, biases one."""
    if link.theirs not in held or not isinstance(link.move, Stacked):
        return True
    inside = 1 if link.ours[0].endswith(".bias") else 2
    return held[link.theirs].dim() == len(link.move.dims) - link.move.folded + inside


def _sets(tables: Sequence[Sequence[NameLink]]) -> Iterator[Choices]:
    """The smallest sets of our tensors that no link of any spelling leaves, in the order of the first one."""
    home: dict[str, str] = {}

    def root(name: str) -> str:
        while home.setdefault(name, name) != name:
            home[name] = name = home[home[name]]
        return name

    for table in tables:
        for link in table:
            for name in link.ours:
                home[root(name)] = root(link.ours[0])
    found: dict[str, dict[int, list[NameLink]]] = {}
    for number, table in enumerate(tables):
        for link in table:
            found.setdefault(root(link.ours[0]), {}).setdefault(number, []).append(link)
    yield from found.values()
