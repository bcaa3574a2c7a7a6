"""The models of `overlap_cases`, with what their blocks save on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from braid.config import Run
from tests.engine import overlap_cases
from tests.engine.overlap_cases import Trained, train


@dataclass(frozen=True, kw_only=True)
class Offloaded(overlap_cases.Case):
    """The oracle keeps everything on the device."""

    share: float = 1.0
    recompute: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()

    def run(self, *, overlap: bool) -> Run:
        run = super().run(overlap=overlap)
        chosen: dict[str, object] = {}
        if overlap:
            chosen = {"offload": self.share, "recompute": self.recompute, "offload_regions": self.regions}
        return replace(run, train=replace(run.train, **chosen))

    def __str__(self) -> str:
        return f"{super().__str__()} {self.share} {'+'.join(self.recompute)} {'+'.join(self.regions)}"


def train_both(rank: int, world: int, case: Offloaded) -> tuple[Trained, Trained]:
    return train(rank, case, overlap=False), train(rank, case, overlap=True)
