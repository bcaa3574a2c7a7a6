"""Multi-token prediction: what each depth reads and predicts, in the right place, for any number of depths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from braid.model import nodes
from braid.model.context import MicroBatch
from braid.model.declaration import chains, form_of
from braid.model.mtp import targets
from tests.model.cases import SHAPE, assert_near, batch, build, canonical_grads, part


def counting(lengths: list[int]) -> MicroBatch:
    """One row of documents whose tokens are numbered through, with true labels."""
    whole = batch([lengths], vocab=1000)
    tokens = torch.arange(1, sum(lengths) + 1)[None]
    ends = torch.cumsum(torch.tensor(lengths), 0) - 1
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, ends] = False
    return replace(whole, tokens_BT=tokens, labels_BT=tokens + 1, loss_mask_BT=mask)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4))
def test_depth_d_is_shown_token_i_plus_1_plus_d_and_predicts_the_next(lengths: list[int], depth: int) -> None:
    whole = counting(lengths)
    shown = targets(whole, depth)
    counted = 0
    for i in range(sum(lengths)):
        if shown.loss_mask_BT[0, i]:
            counted += 1
            assert shown.tokens_BT[0, i] == i + 2 + depth
            assert shown.labels_BT[0, i] == i + 3 + depth
    assert counted == sum(max(0, length - 2 - depth) for length in lengths)


def test_masked_labels_stay_masked_at_every_depth() -> None:
    whole = batch([[9, 8], [17]])
    for depth in range(3):
        mask = targets(whole, depth).loss_mask_BT
        moved = F.pad(whole.loss_mask_BT[:, depth + 1 :], (0, depth + 1))
        assert not (mask & ~moved).any()


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_every_depth_equals_its_definition_in_plain_torch(depths: int) -> None:
    model = build("[*-]" + "/*E" * depths, replace(SHAPE, mtp_loss=0.6))
    whole = batch([[7, 6], [13]])
    context = model.prepare(whole)
    losses = model.losses(context)
    hidden = model.hidden(model.prepare(whole))
    total = losses.loss_sum / 11
    for depth in range(depths):
        shown = targets(whole, depth)
        module = model.mtp[str(depth)]
        both = torch.cat(
            [module.embedding_norm(model.embedding(shown.tokens_BT)), module.hidden_norm(hidden)], -1
        )
        x = module.blocks["0"](both @ module.projection.weight.T, model.prepare(whole))
        hidden = module.final_norm(x)
        each = F.cross_entropy(
            (hidden @ model.embedding.weight.T).flatten(0, 1), shown.labels_BT.flatten(), reduction="none"
        )
        wanted = each[shown.loss_mask_BT.flatten()].sum()
        torch.testing.assert_close(losses.mtp[depth][0], wanted, rtol=1e-12, atol=1e-12)
        assert int(losses.mtp[depth][1]) == int(shown.loss_mask_BT.sum())
        total = total + 0.6 / depths * wanted / (5 + depth)
    share = losses.share(11, [5 + depth for depth in range(depths)])
    torch.testing.assert_close(share, total, rtol=1e-12, atol=1e-12)
    assert set(losses.metrics(11, [5] * depths)) == {"loss", *(f"mtp_{d}_loss" for d in range(depths))}


def test_phases_add_up_to_the_losses_of_the_model_and_keep_nothing() -> None:
    model = build("[*E]/*E/*E", replace(SHAPE, mtp_loss=0.6))
    whole, tokens = batch([[7, 6], [13]]), [5, 6]
    expected = model.losses(model.prepare(whole))
    (chain,) = chains(model.layout, form_of(model.shape, "fp32", fine=True))
    context, tensors, pieces, total = model.prepare(whole), dict[str, Tensor](), [], torch.zeros(())
    for phase in chain.phases:
        written, losses = nodes.run(model, phase, context, tensors)
        tensors |= written
        if losses is not None:
            depth = slice(None) if phase.depth is None else slice(phase.depth, phase.depth + 1)
            total = total + losses.share(11, tokens[depth] if losses.mtp else [])
            pieces.append(nodes.detach_losses(losses))
    torch.testing.assert_close(total, expected.share(11, tokens), rtol=1e-12, atol=1e-12)
    assert context.dispatch_plans == {}, "those of later micro-batches need the memory"
    merged = nodes.merge_losses(model, pieces)
    torch.testing.assert_close(merged.share(11, tokens), total.detach(), rtol=1e-12, atol=1e-12)
    assert not merged.share(11, tokens).requires_grad, "it would hold the graph"


def test_packed_documents_equal_documents_one_by_one() -> None:
    model = build("[*-]/*E/*E", replace(SHAPE, mtp_loss=1.0))
    whole = batch([[9, 5, 7]])
    model(whole).share(10, [10, 10]).backward()
    packed = canonical_grads(model)
    model.zero_grad()
    start = 0
    for length in (9, 5, 7):
        model(part(whole, slice(None), slice(start, start + length))).share(10, [10, 10]).backward()
        start += length
    assert_near(canonical_grads(model), packed, 1e-12)


def test_keys_of_a_depth_are_those_of_a_plain_block() -> None:
    names = set(build("[*E]/*E").canonical())
    block = {name.removeprefix("blocks.0.") for name in names if name.startswith("blocks.0.")}
    assert {name.removeprefix("mtp.0.blocks.0.") for name in names if ".0.blocks.0." in name} == block
    assert {name for name in names if name.startswith("mtp.0.") and ".blocks." not in name} == {
        f"mtp.0.{part}.weight" for part in ("embedding_norm", "hidden_norm", "projection", "final_norm")
    }


def test_evaluation_leaves_the_depths_out() -> None:
    model = build("[*-]/*E")
    assert model(replace(batch([[8]]), training=False)).mtp == ()


def test_a_document_number_that_returns_is_another_document() -> None:
    given = replace(batch([[9]]), documents_BT=torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]]))
    shown = targets(replace(given, loss_mask_BT=torch.ones(1, 9, dtype=torch.bool)), depth=5)
    assert not shown.loss_mask_BT.any()
    assert not shown.tokens_BT.any()
