"""The topologies that are compared, as data: rows of a model, a number of ranks and how these are arranged.

A topology is written in words: axes with their sizes, and, where it is not the default, how many segments each
pipeline rank holds (`v2`), what data-parallel ranks share (`none`, `optimizer`, `gradients`, `all`), the
dispatcher (`all_to_all`, `all_gather`), the schedule (`dual` for DualPipeV, which holds two segments per rank)
and whether it overlaps (`overlap`). What the other axes leave over is data parallel: `tp2 ep4 none` on 4
ranks is tp 2 · dp 2, with all ranks sharing experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from braid import fit
from braid.config import Mesh, Run
from braid.parallel.sharding import Strategy
from braid.pattern import parse

DISPATCHERS = ("all_to_all", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A number of ranks, and how they share the work."""

    world: int
    words: str

    def of(self, run: Run) -> Run:
        """The run on this topology, its pattern cut into segments where there is a pipeline."""
        segments = self.mesh.pp * self.virtual
        pattern = segmented(run.model.pattern, segments) if segments > 1 else run.model.pattern
        return replace(run, model=replace(run.model, pattern=pattern), mesh=self.mesh)

    @property
    def mesh(self) -> Mesh:
        settings = dict(_setting(word) for word in self.words.split())
        return Mesh(**{name: value for name, value in settings.items() if name != "v"})

    @property
    def virtual(self) -> int:
        """Segments that each pipeline rank holds."""
        folded = self.mesh.schedule == "dual_pipe_v"
        return int(dict(_setting(word) for word in self.words.split()).get("v", 2 if folded else 1))

    @property
    def sizes(self) -> fit.Sizes:
        return fit.sizes(self.mesh, self.world)

    @property
    def axes(self) -> dict[str, int]:
        """Those of more than one rank; `v` where these hold several segments, `replicate` where shards have
        copies."""
        every = {name: getattr(self.sizes, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
        every |= {"v": self.virtual, "replicate": self.mesh.replicate}
        return {name: size for name, size in every.items() if size > 1}

    def __str__(self) -> str:
        """All axes, then strategy, dispatcher and schedule."""
        mesh = self.mesh
        words = [*(f"{name}{size}" for name, size in self.axes.items()), mesh.shard]
        words += [] if mesh.dispatcher == "auto" else [mesh.dispatcher]
        words += ["dual"] * (mesh.schedule == "dual_pipe_v") + ["overlap"] * mesh.overlap
        return " ".join(words)


def _setting(word: str) -> tuple[str, Any]:
    if word in get_args(Strategy):
        return "shard", word
    if word in DISPATCHERS:
        return "dispatcher", word
    if word == "dual":
        return "schedule", "dual_pipe_v"
    if word == "overlap":
        return "overlap", True
    matched = re.fullmatch(r"(tp|cp|pp|v|ep|etp|replicate)(\d+)", word)
    assert matched, f"{word!r} is no word for a topology"
    return matched[1], int(matched[2])


def segmented(pattern: str, segments: int) -> str:
    """The pattern with its blocks in so many segments, as evenly as they go; some may be empty."""
    main, slash, depth = pattern.partition("/")
    held: list[list[str]] = [[] for _ in range(segments)]
    blocks = parse(main).blocks
    for number, block in enumerate(blocks):
        held[number * segments // len(blocks)].append(str(block))
    return "|".join("".join(segment) for segment in held) + slash + depth


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
    def step(self) -> dict[str, int]:
        """What a step is made of: micro-batches that data-parallel ranks share equally, and enough of them to
        fill a pipeline."""
        pipelined = any(topology.mesh.pp > 1 for topology in self.topologies)
        return {"samples": 12 if self.world % 3 == 0 else 16, "micro_batches": 4 if pipelined else 2}

    def __str__(self) -> str:
        return f"{self.model}-{self.world}-{self.words[0].replace(' ', '-') or 'dp'}"


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
    _batch("hybrid", 8, "tp2 cp2 ep4 etp2", "tp4 ep2 gradients", "tp2 ep2 etp2 replicate2 gradients"),
    _batch("latent", 8, "cp2 ep8", "tp8"),
    _batch("hybrid", 2, "pp2", "pp2 v2 none"),
    _batch("tied", 4, "pp2 tp2", "pp4 v2", "pp2 replicate2", "pp2 dual gradients"),
    _batch("hybrid", 4, "pp2 tp2 ep2", "pp2 cp2 v2 etp2", "pp2 gradients"),
    _batch("latent", 4, "pp4", "pp2 v2 ep2 optimizer", "pp2 dual overlap ep2"),
    _batch("hybrid", 8, "pp2 tp2 cp2 ep2 etp2", "pp2 tp2 ep4 v2 none"),
    _batch("hyper", 2, "", "none", "optimizer", "gradients", "tp2", "cp2", "ep2", "etp2", "ep2 overlap"),
    _batch("hyper", 3, "etp3", "replicate3"),
    _batch("hyper", 4, "tp2 ep2", "tp2 cp2 ep2 etp2", "cp2 ep4 gradients", "pp2 tp2 ep2", "pp2 v2 ep2 overlap"),
    _batch("hyper", 4, "pp4", "pp2 dual", "pp2 ep2 dual overlap", "pp2 cp2 none"),
)
"""What `make test` compares."""

LONG = (
    _batch("hybrid", 2, "etp2 all_to_all", "ep2 all_gather", "tp2 ep2 all_gather", "cp2 etp2 none"),
    _batch("sinkhorn", 3, "optimizer", "etp3 all_to_all"),
    _batch("hybrid", 4, "ep4", "etp4", "replicate2", "tp2 replicate2", "tp4 etp2 none", "cp2 ep2 etp2"),
    _batch(
        "latent", 4, "optimizer", "cp4 etp2", "tp4 ep4 all_gather", "tp2 cp2 none", "ep2 replicate2 optimizer"
    ),
    _batch("capacity", 4, "tp4 ep4", "cp4 ep2 etp2", "tp2 ep4 all_gather", "etp2 replicate2"),
    _batch("sinkhorn", 4, "cp4", "tp2 cp2 etp4", "ep4 gradients"),
    _batch("hybrid", 6, "tp2 ep2 etp3", "cp2 replicate3", "ep2 replicate3", "etp2 none"),
    _batch("tied", 6, "tp2", "cp2 none", "replicate2"),
    _batch("latent", 6, "ep2", "cp2 ep2 etp3 gradients", "tp2 etp6"),
    _batch("hybrid", 8, "", "tp8", "cp8", "tp4 cp2 ep4", "tp2 cp4 ep2 none", "tp2 cp2 replicate2"),
    _batch("hybrid", 8, "tp2 cp2 ep2 replicate2", "cp2 etp2 replicate2 gradients", "tp2 cp2 etp2 optimizer"),
    _batch("latent", 8, "ep8", "tp2 ep8 all_gather", "tp4 cp2 ep2 etp4", "cp4 ep4 replicate2"),
    _batch("tied", 8, "tp4 gradients", "cp4 replicate2", "tp2 cp4", "tp8", "replicate4"),
    _batch("capacity", 8, "tp2 cp2 ep4", "cp2 ep2 etp4", "tp4 ep2 replicate2"),
    _batch("sinkhorn", 8, "tp2 cp4 etp2 ep4", "tp8 ep4", "cp2 ep4 optimizer"),
    _batch("sinkhorn", 2, "pp2 v2", "pp2 gradients"),
    _batch("capacity", 4, "pp4 dual overlap", "pp2 tp2 ep2 dual overlap", "pp2 cp2 dual none"),
    _batch("hybrid", 4, "pp2 tp2 ep2 dual overlap optimizer", "pp2 cp2 dual", "pp2 replicate2 dual overlap"),
    _batch("tied", 8, "pp4 tp2 dual", "pp2 tp2 cp2 dual none"),
    _batch("hybrid", 3, "pp3", "pp3 v2"),
    _batch("capacity", 4, "pp2 tp2 ep2", "pp2 cp2 none", "pp4", "pp2 v2 ep2 all_gather"),
    _batch("latent", 4, "pp2 tp2 etp2", "pp2 cp2 ep2", "pp2 v4 tp2", "pp2 ep2 gradients"),
    _batch("hybrid", 6, "pp2 etp3", "pp3 tp2 ep2", "pp2 replicate3", "pp3 v2 cp2"),
    _batch("hybrid", 8, "pp2 cp2 ep2 replicate2", "pp4 tp2 optimizer", "pp8", "pp2 tp4 ep4", "pp2 ep2 etp2"),
    _batch("tied", 8, "pp2 tp2 cp2", "pp4 cp2 v2", "pp2 cp2 replicate2 gradients", "pp4 replicate2"),
    _batch("latent", 8, "pp2 tp2 ep2 replicate2", "pp4 ep2 v2", "pp2 tp2 cp2 ep4", "pp2 cp4 etp4"),
    _batch("sinkhorn", 8, "pp2 tp2 etp2 replicate2", "pp2 tp2 ep2 etp2", "pp2 cp2 etp2 optimizer"),
    _batch(
        "hyper", 4, "tp4 ep4", "cp4", "ep4 all_gather", "replicate2", "tp2 none", "ep2 etp2 optimizer overlap"
    ),
    _batch("hyper", 4, "pp2 tp2 ep2 dual overlap", "pp4 v2", "pp2 replicate2", "pp2 tp2 ep2 overlap optimizer"),
    _batch("hyper", 6, "tp2 etp3", "cp2 ep2", "pp3 tp2", "pp2 etp3"),
    _batch("hyper", 8, "tp2 cp2 ep4 etp2", "pp2 tp2 cp2 ep2", "tp8", "pp2 cp2 ep2 replicate2 gradients", "pp8"),
)
"""What `make test-long` compares besides."""
