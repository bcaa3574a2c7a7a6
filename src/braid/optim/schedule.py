"""The learning rate of every step, as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A rise, and then a fall: `cosine` at once, `wsd` (warmup-stable-decay) linearly over the last steps."""

    kind: Literal["cosine", "wsd"]
    peak: float
    """Highest rate."""
    steps: int
    """Steps of the run."""
    warmup_steps: int
    """Steps of the linear rise."""
    decay_steps: int
    """wsd: steps of the fall."""
    final_share: float
    """The last step's rate as a share of the peak."""

    def rate(self, step: int) -> float:
        """The rate of a step; steps run from 1 to `steps`."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        start = self.warmup_steps if self.kind == "cosine" else self.steps - self.decay_steps
        if step <= start:
            return self.peak
        fallen = min(1.0, (step - start) / max(1, self.steps - start))
        height = (1 + math.cos(math.pi * fallen)) / 2 if self.kind == "cosine" else 1 - fallen
        return self.peak * (self.final_share + (1 - self.final_share) * height)
