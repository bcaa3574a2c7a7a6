"""Collective checks (`--check-collectives`): a debug mode in which the ranks of a group compare each collective
before it runs, and what a mismatch says.

torch compares them: at the debug level DETAIL it wraps every process group that is created, and exchanges op,
shape, dtype and sequence number over a gloo group of its own, whichever backend runs the collective. That
includes the collectives of FSDP2 and of helper threads. A mismatch raises on every rank of the group. Point-to-
point messages are not compared: the schedule that orders them is proved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from torch._C._distributed_c10d import (
    DebugLevel,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

from braid.errors import enumeration
from braid.launch.rendezvous import format_ranks

_MISMATCH = "Detected mismatch between collectives"

_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=(?P<number>\d+), OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[^\]]*)\], TensorDtypes=(?P<dtype>\w+))?"
)

_CALLS = MappingProxyType(
    {
        "ALLREDUCE": "all_reduce",
        "ALLGATHER": "all_gather",
        "_ALLGATHER_BASE": "all_gather",
        "REDUCE_SCATTER": "reduce_scatter",
        "_REDUCE_SCATTER_BASE": "reduce_scatter",
        "ALLTOALL": "all_to_all",
        "ALLTOALL_BASE": "all_to_all",
    }
)
_DTYPES = MappingProxyType(
    {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Byte": "uint8",
        "Char": "int8",
        "Short": "int16",
        "Int": "int32",
        "Long": "int64",
        "Bool": "bool",
    }
)
"""torch's C++ names of ops and dtypes, and those of Python."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a rank was about to run."""

    op: str
    number: int
    """How many collectives the group ran before it."""
    shape: str | None
    """Of the tensor that the rank passes; None if the op has none, or compares none."""
    dtype: str | None

    def __str__(self) -> str:
        tensor = "" if self.shape is None else f" of [{self.shape}] {self.dtype}"
        return f"{self.op}{tensor} as collective {self.number}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Collective:
        return Collective(**data)


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one rank of the group was about to run, and where in its step."""

    rank: int
    collective: Collective
    where: str


def compare_collectives() -> None:
    """Have all process groups of this process that are created from now on compare their collectives."""
    set_debug_level(DebugLevel.DETAIL)


def stop_comparing() -> None:
    """Return to the debug level of the environment."""
    set_debug_level_from_env()


def is_compared() -> bool:
    return get_debug_level() is DebugLevel.DETAIL


def is_mismatch(error: BaseException) -> bool:
    """Whether an error of torch is about collectives that differ between ranks."""
    return isinstance(error, RuntimeError) and str(error).startswith(_MISMATCH)


def sides_of(error: BaseException) -> tuple[Collective, ...]:
    """The collectives that a mismatch names: that of the rank that raised it, then that of another rank."""
    return tuple(
        Collective(
            op=_CALLS.get(found["op"], found["op"].lower()),
            number=int(found["number"]),
            shape=found["shape"],
            dtype=_DTYPES.get(found["dtype"], found["dtype"]),
        )
        for found in _FINGERPRINT.finditer(str(error))
    )


def describe_sides(sides: list[Side]) -> tuple[tuple[int, ...], str]:
    """The ranks at fault and a sentence that names all sides: those that a majority outvotes are at fault; all
    are if there is none."""
    ranks_of: dict[Collective, list[Side]] = {}
    for side in sorted(sides, key=lambda side: side.rank):
        ranks_of.setdefault(side.collective, []).append(side)
    largest = max(ranks_of.values(), key=len)
    outvoted = {side.rank for side in sides} - {side.rank for side in largest}
    at_fault = outvoted if 2 * len(largest) > len(sides) else {side.rank for side in sides}
    texts = []
    for collective, members in ranks_of.items():
        named = format_ranks([side.rank for side in members])
        places = dict.fromkeys(side.where for side in members)
        texts.append(
            f"{named} {'runs' if len(members) == 1 else 'run'} {collective} at {enumeration(list(places))}"
        )
    return tuple(sorted(at_fault)), "; ".join(texts)
