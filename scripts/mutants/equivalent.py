"""Equivalent mutants: those that change nothing that a test could see, each with the reason. Others are drawn
in their place.

A mutant is told by its file, its function, and what it makes of which text: not by its line, so that the list
holds while code around it moves.
"""

from __future__ import annotations

from typing import NamedTuple

from scripts.mutants.mutant import Mutant


class Equivalent(NamedTuple):
    """A mutant that is as right as the source."""

    file: str
    function: str
    old: str
    """What the mutant replaces, white space apart."""
    new: str
    why: str

    def matches(self, mutant: Mutant) -> bool:
        place = (self.file, self.function) == (mutant.file, mutant.function)
        return place and _words(self.old) == _words(mutant.old) and _words(self.new) == _words(mutant.new)


def _words(text: str) -> str:
    return "".join(text.split())


EQUIVALENT: tuple[Equivalent, ...] = ()
