"""Ways to run a product: how it is cut, and how it is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RowVariant:
    """One way to run a product of rows: how it is cut, and how it is scheduled."""

    columns: int = 256
    """Channels out of one tile."""
    depth: int = 64
    """Channels in that are multiplied at a time."""
    warps: int = 8
    stages: int = 3
    """How many steps of operands are on their way."""
    per_sm: int = 1
    """Programs for each multiprocessor; 0 for one program per tile."""
    parts: int = 2
    """A result leaves in so many parts, which need less memory on the chip at a time."""
    registers: int | None = None
    """The most that a thread may have; None leaves it to the compiler."""
    flat: bool = True
    """Whether the loops over tiles and over channels in are one loop, so that the operands of the next tile are
    on their way while this one's result leaves."""


@dataclass(frozen=True, kw_only=True)
class WeightVariant:
    """One way to run the product that gives a weight's gradient."""

    rows: int = 128
    """Channels O of one tile."""
    columns: int = 256
    """Channels I of one tile."""
    depth: int = 64
    """Rows that are multiplied at a time."""
    warps: int = 8
    stages: int = 3
    per_sm: int = 1
    """Programs for each multiprocessor; 0 for one program per tile."""
    leave: Literal["pointers", "descriptor"] = "descriptor"
    """How a tile leaves: read, added and stored by threads; or handed to the copy engine, which adds in the
    cache."""
    parts: int = 4
    """A tile leaves in so many parts."""
    early: int = 0
    """So many parts of what is there are read before the products, to be at hand after them (by `pointers`)."""
    registers: int | None = None
    """The most that a thread may have; None leaves it to the compiler."""
    flat: bool = True
    """Whether the loops over tiles and over rows are one loop, so that the operands of the next tile are on
    their way while this one leaves."""
    group: int = 8
    """Tiles of so many rows are neighbours in time."""


@dataclass(frozen=True, kw_only=True)
class RelayVariant:
    """One way to run it with warps that take sums away: `relay`, for float32 gradients."""

    rows: int = 128
    """Channels O of one tile."""
    columns: int = 256
    """Channels I of one tile."""
    depth: int = 32
    """Rows that are multiplied at a time."""
    stages: int = 4
    """How many steps of rows are on their way."""
    group: int = 8
    """Tiles of so many rows are neighbours in time."""
    ahead: int = 2
    """What is there is brought into the cache so many pieces of a tile ahead: eighths, or with 2 takers
    sixteenths."""
    takers: int = 4
    """Warps that take sums away. With 2 each group multiplies 256 columns at a time, with 4 only half of them:
    there are not registers enough for both."""


@dataclass(frozen=True, kw_only=True)
class RelayRowVariant:
    """One way to run a product of rows with warps that take results away: `relay_rows`."""

    columns: int = 256
    """Channels out of one tile."""
    depth: int = 64
    """Channels in that are multiplied at a time."""
    stages: int = 3
    """How many steps of operands are on their way."""


@dataclass(frozen=True, kw_only=True)
class KeeperVariant:
    """One way to run it where those that multiply add to what is there: `keeper`, for float32 gradients."""

    group: int = 8
    """Tiles of so many rows are neighbours in time."""


RowWay = RowVariant | RelayRowVariant
"""Ways to run a product of rows."""
WeightWay = WeightVariant | RelayVariant | KeeperVariant
"""Ways to run the product that gives a weight's gradient."""
