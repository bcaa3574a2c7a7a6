"""Recipes with published shapes have the published number of weights."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from braid import recipes
from braid.planning.plan import plan, size


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
