"""Ops that have more than one implementation: a plain reference in every room, fast ones beside it.

`choose` decides once per run; modules are handed the functions and never look at the device themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from braid import architecture
from braid.kernels import attention, grouped_mlp
from braid.kernels.choice import Choice


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The implementation that a run uses of each op; None where the model has no such op."""

    attention: Choice[attention.Attend] | None
    grouped_mlp: Choice[grouped_mlp.GroupedMlp] | None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What there is to tell the user."""
        return tuple(choice for choice in (self.attention, self.grouped_mlp) if choice is not None)


def choose(model: architecture.Model, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest implementations that are right for this model, on this device and in this dtype."""
    moe = model.moe
    return Kernels(
        attention=None if model.attention is None else attention.choose(device, dtype),
        grouped_mlp=None
        if moe is None
        else grouped_mlp.choose(device, dtype, hidden=model.hidden, ffn=moe.ffn, experts=moe.experts),
    )


def references() -> Kernels:
    """The plain implementations: slow, right everywhere, what the others are tested against."""
    return Kernels(attention=attention.REFERENCE, grouped_mlp=grouped_mlp.REFERENCE)
