"""Learning-rate schedules as pure functions of the step: linear warmup, then cosine or WSD decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warmup, then decay: `cosine` over the remaining steps, `wsd` (warmup-stable-decay) linearly over
    the last `decay_steps`."""

    kind: Literal["cosine", "wsd"]
    peak: float
    """Maximum learning rate."""
    steps: int
    """Steps of the run."""
    warmup_steps: int
    decay_steps: int
    """wsd only: steps of the decay."""
    final_share: float
    """Learning rate of the last step as a fraction of the peak."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1 to `steps`."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        start = self.warmup_steps if self.kind == "cosine" else self.steps - self.decay_steps
        if step <= start:
            return self.peak
        progress = min(1.0, (step - start) / max(1, self.steps - start))
        decay = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.peak * (self.final_share + (1 - self.final_share) * decay)
