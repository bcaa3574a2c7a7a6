"""The tuned table: which kernel computes wgrad, the experts' weight gradients, for which shape of work.

wgrad is the one matmul of the grouped MLP without a kernel that is fastest everywhere. With few rows per expert
it is bound by reading and writing the float32 gradients, and the CUDA kernel wins; with many rows it is bound
by the tensor cores, and the warp-specialised one wins. Nothing is timed during training: `python -m
benchmarks.experts --tune` is the autotune step, run once per GPU model, and `tuned_table.json` holds what it
found. A shape that is not in the table uses the row nearest to it.
"""

from __future__ import annotations

import json
from importlib.resources import files
from math import log2
from typing import Literal, NamedTuple

FILE = "tuned_table.json"

WgradKernel = Literal["cuda", "warp-specialised"]
"""`device.wgrad_cuda` and `device.wgrad_warp_specialised`."""


class Work(NamedTuple):
    """The shape of the grouped MLP of one layer on one rank."""

    rows: int
    """Per expert, on average."""
    hidden: int
    ffn: int

    def distance(self, other: Work) -> float:
        """How many doublings of rows, hidden and ffn channels lie between two shapes."""
        return sum(abs(log2(max(mine, 1) / max(its, 1))) for mine, its in zip(self, other, strict=True))


class Tuned(NamedTuple):
    """A row of the table."""

    work: Work
    wgrad: WgradKernel


def from_json(text: str) -> tuple[Tuned, ...]:
    """The table that `to_json` wrote."""
    return tuple(Tuned(Work(**row["work"]), row["wgrad"]) for row in json.loads(text)["shapes"])


def to_json(table: tuple[Tuned, ...]) -> str:
    """The table as a file, one line per row."""
    rows = (json.dumps({"work": row.work._asdict(), "wgrad": row.wgrad}) for row in table)
    return '{"shapes": [\n  ' + ",\n  ".join(rows) + "\n]}\n"


def tuned_table() -> tuple[Tuned, ...]:
    """The table that comes with this package, measured on an H200."""
    return from_json(files(__package__).joinpath(FILE).read_text())


def nearest(table: tuple[Tuned, ...], work: Work) -> WgradKernel:
    """The kernel of the row whose shape is nearest."""
    return min(table, key=lambda row: work.distance(row.work)).wgrad
