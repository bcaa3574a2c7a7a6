"""The models of `overlap_cases`, with parts of them recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from braid.config import Run
from tests.engine import overlap_cases

NAMES = (("norm",), ("activation", "core", "experts"), ("block",), ("full",))


def recomputing(run: Run, names: tuple[str, ...]) -> Run:
    return replace(run, train=replace(run.train, recompute=names))


@dataclass(frozen=True, kw_only=True)
class Overlapped(overlap_cases.Case):
    """Without overlap it keeps everything."""

    recompute: tuple[str, ...] = ()
    steps: int = 2

    def run(self, *, overlap: bool) -> Run:
        return recomputing(super().run(overlap=overlap), self.recompute if overlap else ())

    def __str__(self) -> str:
        return f"{super().__str__()} {'+'.join(self.recompute)}"
