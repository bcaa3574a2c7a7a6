"""The topologies that are compared, as data: rows of a model, a number of ranks and how these are arranged.

A topology is written in words: axes with their sizes, and, where it is not the default, what data-parallel
ranks share (`none`, `optimizer`, `gradients`, `all`) and the dispatcher (`all_to_all`, `all_gather`). What the
other axes leave over is data parallel: `tp2 ep4 none` on 4 ranks is tp 2 · dp 2, with all ranks sharing experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from braid import fit
from braid.config import Mesh
from braid.parallel.sharding import Strategy

DISPATCHERS = ("all_to_all", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A number of ranks, and how they share the work."""

    world: int
    words: str

    @property
    def mesh(self) -> Mesh:
        return Mesh(**dict(_setting(word) for word in self.words.split()))

    @property
    def sizes(self) -> fit.Sizes:
        return fit.sizes(self.mesh, self.world)

    @property
    def axes(self) -> dict[str, int]:
        """Those of more than one rank; `replicate` where shards have copies."""
        sizes, mesh = self.sizes, self.mesh
        every = {name: getattr(sizes, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp")}
        return {name: size for name, size in (every | {"replicate": mesh.replicate}).items() if size > 1}

    def __str__(self) -> str:
        """All axes, then strategy and dispatcher."""
        mesh = self.mesh
        words = [f"{name}{size}" for name, size in self.axes.items()]
        return " ".join([*words, mesh.shard, *([] if mesh.dispatcher == "auto" else [mesh.dispatcher])])


def _setting(word: str) -> tuple[str, Any]:
    if word in get_args(Strategy):
        return "shard", word
    if word in DISPATCHERS:
        return "dispatcher", word
    matched = re.fullmatch(r"(tp|cp|pp|ep|etp|replicate)(\d+)", word)
    assert matched, f"{word!r} is no word for a topology"
    return matched[1], int(matched[2])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Topologies that are run on the same ranks, one after the other."""

    model: str
    world: int
    words: tuple[str, ...]

    @property
    def topologies(self) -> Iterator[Topology]:
        return (Topology(world=self.world, words=words) for words in self.words)

    @property
    def samples(self) -> int:
        """Of a step, in two micro-batches, which data-parallel ranks share equally."""
        return 12 if self.world % 3 == 0 else 16

    def __str__(self) -> str:
        return f"{self.model}-{self.world}"


def _batch(model: str, world: int, *words: str) -> Batch:
    return Batch(model=model, world=world, words=words)


QUICK = (
    _batch("hybrid", 2, "", "none", "optimizer", "gradients", "replicate2", "tp2", "cp2", "ep2", "etp2"),
    _batch("latent", 2, "tp2 ep2", "cp2 ep2 all_gather", "ep2 none", "etp2 all_to_all", "tp2 etp2"),
    _batch("tied", 2, "tp2", "cp2", "optimizer"),
    _batch("capacity", 2, "tp2 ep2", "cp2 none", "ep2 all_gather"),
    _batch("sinkhorn", 2, "tp2", "cp2 etp2", "ep2 gradients"),
    _batch("hybrid", 3, "", "etp3", "none"),
    _batch("tied", 3, "gradients", "replicate3"),
    _batch("hybrid", 4, "tp4", "tp4 ep4", "tp2 ep2", "tp2 cp2 ep2 etp2", "cp4 ep2", "cp2 ep4 gradients"),
    _batch("latent", 4, "tp4 ep2 etp2", "tp2 ep4 none", "cp2 replicate2", "ep4 all_gather", "tp2 cp2 ep4"),
    _batch("tied", 4, "tp4", "tp2 gradients", "cp4", "cp2 replicate2", "tp2 cp2"),
    _batch("capacity", 4, "tp2 cp2 ep4", "tp4 etp4", "ep2 etp2 optimizer"),
    _batch("sinkhorn", 4, "tp4 ep4", "cp2 ep2 replicate2", "tp2 etp2"),
    _batch("hybrid", 6, "tp2 ep2", "cp2 etp3 optimizer"),
    _batch("hybrid", 8, "tp2 cp2 ep4 etp2", "tp4 ep2 gradients", "tp2 ep2 etp2 replicate2"),
    _batch("latent", 8, "cp2 ep8", "tp8"),
)
"""What `make test` compares."""

LONG = (
    _batch("hybrid", 2, "etp2 all_to_all", "ep2 all_gather", "tp2 ep2 all_gather", "cp2 etp2 none"),
    _batch("sinkhorn", 3, "optimizer", "etp3 all_to_all"),
    _batch("hybrid", 4, "ep4", "etp4", "replicate2", "tp2 replicate2", "tp4 etp2 none", "cp2 ep2 etp2"),
    _batch("latent", 4, "optimizer", "cp4 etp2", "tp4 ep4 all_gather", "tp2 cp2 none", "ep2 replicate2"),
    _batch("capacity", 4, "tp4 ep4", "cp4 ep2 etp2", "tp2 ep4 all_gather", "etp2 replicate2"),
    _batch("sinkhorn", 4, "cp4", "tp2 cp2 etp4", "ep4 gradients"),
    _batch("hybrid", 6, "tp2 ep2 etp3", "cp2 replicate3", "ep2 replicate3", "etp2 none"),
    _batch("tied", 6, "tp2", "cp2 none", "replicate2"),
    _batch("latent", 6, "ep2", "cp2 ep2 etp3 gradients", "tp2 etp6"),
    _batch("hybrid", 8, "", "tp8", "cp8", "tp4 cp2 ep4", "tp2 cp4 ep2 none", "tp2 cp2 replicate2"),
    _batch("hybrid", 8, "tp2 cp2 ep2 replicate2", "cp2 ep4 etp2 replicate1", "tp2 cp2 etp2 optimizer"),
    _batch("latent", 8, "ep8", "tp2 ep8 all_gather", "tp4 cp2 ep2 etp4", "cp4 ep4 replicate2"),
    _batch("tied", 8, "tp4 gradients", "cp4 replicate2", "tp2 cp4", "tp8", "replicate4"),
    _batch("capacity", 8, "tp2 cp2 ep4", "cp2 ep2 etp4", "tp4 ep2 replicate2"),
    _batch("sinkhorn", 8, "tp2 cp4 etp2 ep4", "tp8 ep4", "cp2 ep4 optimizer"),
)
"""What `make test-long` compares besides."""
