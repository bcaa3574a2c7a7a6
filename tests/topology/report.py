"""Rows that tests report, and the tables built from them.

A test adds rows to its report as pytest user properties, which xdist workers send along. The terminal summary
and docs/invariance.md show the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from braid.prove.compare import Deviation
    from tests.topology.matrix import Topology
    from tests.topology.module_cases import Placement

COMPARED, MODULES, NARROW, SABOTAGED = "invariance", "modules", "bfloat16", "sabotage"
"""The user properties of a compared topology, of a compared placement of modules, of a topology in bfloat16,
and of a sabotage."""

TITLES = MappingProxyType(
    {
        COMPARED: "topologies compared to one process",
        MODULES: "placements of modules compared to one process",
        NARROW: "topologies in bfloat16",
        SABOTAGED: "injected faults, all of which must be detected",
    }
)

COLUMNS = MappingProxyType(
    {
        "metrics": ("first loss", "other figures", "gradient norm", "later figures", "validation loss"),
        "gradients": ("gradients",),
        "weights": ("weights", "selection biases"),
        "checkpoint": ("saved weights", "saved moments"),
    }
)
"""The checks whose worst deviation each column shows."""

Row = dict[str, Any]

WIDEST = 72
"""Characters of a cell in a terminal."""


def add_topology(
    node: pytest.Item, model: str, topology: Topology, dtype: str, checks: Mapping[str, Deviation]
) -> None:
    """One topology, with the worst deviation of each column; none where nothing was looked at."""
    row: Row = {"ranks": topology.world, "topology": str(topology), "model": model, "dtype": dtype}
    node.user_properties.append((COMPARED, row | _columns(checks)))


def add_placement(
    node: pytest.Item, models: str, placement: Placement, checks: Mapping[str, Deviation], what: str = ""
) -> None:
    """One placement of a language model and its encoders, in float64, and what is special about the run."""
    _, _, where = str(placement).partition(": ")
    row: Row = {"ranks": placement.world, "placement": where, "models": models, "run": what or "-"}
    node.user_properties.append((MODULES, row | _columns(checks)))


def _columns(checks: Mapping[str, Deviation]) -> Row:
    return {
        column: max((checks[name].value for name in names if name in checks), default=None)
        for column, names in COLUMNS.items()
    }


def add_narrow(
    node: pytest.Item, model: str, topology: Topology, *, loss: float, ranks: float, alone: float
) -> None:
    """One topology in bfloat16: how far its first loss is from one process's, and how far the first gradients
    of both are from float64."""
    row = {
        "ranks": topology.world,
        "topology": str(topology),
        "model": model,
        "first loss": loss,
        "gradient, distance from float64": ranks,
        "on one process": alone,
    }
    node.user_properties.append((NARROW, row))


def add_sabotage(node: pytest.Item, name: str, model: str, topology: Topology, seen_by: Sequence[str]) -> None:
    """One sabotage, and the checks that saw it."""
    row = {
        "injected fault": name,
        "ranks": topology.world,
        "topology": str(topology),
        "model": model,
        "detected by": ", ".join(seen_by) or "nothing",
    }
    node.user_properties.append((SABOTAGED, row))


def rows_of(reports: Iterable[Any], kind: str) -> list[Row]:
    """The rows of one kind, in the same order whoever ran which test."""
    found = [value for report in reports for name, value in report.user_properties if name == kind]
    return sorted(found, key=lambda row: [_sortable(value) for value in row.values()])


def _sortable(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def lines(rows: Sequence[Row]) -> list[str]:
    """A table for a terminal."""
    table = [[shorten(cell, WIDEST, placeholder=" ...") for cell in row] for row in cells(rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]


def markdown(rows: Sequence[Row]) -> list[str]:
    """A table for a page."""
    head, *body = ("| " + " | ".join(row) + " |" for row in cells(rows))
    return [head, "|" + "---|" * len(rows[0]), *body]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    return [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0e}" if isinstance(value, float) else str(value)
