"""An encoder whose heads, channels and patches ranks share: rows and gradients are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from braid.distributed.collectives import Groups, all_gather, all_reduce_no_grad
from braid.encoders import Encoder
from braid.model.context import MicroBatchTotals
from braid.model.encoder import EncoderModel, Items, own_rows
from braid.model.multimodal import mask_placeholders
from tests.model.cases import SHAPE
from tests.model.cases import batch as text_batch
from tests.model.cases import build as build_language
from tests.model.encoder_cases import (
    ENCODER,
    GRIDS,
    HYPER,
    IMAGES,
    LENGTHS,
    build,
    items,
    pictures,
    probe,
)
from tests.nn.moe_ranks import Layout, groups_of
from tests.ranks import run_ranks

TWO = (Layout(tp=2), Layout(cp=2), Layout(tp=2, ep=2), Layout(cp=2, etp=2))
FOUR = (Layout(tp=2, cp=2), Layout(tp=4), Layout(tp=2, cp=2, ep=2, etp=2))
CASES = {
    "attention": ("[*-][*E]", replace(ENCODER, dropout=0.1)),
    "recurrent": ("[ME][G-]", ENCODER),
    "hyper": ("[+-][+E]", HYPER),
    "images": ("[*-][*E]", IMAGES),
}


def ran(text: str, shape: Encoder, given: Items, groups: Groups = Groups()) -> tuple[EncoderModel, Tensor]:
    """The model with its gradients, and this rank's rows."""
    model = build(text, shape, groups)
    totals = MicroBatchTotals(tokens=sum(map(shape.tokens, given.lengths)), rows=1)
    context = model.prepare(given, totals)
    rows_rW, losses = model.run(model.segments, None, context)
    held = own_rows(context.batch.rows, groups.tp_cp.rank, groups.tp_cp.size)
    probe_RW = probe(context.batch.rows, shape.projector.width)
    cost = (rows_rW * probe_RW[held.start : held.stop]).sum() + sum(losses.aux.values(), torch.zeros(()))
    cost.backward()
    return model, rows_rW.detach()


def compared(rank: int, world: int, layouts: tuple[Layout, ...], text: str, shape: Encoder) -> dict[str, float]:
    """The worst relative deviation of everything, over packs with and without items."""
    worst: dict[str, float] = {}

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape, name
        deviation = float((actual - expected).norm() / expected.norm().clamp(min=1e-6))
        worst[name] = max(worst.get(name, 0.0), deviation)

    for layout in layouts:
        groups = groups_of(layout)
        packs = [pictures(GRIDS[:count]) for count in (4, 1, 0)]
        if not shape.has_squares:
            packs = [items(lengths) for lengths in (LENGTHS, (2,), ())]
        for given in packs:
            model, rows = ran(text, shape, given, groups)
            alone, whole = ran(text, shape, given)
            held = own_rows(len(whole), groups.tp_cp.rank, groups.tp_cp.size)
            compare("rows", rows, whole[held.start : held.stop])
            wholes, tensors, whole_tensors = alone.canonical(), model.tensors(), alone.tensors()
            assert model.canonical().keys() <= wholes.keys()  # a rank has some of the experts
            for name, place in model.canonical().items():
                if tensors[place.parameter].grad is None:
                    continue
                grad = place.read(_grad(tensors[place.parameter]))
                data = groups.edp if ".experts." in name else groups.dp_cp
                grad = all_reduce_no_grad(all_reduce_no_grad(grad, place.copies), data)
                compare(
                    name, grad, place.held.of(wholes[name].read(_grad(whole_tensors[wholes[name].parameter])))
                )
    return worst


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layouts", [TWO, pytest.param(FOUR, marks=pytest.mark.long)], ids=["two", "four"])
def test_ranks_find_what_one_process_finds(case: str, layouts: tuple[Layout, ...]) -> None:
    text, shape = CASES[case]
    for worst in run_ranks(layouts[0].world, compared, layouts, text, shape):
        assert {"rows", "patches.weight", "projector.up.weight", "projector.out.weight"} < worst.keys()
        assert ("patches.positions" in worst) == ("patches.prefix" in worst) == (case == "images")
        assert max(worst.values()) < 1e-10, worst


# -------------------------------------------------------------------------------------- with the language


def merged(rank: int, world: int, layout: Layout) -> dict[str, float]:
    """The worst deviation of losses and gradients if encoder and language model share their ranks, and every
    rank has been given the rows that its own tokens want."""
    groups, ids, worst = groups_of(layout), {"vision": 16}, dict[str, float]()
    whole = text_batch([[12], [5, 7]])
    tokens = whole.tokens_BT % 16
    tokens[0, 3:9] = tokens[1, 6:11] = 16
    data = mask_placeholders(replace(whole, tokens_BT=tokens, labels_BT=tokens.roll(-1, 1)), ids)
    language = build_language("*-", replace(SHAPE, attention=ENCODER.attention, mlp=ENCODER.mlp))

    def loss(encoder: EncoderModel, group: Groups) -> Tensor:
        rows_rW = encoder(items((4, 2, 6, 10)))
        lengths = [len(own_rows(11, each, group.tp_cp.size)) for each in range(group.tp_cp.size)]
        padded = torch.nn.functional.pad(rows_rW, (0, 0, 0, lengths[0] - len(rows_rW)))
        everyone = all_gather(padded, group.tp_cp, dim=0)[:11]
        context = language.prepare(data, modules=ids)
        return language.losses(context, {"vision": everyone}).share(10) / group.tp_cp.size

    sharded, alone = build("[*-]", groups=groups), build("[*-]")
    loss(sharded, groups).backward()
    loss(alone, Groups()).backward()
    wholes, tensors, whole_tensors = alone.canonical(), sharded.tensors(), alone.tensors()
    for name, place in sharded.canonical().items():
        grad = place.read(_grad(tensors[place.parameter]))
        grad = all_reduce_no_grad(all_reduce_no_grad(grad, place.copies), groups.dp_cp)
        expected = place.held.of(wholes[name].read(_grad(whole_tensors[wholes[name].parameter])))
        worst[name] = float((grad - expected).norm() / expected.norm().clamp(min=1e-6))
    return worst


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2)], ids=str)
def test_gradients_of_a_language_model_reach_a_shared_encoder_once(layout: Layout) -> None:
    for worst in run_ranks(2, merged, layout):
        assert max(worst.values()) < 1e-10, worst
