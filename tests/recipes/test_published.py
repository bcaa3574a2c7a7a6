"""Recipes with published shapes have the published number of weights, and of operations."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from braid import recipes
from braid.planning.plan import plan, size, training_flops


class Published(NamedTuple):
    """Billions of weights, as the publishers state them."""

    total: float
    """Without MTP depths."""
    active: float
    embedding_counts: bool
    """Whether the publisher counts the input embedding, of which a token only looks up a row, as active."""
    within: float
    """How near we must come to the active figure: 1 %, unless it is published with fewer digits than that."""


PUBLISHED = {
    "nemotron-h-8b": Published(8.1, 8.1, True, 0.01),
    "nemotron-nano-30b-a3b": Published(31.6, 3.2, False, 0.01),
    "qwen3-30b-a3b": Published(30.5, 3.3, True, 0.02),
    "qwen3-next-80b-a3b": Published(80.0, 3.0, False, 0.2),
    "gpt-oss-20b": Published(20.9, 3.61, False, 0.01),
    "granite-4-h-350m": Published(0.340, 0.340, True, 0.01),
    "qwen2-5-7b": Published(7.61, 7.61, True, 0.01),
    "glm-4-5-air": Published(106.0, 12.0, False, 0.07),
    "qwen3-5-35b-a3b": Published(35.0, 3.0, False, 0.2),
    "deepseek-v3": Published(671.0, 37.0, False, 0.0125),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_size(name: str) -> None:
    published = PUBLISHED[name]
    worked_out = plan(recipes.load(name), world=1)
    counted = size(worked_out)
    model = worked_out.run.model
    assert (counted.total - counted.mtp) / 1e9 == pytest.approx(published.total, rel=0.01)
    active = counted.active - (0 if published.embedding_counts else model.vocab * model.hidden)
    assert active / 1e9 == pytest.approx(published.active, rel=published.within)


@pytest.mark.parametrize(("name", "published"), [("deepseek-v3", 259.8), ("qwen3-30b-a3b", 23.10)])
def test_a_published_shape_has_the_published_operations(name: str, published: float) -> None:
    """GFLOP of one token in a training step, with 4,096 tokens in a sequence."""
    assert giga_flops(name, 4096) == pytest.approx(published, rel=0.01)


def test_nemotron_nano_has_the_operations_of_its_own_inner_channels() -> None:
    """323 TFLOP/s at 14,507 tokens/s per GPU are published, by a formula that takes twice the hidden channels
    for the inner ones of Mamba-2, 5,376 where there are 4,096, and 7 operations per entry of its state."""
    own = giga_flops("nemotron-nano-30b-a3b", 8192)
    assert own == pytest.approx(20.7, rel=0.005)

    def projections_and_scan(inner: int, per_entry: int) -> float:
        return 3 * 23 * (2 * 2688 * 3 * inner + per_entry * inner * 128) / 1e9

    formula = own + projections_and_scan(2 * 2688, 7) - projections_and_scan(64 * 64, 4)
    assert formula == pytest.approx(323e3 / 14_507, rel=0.005)


def giga_flops(name: str, tokens: int) -> float:
    run = recipes.load(name)
    run = replace(run, data=replace(run.data, sequence_tokens=tokens))
    return training_flops(plan(run, world=1)) / tokens / 1e9
