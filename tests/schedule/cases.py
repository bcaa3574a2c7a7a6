"""Phases of models that the tests of this room share."""

from __future__ import annotations

from braid.model.declaration import Form, chains, units
from braid.pattern import Layout, cut, joined, parse
from braid.schedule import Chain


def cut_for(text: str, pp: int = 1) -> Layout:
    """The layers of a pattern as so many pipeline ranks hold them."""
    layout = parse(text)
    return joined(layout) if pp == 1 else cut(layout, pp)


def fine(text: str, pp: int = 1, **form: bool) -> tuple[Chain, ...]:
    """A chain for each segment, blocks with experts in phases that can run beside each other."""
    return chains(cut_for(text, pp), Form(fine=True, **form))


def meshes(text: str, pp: int = 1, **form: bool) -> dict[str, str]:
    """The mesh of each unit of the model."""
    return {unit.path: unit.mesh for unit in units(cut_for(text, pp), Form(**form))}


def coarse(text: str, pp: int = 1, **form: bool) -> tuple[Chain, ...]:
    """A chain for each segment, every block as one phase."""
    return chains(cut_for(text, pp), Form(**form))
