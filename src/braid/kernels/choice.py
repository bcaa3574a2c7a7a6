"""Which implementation of an op a run uses, and why: decided once, told to the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Function = TypeVar("Function")


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[Function]):
    """One implementation of one op."""

    op: str
    """The op's room: `attention`, `grouped_mlp`."""
    name: str
    """The implementation's file in that room: `reference`, `sdpa`, `grouped`."""
    function: Function
    """What computes it."""
    reason: str
    """Why this one, as a clause that follows `because`."""

    def __str__(self) -> str:
        return f"{self.op}: {self.name}, because {self.reason}"
