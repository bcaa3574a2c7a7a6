"""Runs with encoders on grids of their own, and the placements that they are compared on.

    vision    attention and MLPs, two patches in a row, items of up to 16 patches
    experts   attention and experts, with auxiliary losses and a selection bias; every patch makes a row
    radio     a ViT: a table of positions with jitter, prefix tokens, LayerScale, 2 x 2 patches in a row

A placement is written like a topology (`matrix.py`), for the language model and for every module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from braid.architecture import Attention, HyperConnections, Mlp, Moe
from braid.config import Mesh, Module, Run
from braid.encoders import Encoder, Pixels, PositionTable, Projector
from tests.topology.cases import VOCAB, run_of
from tests.topology.matrix import Topology, segmented

TOKEN = VOCAB
"""The placeholder of the first module; further ones follow."""

VISION = Encoder(
    pattern="[*-][*-]",
    hidden=16,
    input=10,
    group=2,
    init_std=0.2,
    attention=Attention(heads=4, kv_heads=4, head_dim=4),
    mlp=Mlp(ffn=16, activation="gelu"),
    projector=Projector(width=24, ffn=12, norm="rms"),
)
EXPERTS = replace(
    VISION,
    pattern="[*E][*-]",
    group=1,
    hyper=HyperConnections(streams=2),
    moe=Moe(
        experts=4,
        top_k=2,
        ffn=8,
        aux_loss=0.02,
        z_loss=0.01,
        selection_bias=True,
        selection_bias_rate=0.05,
        score="sigmoid",
    ),
    projector=Projector(width=24),
)
RADIO = Encoder(
    pattern="[*-][*-]",
    hidden=16,
    norm="layer",
    norm_eps=1e-6,
    init_std=0.2,
    input=12,
    input_bias=False,
    pixels=Pixels(patch=2),
    positions=PositionTable(rows=6, columns=6, jitter=True),
    prefix=3,
    layer_scale=0.6,
    final_norm=False,
    group=4,
    attention=Attention(heads=4, kv_heads=4, head_dim=4, positions="none", bias=True),
    mlp=Mlp(ffn=16, activation="gelu_tanh", bias=True),
    projector=Projector(width=24, ffn=12, activation="relu2", bias=False, norm="rms"),
)


def multimodal(
    model: str, corpus: Path | str, encoders: Mapping[str, Encoder], *, patches: int = 8, **step: Any
) -> Run:
    """A model of the matrix with made-up items for every encoder, of so many patches in a sample."""
    run = run_of(model, corpus, **step)
    width = run.model.hidden
    modules = {
        name: Module(
            model=replace(each, projector=replace(each.projector, width=width)),
            token=TOKEN + number,
            most_items=2,
            most_patches=patches,
            items="synthetic",
        )
        for number, (name, each) in enumerate(encoders.items())
    }
    return replace(run, model=replace(run.model, vocab=VOCAB + len(modules)), modules=modules)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the modules of a run are."""

    world: int
    language: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)

    def of(self, run: Run) -> Run:
        """The run in this placement."""
        placed = Topology(world=self.world, words=self.language).of(run)
        modules = {
            name: self._module(module, self.modules.get(name, "")) for name, module in run.modules.items()
        }
        return replace(placed, modules=modules)

    def _module(self, module: Module, words: str) -> Module:
        mesh: Mesh = Topology(world=self.world, words=words).mesh
        pattern = module.model.pattern
        pattern = segmented(pattern, mesh.pp) if mesh.pp > 1 else pattern
        return replace(module, mesh=mesh, model=replace(module.model, pattern=pattern))

    def __str__(self) -> str:
        parts = {"language": self.language, **self.modules}
        return f"{self.world}: " + ", ".join(f"{name} {words or 'dp'}" for name, words in parts.items())
