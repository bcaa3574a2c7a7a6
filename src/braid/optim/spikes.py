"""Spikes: steps whose gradient norm or loss is far above those of the steps before.

    limit = mean + sigma * standard deviation, over the last `size` finite steps

There is no limit before half of the window is filled. Spikes enter the window too, so a level that stays
becomes the usual one. All of it happens on the device: the host need not wait for a step to issue the next.
Norm and loss are the same numbers on all ranks, and so is every decision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from braid.choices import SpikePolicy
from braid.optim.spike_record import MEASURES, SpikeRecord


class Judged(NamedTuple):
    """The decision about a step, on the device."""

    apply: Tensor
    """Whether to apply the update, a 0-D bool."""
    numbers: tuple[Tensor, ...]
    """0-D float64: the limit of each measure, and whether a finite step is skipped."""


class SpikeWindow:
    """The measures of the last steps that were finite.

    Shapes: M measures, N steps.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._values_MN = torch.zeros(len(MEASURES), size, dtype=torch.float64, device=device)
        """The newest last, so that sums run in the same order after a resume."""
        self._held = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        """Spikes that were skipped, up to now in a row."""
        self._places_N = torch.arange(size, 0, -1, device=device)

    def judge(
        self, norm: Tensor, loss: Tensor, *, policy: SpikePolicy, sigma: float, most_skipped: int
    ) -> Judged:
        """Whether to apply a step, and remember it. A step that is not finite is never applied. At most
        `most_skipped` spikes in a row are skipped."""
        values_M = torch.stack([norm, loss])
        finite = values_M.isfinite().all()
        if policy == "off":
            no_limit = torch.full_like(norm, math.inf)
            return Judged(finite, (no_limit, no_limit, torch.zeros_like(norm)))
        limits_M = self._limits(sigma)
        skip = finite & (values_M > limits_M).any() & (policy == "skip") & (self._skipped < most_skipped)
        self._skipped = torch.where(finite, torch.where(skip, self._skipped + 1, 0), self._skipped)
        shifted_MN = torch.cat([self._values_MN[:, 1:], values_M[:, None]], dim=1)
        self._values_MN = torch.where(finite, shifted_MN, self._values_MN)
        self._held = (self._held + finite).clamp(max=self.size)
        return Judged(finite & ~skip, (*limits_M.unbind(), skip.double()))

    def _limits(self, sigma: float) -> Tensor:
        holds_N = self._places_N <= self._held
        count = self._held.clamp(min=1)
        mean_M1 = torch.where(holds_N, self._values_MN, 0).sum(1, keepdim=True) / count
        variance_M = torch.where(holds_N, (self._values_MN - mean_M1).square(), 0).sum(1) / count
        limits_M = mean_M1.squeeze(1) + sigma * variance_M.sqrt()
        return torch.where(self._held >= max(2, self.size // 2), limits_M, math.inf)

    def record(self) -> SpikeRecord:
        """For a checkpoint. Waits for the device."""
        held = int(self._held)
        rows = self._values_MN[:, self.size - held :].tolist()
        return SpikeRecord(tuple(map(tuple, rows)), int(self._skipped))

    def restore(self, record: SpikeRecord) -> None:
        """Continue with the window of a checkpoint, which may have had another size."""
        values_MN = torch.tensor(record.values, dtype=torch.float64)[:, -self.size :]
        held = values_MN.shape[1]
        self._values_MN.zero_()
        self._values_MN[:, self.size - held :] = values_MN
        self._held.fill_(held)
        self._skipped.fill_(record.skipped_in_a_row)
