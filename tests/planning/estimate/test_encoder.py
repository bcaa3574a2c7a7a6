"""What an encoder says that autograd keeps is what autograd keeps, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from braid.choices import recomputed
from braid.encoders import Encoder, PositionTable, Projector
from braid.model.encoder import Items
from braid.nn.cost import Workload
from tests.model.encoder_cases import ENCODER, HYPER, IMAGES, build, items, pictures
from tests.planning.estimate.test_recompute import Measured, beside

PATCHES = 130
PROJECTORS = (
    Projector(width=20),
    Projector(width=20, ffn=9),
    Projector(width=20, ffn=9, norm="rms", activation="swiglu"),
)


def check(
    text: str,
    shape: Encoder,
    dtype: torch.dtype,
    recompute: tuple[str, ...] = (),
    given: Items | None = None,
) -> None:
    model, replays = build(text, shape, dtype=dtype), Measured(recompute)
    given = items((PATCHES,), dtype=dtype) if given is None else given
    context = model.prepare(given)
    model.recompute(replays)
    rows, losses = model.run(model.segments, None, context)
    real = replays.kept(list(model.parameters()), beside(context, recompute))
    names = recomputed(recompute)
    tokens, count = sum(map(shape.tokens, given.lengths)), len(given.lengths)
    workload = Workload(rows=1, tokens=tokens, items=count, dtype=dtype, device="cpu", recompute=names)
    assert sum(cost.kept for cost in model.costs(workload).values()) == real
    (rows.sum() + sum(losses.aux.values(), torch.zeros(()))).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("projector", PROJECTORS, ids=["affine", "mlp", "gated, normed"])
@pytest.mark.parametrize("group", [1, 2])
def test_projectors(projector: Projector, group: int, dtype: torch.dtype) -> None:
    check("-", replace(ENCODER, projector=projector, group=group), dtype)


@pytest.mark.parametrize("shape", [ENCODER, HYPER], ids=["plain", "hyper"])
@pytest.mark.parametrize("text", ["[*-][ME]", "[+-][GE]"])
def test_whole_encoders(text: str, shape: Encoder) -> None:
    check(text, shape, torch.bfloat16)


@pytest.mark.parametrize("recompute", [("norm",), ("core", "activation", "experts"), ("block",)], ids=str)
@pytest.mark.parametrize("projector", PROJECTORS, ids=["affine", "mlp", "gated, normed"])
def test_recompute(projector: Projector, recompute: tuple[str, ...]) -> None:
    check("[*-][*E]", replace(ENCODER, projector=projector), torch.float32, recompute)


@pytest.mark.parametrize(
    "recompute", [(), ("norm",), ("core", "activation", "experts"), ("norm", "activation"), ("block",)], ids=str
)
@pytest.mark.parametrize(
    "change", [{}, {"final_norm": True}, {"prefix": 0}, {"positions": PositionTable(rows=1)}], ids=str
)
def test_images(change: dict[str, Any], recompute: tuple[str, ...]) -> None:
    """Tables, prefix tokens and LayerScale; attention as costs assume it, over one document."""
    shape = replace(IMAGES, **change)
    for dtype in (torch.float32, torch.bfloat16):
        check("[*-][*E]", shape, dtype, recompute, pictures([(10, 12)], dtype))


@pytest.mark.parametrize("position", ["pre", "post"])
def test_several_images_and_norms_on_outputs(position: Any) -> None:
    check("-E", replace(IMAGES, norm_position=position), torch.float32, given=pictures(dtype=torch.float32))
