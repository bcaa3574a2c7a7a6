"""The standard topology: tp-cp-dp-pp for dense layers and etp-ep-edp-pp for experts (parallel folding).

Both views factorise the same ranks. A pipeline stage is a slab of contiguous ranks: tp x cp x dp for dense
layers, etp x ep x edp for experts. pp is the last axis of both views, and shared between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from braid.errors import ConfigError, Problem
from braid.topology.grid import DENSE, Grid
from braid.topology.view import View
from braid.validators import at_least, divides

EXPERT = "expert"
"""The view that expert layers use."""


class GroupFamily(NamedTuple):
    """The view and axes that a named family of groups varies over."""

    view: str
    axes: tuple[str, ...]


FAMILIES: Mapping[str, GroupFamily] = MappingProxyType(
    {
        "tp": GroupFamily(DENSE, ("tp",)),
        "cp": GroupFamily(DENSE, ("cp",)),
        "dp": GroupFamily(DENSE, ("dp",)),
        "pp": GroupFamily(DENSE, ("pp",)),
        "tp_cp": GroupFamily(DENSE, ("tp", "cp")),
        "dp_cp": GroupFamily(DENSE, ("cp", "dp")),
        "slab": GroupFamily(DENSE, ("tp", "cp", "dp")),
        "etp": GroupFamily(EXPERT, ("etp",)),
        "ep": GroupFamily(EXPERT, ("ep",)),
        "edp": GroupFamily(EXPERT, ("edp",)),
        "ep_etp": GroupFamily(EXPERT, ("etp", "ep")),
        "world": GroupFamily(DENSE, ("tp", "cp", "dp", "pp")),
    }
)
"""The named families, in the order in which their communicators are created."""


def standard(
    *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, etp: int = 1, ep: int = 1, offset: int = 0
) -> Grid:
    """The standard topology; edp follows from the other sizes."""
    if problems := list(standard_problems(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)):
        raise ConfigError(problems)
    return Grid(
        dense=View.of(tp=tp, cp=cp, dp=dp, pp=pp),
        others={EXPERT: View.of(etp=etp, ep=ep, edp=tp * cp * dp // (etp * ep), pp=pp)},
        shared=("pp",),
        offset=offset,
    )


def standard_problems(
    *, tp: int, cp: int, dp: int, pp: int, etp: int, ep: int, prefix: str = ""
) -> Iterator[Problem]:
    """What is wrong with these sizes; `prefix` is prepended to each field name."""
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep}
    too_small = [problem for name, size in sizes.items() for problem in at_least(prefix + name, size, 1)]
    yield from too_small
    if too_small:
        return
    slab = tp * cp * dp
    yield from divides(f"{prefix}etp", etp, slab, "tp x cp x dp")
    if slab % etp == 0:
        over = "tp x cp x dp" if etp == 1 else "tp x cp x dp / etp"
        yield from divides(f"{prefix}ep", ep, slab // etp, over)
