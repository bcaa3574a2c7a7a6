"""The router's decision for a micro-batch, as data.

Shapes: N tokens, E experts, S = top_k slots of a token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ExpertChoice(NamedTuple):
    """The discrete part of a routing: integers, without gradients. It can be recorded and replayed."""

    experts_NS: Tensor
    """The selected experts of each token, best first, before capacity applies. Ties go to the lower index."""
    raw_top_k_NS: Tensor
    """The top-k of the raw scores, without groups and biases. Load-balancing losses count these."""
    kept_NS: Tensor | None
    """False for dropped slots: padding, or an expert over capacity. None if all are kept."""


class Routing(NamedTuple):
    """Selected experts with their probabilities, and what the auxiliary losses need."""

    choice: ExpertChoice
    probs_NS: Tensor
    """The weight of each expert's output."""
    shares_NE: Tensor
    """Scores normalized to sum to 1 per token; load-balancing losses use these."""
    logits_NE: Tensor

    @property
    def experts_NS(self) -> Tensor:
        return self.choice.experts_NS
