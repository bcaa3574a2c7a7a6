"""Sliding-window and full attention layers in one model: which layer has which, and generation over both."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from braid import architecture
from braid.model import context
from braid.model.context import MicroBatch
from braid.model.generate import generate
from braid.model.language import LanguageModel
from braid.nn.attention import Attention
from braid.pattern import Kind, parse
from tests.model.cases import SHAPE, batch, build


def windowed(text: str, pattern: str) -> LanguageModel:
    """A model whose layers have a window of 4 tokens, or none, and sinks that count."""
    assert SHAPE.attention is not None
    attention = replace(SHAPE.attention, window=4, window_pattern=pattern, sinks=True)
    model = build(text, replace(SHAPE, attention=attention))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


@pytest.mark.parametrize("text", ["*-*E|*-*E/*E", "[*-][*E]|[*-][*E]/*E", "M*M**|[*E]/*E"])
def test_layers_take_their_turn_through_the_stack_and_its_mtp_depths(text: str) -> None:
    layout = parse(text)
    layers = [*layout.layers, *(layer for depth in layout.mtp for layer in depth.layers)]
    assert [layer.nth for layer in layers if layer.kind is Kind.ATTENTION] == [0, 1, 2, 3, 4]
    shape = architecture.Attention(heads=1, kv_heads=1, head_dim=2, window=9, window_pattern="SLL")
    windows = [shape.of_layer(layer.nth).window for layer in layers if layer.kind is Kind.ATTENTION]
    assert windows == [9, None, None, 9, None]


def test_every_block_is_built_with_its_own_window() -> None:
    model = windowed("[*-][*E]|[*-]/*E", "SL")
    found = [module.shape.window for module in model.modules() if isinstance(module, Attention)]
    assert found == [4, None, 4, None]


def test_spans_are_computed_once_for_each_window() -> None:
    model = windowed("[*-][*E][*-][*E]", "SL")
    with mock.patch.object(context, "spans_of", side_effect=context.spans_of) as computed:
        model.logits(model.prepare(batch([[5, 6], [11]])))
    assert [call.args[1] for call in computed.call_args_list] == [4, None]


def test_flops_are_those_of_each_layer() -> None:
    sliding, full, mixed = (windowed("[*-][*-]", pattern).flops(64) for pattern in ("S", "LLS", "SL"))
    assert sliding < mixed < full
    assert sliding + full == 2 * mixed


def test_generation_with_a_cache_equals_recomputation() -> None:
    model = windowed("[*-][*E][*-]", "SL")
    start = torch.tensor([[1, 2, 3], [4, 5, 6]])
    rows = generate(model, start, 9, temperature=0.0)
    logits = model.logits(model.prepare(MicroBatch.of_tokens(rows)))
    assert torch.equal(rows[:, 3:], logits.argmax(-1)[:, 2:-1])
