"""Ops that have more than one implementation: a plain reference in every room, fast ones beside it.

`choose` decides once per run; modules are handed the functions and never look at the device themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from braid import architecture
from braid.kernels import (
    attention,
    delta_rule,
    grouped_mlp,
    hyper_connection,
    permute,
    rms_norm,
    rotary,
    ssd,
)
from braid.kernels.choice import KernelChoice
from braid.pattern import Kind


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The implementation that a run uses of each op; None where the model has no such op."""

    attention: KernelChoice[attention.Attend] | None
    ssd: KernelChoice[ssd.Ssd] | None
    delta_rule: KernelChoice[delta_rule.DeltaRule] | None
    grouped_mlp: KernelChoice[grouped_mlp.GroupedMlp] | None
    permute: KernelChoice[permute.Permute] | None
    hyper_connection: KernelChoice[hyper_connection.HyperConnect] | None
    rms_norm: KernelChoice[rms_norm.Normalize]
    rotary: KernelChoice[rotary.Turn] | None

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """What there is to tell the user."""
        mixers = (self.attention, self.ssd, self.delta_rule)
        every = (*mixers, self.rotary, self.rms_norm, self.grouped_mlp, self.permute, self.hyper_connection)
        return tuple(choice for choice in every if choice is not None)


def choose(
    model: architecture.Model, kinds: Collection[Kind], device: torch.device, dtype: torch.dtype
) -> Kernels:
    """The fastest implementations that are right for the layers of these kinds, on this device and in this
    dtype."""
    attends = not {Kind.ATTENTION, Kind.LATENT_ATTENTION}.isdisjoint(kinds)
    moe = model.moe if Kind.MOE in kinds else None
    hyper = model.hyper
    return Kernels(
        attention=attention.choose(device, dtype) if attends else None,
        ssd=ssd.choose(device, dtype) if Kind.MAMBA2 in kinds else None,
        delta_rule=delta_rule.choose(device, dtype) if Kind.DELTA_NET in kinds else None,
        grouped_mlp=None
        if moe is None
        else grouped_mlp.choose(
            device, dtype, hidden=moe.latent or model.hidden, ffn=moe.ffn, experts=moe.experts
        ),
        permute=None if moe is None else permute.choose(device),
        hyper_connection=None
        if hyper is None
        else hyper_connection.choose(device, dtype, streams=hyper.streams),
        rms_norm=rms_norm.choose(device, dtype),
        rotary=rotary.choose(device, dtype) if attends else None,
    )


def references() -> Kernels:
    """The plain implementations: slow, right everywhere, what the others are tested against."""
    return Kernels(
        attention=attention.REFERENCE,
        ssd=ssd.REFERENCE,
        delta_rule=delta_rule.REFERENCE,
        grouped_mlp=grouped_mlp.REFERENCE,
        permute=permute.REFERENCE,
        hyper_connection=hyper_connection.REFERENCE,
        rms_norm=rms_norm.REFERENCE,
        rotary=rotary.REFERENCE,
    )
