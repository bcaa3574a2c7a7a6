"""The router's decision about a micro-batch, as data.

Shapes: N tokens, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ExpertChoice(NamedTuple):
    """The part of a routing that is decided rather than computed: integers, without gradients."""

    experts_NS: Tensor
    """Each token's experts, best first, whether or not they have a place for it. Of equal scores the lower
    index comes first."""
    favourites_NS: Tensor
    """The experts that the scores alone would choose, without groups and biases: load-balancing losses count
    these."""
    kept_NS: Tensor | None
    """False where a slot goes nowhere: padding, or an expert that is full. None where all slots are kept."""


class Routing(NamedTuple):
    """A choice, and the numbers that go with it."""

    choice: ExpertChoice
    probs_NS: Tensor
    """What each expert's output is multiplied with."""
    shares_NE: Tensor
    """All scores of a token, divided by their sum: what load-balancing losses look at."""
    logits_NE: Tensor

    @property
    def experts_NS(self) -> Tensor:
        return self.choice.experts_NS
