"""What holds for every language model: packing, grouping, splitting, naming, and masks change nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braid.architecture import HyperConnections
from braid.errors import DataError
from braid.model.context import Context, MicroBatch
from braid.model.declaration import chains, form_of
from braid.model.language import StepFraction
from tests.model.cases import SHAPE, assert_near, batch, build, canonical_grads, part

ATTENTION, MOE = SHAPE.attention, SHAPE.moe
assert ATTENTION is not None
assert MOE is not None
VARIANTS = {
    "plain": SHAPE,
    "grouped queries, normed, windowed": replace(
        SHAPE, attention=replace(ATTENTION, heads=6, qk_norm=True, window=4, bias=True), tied=False
    ),
    "no positions, layer norm": replace(SHAPE, attention=replace(ATTENTION, positions="none"), norm="layer"),
    "ungated": replace(SHAPE, moe=replace(MOE, activation="relu2", score="sigmoid", shared_ffn=0)),
    "three streams": replace(SHAPE, hyper=HyperConnections(streams=3)),
    "one stream, its mean": replace(SHAPE, hyper=HyperConnections(streams=1, exit="mean")),
}


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())
def test_packed_documents_equal_documents_one_by_one(shape: object) -> None:
    packed, single = (build("*-*E", shape) for _ in range(2))  # type: ignore[arg-type]
    rows = [[9, 1, 14, 13], [37], [5, 20]]
    whole = batch(rows)
    losses = packed(whole)
    losses.loss_sum.backward()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b, row in enumerate(rows):
        start = 0
        for length in row:
            alone = single(part(whole, slice(b, b + 1), slice(start, start + length)))
            alone.loss_sum.backward()
            total, count, start = (
                total + alone.loss_sum.detach(),
                count + int(alone.token_count),
                start + length,
            )
    assert int(losses.token_count) == count
    torch.testing.assert_close(losses.loss_sum.detach(), total, rtol=1e-12, atol=0.0)
    assert_near(canonical_grads(packed), canonical_grads(single), 1e-12)


@pytest.mark.parametrize(("grouped", "flat"), [("[*-][*E]", "*-*E"), ("-[*E]|[-*]", "-*E-*"), ("[*-E]", "*-E")])
def test_a_group_equals_its_layers(grouped: str, flat: str) -> None:
    shape = replace(SHAPE, dropout=0.2, moe=replace(MOE, aux_loss=0.01))
    one, other = build(grouped, shape, seed=1), build(flat, shape, seed=2)
    for source, target in zip(one.parameters(), other.parameters(), strict=True):
        target.data.copy_(source)
    given = batch([[20, 17], [30]])
    outputs = []
    for model in (one, other):
        context = model.prepare(given)
        losses = model.losses(context)
        losses.share(50).backward()
        outputs.append([losses.loss_sum, *losses.aux.values()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for (name, source), target in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(source.grad, target.grad), name


def test_gradients_of_micro_batches_add_up() -> None:
    whole_model, split_model = (build("[*-][*E]", replace(SHAPE, dropout=0.3)) for _ in range(2))
    whole = batch([[20, 17], [37], [4, 5, 6]])
    whole_model(whole).loss_sum.backward()
    for rows in (slice(0, 1), slice(1, 3)):
        split_model(part(whole, rows)).loss_sum.backward()
    assert_near(canonical_grads(split_model), canonical_grads(whole_model), 1e-12)


def test_shares_add_up_to_the_loss_of_the_step() -> None:
    moe = replace(MOE, aux_loss=0.5, sequence_aux_loss=0.3, z_loss=0.1)
    model = build("*E", replace(SHAPE, moe=moe))
    batches = [batch([[20]], seed=1), batch([[7], [9]], seed=2)]
    parts = [StepFraction(tokens=20 / 36, rows=1 / 3), StepFraction(tokens=16 / 36, rows=2 / 3)]
    each = [model(given) for given in batches]
    tokens = sum(int(losses.token_count) for losses in each)
    expected = sum(
        losses.loss_sum / tokens
        + (losses.aux["load_balance"] + losses.aux["router_z"]) * part.tokens
        + losses.aux["sequence_balance"] * part.rows
        for losses, part in zip(each, parts, strict=True)
    )
    total = sum(losses.share(tokens, fraction=part) for losses, part in zip(each, parts, strict=True))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0.0)


def test_an_all_masked_batch_costs_nothing() -> None:
    model = build("*-*E", replace(SHAPE, moe=replace(MOE, aux_loss=0.1)))
    given = batch([[10, 5]])
    losses = model(replace(given, loss_mask_BT=torch.zeros_like(given.loss_mask_BT)))
    losses.share(0).backward()
    assert losses.loss_sum.item() == 0
    assert int(losses.token_count) == 0
    assert not any(grad.any() for grad in canonical_grads(model).values())


def test_padding_changes_no_loss_and_no_gradient() -> None:
    shape = replace(SHAPE, moe=replace(MOE, aux_loss=0.5))
    padded, bare = build("*-*E", shape), build("*-*E", shape)
    given = batch([[12], [12]])
    longer = batch([[12, 7], [12, 7]])
    for name in ("tokens_BT", "labels_BT", "loss_mask_BT", "positions_BT", "documents_BT"):
        getattr(longer, name)[:, :12] = getattr(given, name)
    longer.loss_mask_BT[:, 12:] = False
    longer.documents_BT[:, 12:] = -1
    for model, each in ((padded, longer), (bare, given)):
        model(each).share(10).backward()
    assert_near(canonical_grads(padded), canonical_grads(bare), 1e-12)


def test_dropout_stands_still_in_evaluation_and_follows_the_sample() -> None:
    model = build("*-", replace(SHAPE, dropout=0.5))
    given = batch([[8], [8]])
    quiet = replace(given, training=False)
    assert torch.equal(model(quiet).loss_sum, model(replace(quiet, step=9)).loss_sum)
    assert not torch.equal(model(given).loss_sum, model(replace(given, step=9)).loss_sum)
    logits = model.logits(model.prepare(given))
    alone = model.logits(model.prepare(part(given, slice(1, 2))))
    torch.testing.assert_close(logits[1:], alone, rtol=1e-12, atol=1e-12)


def test_phases_in_order_are_the_forward() -> None:
    model = build("[*E]")
    given = batch([[15]])
    (block,) = model.stack.blocks.values()
    x = model.embedding(given.tokens_BT)

    def by_phases(context: Context) -> torch.Tensor:
        flow = block.mix(x, context)  # type: ignore[operator]
        flow = block.dispatch(flow, context)  # type: ignore[operator]
        flow = block.experts(flow, context)  # type: ignore[operator]
        flow = block.combine(flow, context)  # type: ignore[operator]
        return block.post(flow, context)  # type: ignore[operator]

    assert torch.equal(by_phases(model.prepare(given)), block(x, model.prepare(given)))


def test_no_state_of_a_micro_batch_stays_on_a_module() -> None:
    model = build("*-*E")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    contexts = [model.prepare(batch([[9, 3]], seed=seed)) for seed in range(2)]
    x = [model.embedding(context.batch.tokens_BT) for context in contexts]
    for block in model.stack.blocks.values():  # two micro-batches in turns, as an engine runs them
        flows = [block.mix(x[i], contexts[i]) for i in range(2)]  # type: ignore[operator]
        flows = [block.dispatch(flows[i], contexts[i]) for i in range(2)]  # type: ignore[operator]
        flows = [block.experts(flows[i], contexts[i]) for i in range(2)]  # type: ignore[operator]
        flows = [block.combine(flows[i], contexts[i]) for i in range(2)]  # type: ignore[operator]
        x = [block.post(flows[i], contexts[i]) for i in range(2)]  # type: ignore[operator]
    for seed in range(2):
        context = model.prepare(batch([[9, 3]], seed=seed))
        embedded = model.embedding(context.batch.tokens_BT)
        assert torch.equal(x[seed], model.stack(embedded, model.segments, context))
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}


def test_ids_are_checked_before_the_forward() -> None:
    given = batch([[5]])
    with pytest.raises(DataError, match="token id 17"):
        build("*-")(replace(given, tokens_BT=torch.full_like(given.tokens_BT, 17)))


def test_kinds_of_later_steps_and_missing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 2 is 'M'"):
        build("*M")
    with pytest.raises(ValueError, match="has no shape for it"):
        build("-", replace(SHAPE, mlp=None))


def test_flops_of_a_transformer() -> None:
    shape = replace(SHAPE, attention=replace(ATTENTION, heads=6))
    tokens, hidden = 8, 20
    attention = 2 * tokens * hidden * (60 + 30 + 30) + 2 * tokens * 60 * hidden + 4 * 60 * tokens * tokens // 2
    mlp = 2 * tokens * 3 * hidden * 13
    moe = 2 * tokens * hidden * (5 + 2 * 3 * 7 + 3 * 6)
    head = 2 * tokens * hidden * 17
    assert build("[*-]E", shape).flops(tokens) == attention + mlp + moe + head


def test_of_tokens_is_one_document_per_row() -> None:
    model = build("*-")
    tokens = torch.tensor([[1, 2, 3]])
    made = MicroBatch.of_tokens(tokens)
    given = replace(batch([[3]]), tokens_BT=tokens, training=False)
    assert torch.equal(model.logits(model.prepare(made)), model.logits(model.prepare(given)))


def test_labels_that_count_must_be_ids_and_others_may_be_anything():
    model, rows = build("[*-]"), batch([[5, 4]])
    mask = torch.zeros_like(rows.loss_mask_BT)
    mask[0, 2] = True
    for place, known in ((3, True), (2, False)):
        labels = rows.labels_BT.clone()
        labels[0, place] = 17
        spoiled = replace(rows, labels_BT=labels, loss_mask_BT=mask)
        if known:
            model(spoiled)
        else:
            with pytest.raises(DataError, match="token id 17 in row 0 at token 2"):
                model(spoiled)


@pytest.mark.parametrize("hyper", [None, HyperConnections(streams=3)], ids=["one stream", "three streams"])
@pytest.mark.parametrize("tied", [True, False])
def test_phases_share_the_operations_of_the_whole_model(tied: bool, hyper: HyperConnections | None) -> None:
    model = build("*-[*E]/*-/*-", replace(SHAPE, tied=tied, hyper=hyper))
    (chain,) = chains(model.layout, form_of(model.shape, "fp64"))
    shares = {phase.name: model.phase_flops(phase, 24) for phase in chain.phases}
    assert sum(shares.values()) == model.flops(24)
    head = 2 * 24 * SHAPE.hidden * SHAPE.vocab
    heads = {name: share for name, share in shares.items() if name.endswith("head")}
    assert heads == dict.fromkeys(("head", "mtp0.head", "mtp1.head"), head)
    assert all(share for name, share in shares.items() if name.endswith(("block", "enter")))
