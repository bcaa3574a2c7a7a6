"""Faults that somebody thought of, package by package. Each is one that a user would suffer from: a wrong
number, lost data, a hang, bad input that is accepted. None is in code that needs a GPU."""

from __future__ import annotations

from scripts.mutants.by_hand import (
    describing,
    executing,
    layers,
    modules,
    numerics,
    optimizing,
    proving,
    storing,
    timing,
    training,
)
from scripts.mutants.mutant import Fault

FAULTS: tuple[Fault, ...] = (
    *describing.FAULTS,
    *numerics.FAULTS,
    *optimizing.FAULTS,
    *layers.FAULTS,
    *executing.FAULTS,
    *storing.FAULTS,
    *training.FAULTS,
    *modules.FAULTS,
    *proving.FAULTS,
    *timing.FAULTS,
)
