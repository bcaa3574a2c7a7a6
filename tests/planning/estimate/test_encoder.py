"""What an encoder says that autograd keeps is what autograd keeps, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from braid.choices import recomputed
from braid.encoders import Encoder, PositionTable, Projector
from braid.model.encoder import Items
from braid.nn.cost import Workload
from tests.model.encoder_cases import ENCODER, HYPER, IMAGES, build, items, pictures
from tests.nn.moe_ranks import Layout, groups_of
from tests.planning.estimate.reality import OPS, Calls, recorded
from tests.planning.estimate.test_recompute import Measured, beside
from tests.ranks import run_ranks

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


def calls_of(rank: int, world: int, layout: Layout, shape: Encoder) -> tuple[Calls, Calls]:
    """The calls that the parts of an encoder on several ranks say, and those that they make."""
    model = build("[*-][*-]", shape, groups_of(layout))
    given = pictures([(4, 6), (2, 4)])
    with recorded() as calls:
        model(given).sum().backward()
    tokens = shape.pack_tokens(sum(given.lengths), 2, model.groups.tp_cp.size)
    workload = Workload(rows=1, tokens=tokens, items=2, dtype=torch.float64, device="cpu")
    told: Calls = Counter()
    for call in (call for cost in model.costs(workload).values() for call in cost.calls):
        told[OPS.get(call.op, call.op), call.ranks, call.payload] += call.times
    return told, calls


@pytest.mark.parametrize("layout", [Layout(tp=2), pytest.param(Layout(cp=2), marks=pytest.mark.long)], ids=str)
def test_ranks_send_what_parts_say(layout: Layout) -> None:
    """With prefix tokens, features are gathered."""
    for told, calls in run_ranks(2, calls_of, layout, IMAGES):
        assert told == calls
