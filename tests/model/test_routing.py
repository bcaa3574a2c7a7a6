"""Routing in a whole model: decisions recorded and repeated, counts that reach across micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch

from braid.nn.moe.balance import load_balance
from braid.nn.moe.replay import Recording
from tests.model.cases import SHAPE, batch, build, part

MOE = SHAPE.moe
assert MOE is not None


def test_recorded_decisions_are_repeated_by_another_model_and_another_batch() -> None:
    shape = replace(SHAPE, moe=replace(MOE, jitter=0.1, capacity_factor=1.0))
    whole = batch([[12, 9], [20], [21]])
    one, other = build("[*E]E/*E", shape, seed=1), build("[*E]E/*E", shape, seed=2)
    first = one.prepare(whole)
    first.recording = Recording()
    one.losses(first)
    assert len(first.balances) == 3
    for layer, balance in first.balances.items():
        parts = []
        for rows in (slice(0, 1), slice(1, 3)):
            context = other.prepare(part(whole, rows))
            context.replay = first.recording
            other.losses(context)
            parts.append(context.balances[layer])
        assert torch.equal(parts[0].counts_E + parts[1].counts_E, balance.counts_E)
        assert torch.equal(parts[0].kept_E + parts[1].kept_E, balance.kept_E)


def test_the_global_loss_counts_the_steps_earlier_micro_batches() -> None:
    model = build("E", replace(SHAPE, moe=replace(MOE, aux_loss=0.0, global_aux_loss=0.5)))
    first, second = model.prepare(batch([[20]], seed=1)), model.prepare(batch([[17]], seed=2))
    model.losses(first)
    second.earlier_E = {layer: balance.raw_counts_E for layer, balance in first.balances.items()}
    loss = model.losses(second).aux["global_balance"]
    ((layer, moe),) = model.moe_layers()
    normed = model.stack.blocks["0"].layers["moe"].norm(model.embedding(second.batch.tokens_BT)).flatten(0, 1)
    routing = moe.router(normed, second.tokens(layer))
    counts = first.balances[layer].raw_counts_E + second.balances[layer].raw_counts_E
    wanted = 0.5 * load_balance(routing.shares_NE, counts, torch.ones(17, dtype=torch.bool))
    torch.testing.assert_close(loss, wanted)
