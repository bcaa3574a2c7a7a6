"""Encoders and a language model in one process: rows in place of placeholders, and gradients through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import ALONE, Group
from braid.errors import DataError
from braid.model.context import MicroBatch
from braid.model.encoder import EncoderModel, Items
from braid.model.language import LanguageModel
from braid.model.multimodal import mask_placeholders, merge, placeholders
from tests.model.cases import SHAPE, assert_near, batch, build, canonical_grads
from tests.model.encoder_cases import ENCODER, gradients, items
from tests.model.encoder_cases import build as build_encoder

IDS = {"vision": 15, "audio": 16}
TEXT = 15
"""Ids below are those of text."""


def with_items(whole: MicroBatch, runs: Mapping[str, list[tuple[int, int, int]]]) -> MicroBatch:
    """The batch with placeholders at (row, first token, tokens), and next tokens as labels."""
    tokens = whole.tokens_BT % TEXT
    for name, places in runs.items():
        for row, first, length in places:
            tokens[row, first : first + length] = IDS[name]
    labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    return mask_placeholders(replace(whole, tokens_BT=tokens, labels_BT=labels), IDS)


RUNS = {"vision": [(0, 1, 2), (0, 5, 1), (1, 0, 5), (1, 7, 3)], "audio": [(0, 8, 2), (1, 6, 1)]}
"""Several items in a sample, one of one row, one at the beginning of a row."""


def encoders() -> dict[str, EncoderModel]:
    return {"vision": build_encoder("[*-]"), "audio": build_encoder("M", replace(ENCODER, group=1, input=3))}


def inputs() -> dict[str, Items]:
    return {"vision": items((4, 2, 10, 6)), "audio": items((2, 1), 3)}


def loss_of(
    model: LanguageModel, rows: Mapping[str, Tensor], given: MicroBatch, ids: Mapping[str, int] = IDS
) -> Tensor:
    losses = model.losses(model.prepare(given, modules=ids), rows)
    return losses.share(10, [10] * len(model.mtp))


@pytest.mark.parametrize(
    ("text", "hyper"),
    [("[*-][*E]", None), ("*-/*-", None), ("*-", architecture.HyperConnections(streams=2, sinkhorn_steps=3))],
    ids=["moe", "mtp", "hyper"],
)
def test_gradients_are_those_of_finite_differences(
    text: str, hyper: architecture.HyperConnections | None
) -> None:
    """Along a random direction of all weights of all modules at once."""
    model, modules, given = build(text, replace(SHAPE, hyper=hyper)), encoders(), inputs()
    data = with_items(batch([[11], [4, 7]]), RUNS)

    def loss() -> Tensor:
        return loss_of(model, {name: module(given[name]) for name, module in modules.items()}, data)

    weights = [p for each in (model, *modules.values()) for p in each.parameters()]
    grads = torch.autograd.grad(loss(), weights, allow_unused=True, materialize_grads=True)
    directions = [
        torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(n))
        for n, p in enumerate(weights)
    ]
    slope = sum((grad * way).sum() for grad, way in zip(grads, directions, strict=True))
    found, step = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2, 1):
            for p, way in zip(weights, directions, strict=True):
                p += sign * step * way
            found.append(loss())
    expected = (found[0] - found[1]) / (2 * step)
    assert abs(float(slope - expected)) < 1e-7 * max(1.0, abs(float(expected)))
    assert all(bool(grad.count_nonzero()) for grad in grads)


def test_rows_stand_where_placeholders_are_and_share_gradients_with_nothing() -> None:
    model, data = build("*-"), with_items(batch([[11], [4, 7]]), RUNS)
    rows = {name: torch.randn(count, 20, dtype=torch.float64) for name, count in (("vision", 11), ("audio", 3))}
    rows = {name: each.requires_grad_() for name, each in rows.items()}
    context = model.prepare(data, modules=IDS)
    x_BTC = model.embed(context, rows)
    assert model.embedding is not None
    expected = model.embedding.weight[data.tokens_BT].clone()
    for name, token in IDS.items():
        expected[data.tokens_BT == token] = rows[name]
    assert torch.equal(x_BTC, expected)
    probe = torch.randn_like(x_BTC)
    given = (model.embedding.weight, *rows.values())
    for actual, wanted in zip(*(torch.autograd.grad(y, given, probe) for y in (x_BTC, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-14, atol=1e-14)
    (embedding_grad,) = torch.autograd.grad(model.embed(context, rows), (model.embedding.weight,), probe)
    assert not embedding_grad[TEXT:].count_nonzero()


def test_samples_without_items_are_a_plain_run() -> None:
    data = with_items(batch([[11], [4, 7]]), {})
    model, plain, modules = build("*-"), build("*-"), encoders()
    given = {"vision": items(()), "audio": items((), 3)}
    loss = loss_of(model, {name: module(given[name]) for name, module in modules.items()}, data)
    expected = loss_of(plain, {}, data, {})
    for each in (loss, expected):
        each.backward()
    assert torch.equal(loss, expected)
    grads = canonical_grads(plain)
    assert all(torch.equal(grad, grads[name]) for name, grad in canonical_grads(model).items())
    for module in modules.values():
        assert not any(bool(grad.count_nonzero()) for grad in gradients(module).values())


def test_one_module_after_the_other_is_both_at_once() -> None:
    """Two encoders with ids of their own, against plain torch: rows written into a copy of the embeddings."""
    model, modules, data = build("*-"), encoders(), with_items(batch([[11], [4, 7]]), RUNS)
    rows = {name: module(inputs()[name]) for name, module in modules.items()}
    loss_of(model, rows, data).backward()
    twin, others = build("*-"), encoders()
    context = twin.prepare(data)
    assert twin.embedding is not None
    x_BTC = twin.embedding(data.tokens_BT)
    for name, module in others.items():
        where_BT1 = (data.tokens_BT == IDS[name])[..., None]
        x_BTC = x_BTC.masked_scatter(where_BT1, module(inputs()[name]))
    hidden = twin.apply_final_norm(twin.stack(x_BTC, twin.segments, context))
    (twin.head_loss(hidden, data.labels_BT, data.loss_mask_BT)[0] / 10).backward()
    assert_near(canonical_grads(model), canonical_grads(twin), 1e-12)
    for name, module in modules.items():
        assert_near(gradients(module), gradients(others[name]), 1e-12)


def test_the_loss_leaves_out_targets_that_are_placeholders() -> None:
    data = with_items(
        replace(batch([[11]]), loss_mask_BT=torch.ones(1, 11, dtype=torch.bool)), {"vision": [(0, 3, 4)]}
    )
    masked = [2, 3, 4, 5]  # the token before the item, and all of the item but its last
    assert (~data.loss_mask_BT[0]).nonzero().flatten().tolist() == masked
    assert mask_placeholders(data, {}) is data


def test_merging_saves_indices_only() -> None:
    saved: list[Tensor] = []
    x, rows = (torch.randn(*size, 4).requires_grad_() for size in ((2, 5), (3,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        merge(x, {"vision": torch.tensor([1, 2, 7])}, {"vision": rows})
    assert {tensor.dtype for tensor in saved} == {torch.int64}


def test_too_few_or_too_many_rows_are_refused() -> None:
    with pytest.raises(DataError, match="vision: 2 rows for 3 placeholders"):
        merge(torch.zeros(1, 5, 4), {"vision": torch.tensor([1, 2, 3])}, {"vision": torch.zeros(2, 4)})


def test_a_rank_finds_the_placeholders_of_its_own_slice() -> None:
    tokens = torch.tensor([[0, 15, 15, 15], [15, 0, 0, 15]])
    assert placeholders(tokens, {"vision": 15}, ALONE)["vision"].tolist() == [1, 2, 3, 4, 7]
    found = [
        placeholders(tokens, {"vision": 15}, Group(name="tp_cp", size=2, rank=rank, handle=object()))  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert [each["vision"].tolist() for each in found] == [[1, 2], [0, 1, 3]]
