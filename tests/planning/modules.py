"""Runs with encoders, tiny, for tests of plans, schedules and training on several grids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from braid.architecture import Attention, Mlp
from braid.config import Mesh, Module, Run
from braid.encoders import Encoder, Projector
from braid.recipes import load

HIDDEN = 32
TOKEN = 260
"""The placeholder of the first module; further ones follow."""


def encoder(width: int, **changes: Any) -> Encoder:
    """Two blocks over patches of 12 numbers, with two patches in a row."""
    shape = Encoder(
        pattern="[*-][*-]",
        hidden=HIDDEN,
        input=12,
        group=2,
        attention=Attention(heads=4, kv_heads=4, head_dim=8),
        mlp=Mlp(ffn=64, activation="gelu"),
        projector=Projector(width=width),
    )
    return replace(shape, **changes)


def run_with(meshes: Mapping[str, Mesh], language: Mesh | None = None, **changes: Any) -> Run:
    """`tiny` with an encoder on each of the meshes; `changes` are those of every module."""
    run = load("tiny")
    modules = {
        name: Module(
            model=encoder(run.model.hidden),
            token=TOKEN + number,
            most_items=2,
            most_patches=16,
            mesh=each,
        )
        for number, (name, each) in enumerate(meshes.items())
    }
    return replace(
        run,
        model=replace(run.model, vocab=300),
        train=replace(run.train, batch_samples=16, micro_batches=4),
        mesh=language or Mesh(),
        modules={name: replace(module, **changes) for name, module in modules.items()},
    )
