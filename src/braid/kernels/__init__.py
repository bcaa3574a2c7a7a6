"""Kernels: ops with several implementations, a PyTorch reference in every package and faster ones beside it.

`choose` selects implementations once per run, by device, dtype and `train.kernels`; modules get the functions
as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import torch

from braid import architecture
from braid.choices import kernel_modes
from braid.errors import ConfigError
from braid.kernels import (
    attention,
    causal_conv,
    delta_rule,
    gated_norm,
    glu,
    grouped_mlp,
    hyper_connection,
    linear_cross_entropy,
    optimizer,
    permute,
    precision,
    rms_norm,
    rotary,
    router,
    ssd,
)
from braid.kernels.choice import KernelChoice
from braid.kernels.precision import dense
from braid.pattern import Kind
from braid.precision import ProductFormats

NOT_QUANTISED = ProductFormats()


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The selected implementation of each op; None if the model does not use the op."""

    attention: KernelChoice[attention.Attend] | None
    ssd: KernelChoice[ssd.Ssd] | None
    delta_rule: KernelChoice[delta_rule.DeltaRule] | None
    causal_conv: KernelChoice[causal_conv.CausalConv] | None
    gated_norm: KernelChoice[gated_norm.GatedNorm] | None
    glu: KernelChoice[glu.MlpActivation] | None
    grouped_mlp: KernelChoice[grouped_mlp.GroupedMlp] | None
    router: KernelChoice[router.RouterKernels] | None
    permute: KernelChoice[permute.Permute] | None
    hyper_connection: KernelChoice[hyper_connection.HyperConnect] | None
    rms_norm: KernelChoice[rms_norm.Normalize]
    rotary: KernelChoice[rotary.Rotate] | None
    linear_cross_entropy: KernelChoice[linear_cross_entropy.LinearCrossEntropy]
    optimizer: KernelChoice[optimizer.OptimizerKernels]
    low_precision: KernelChoice[precision.BlockKernels | None] | None

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """All selected implementations, for the log."""
        mixers = (self.attention, self.ssd, self.delta_rule, self.causal_conv, self.gated_norm)
        mlps = (self.glu, self.grouped_mlp, self.router, self.permute)
        ends = (self.linear_cross_entropy, self.optimizer)
        ops = (*mixers, self.rotary, self.rms_norm, *mlps, self.hyper_connection, self.low_precision, *ends)
        return tuple(choice for choice in ops if choice is not None)


def choose(
    model: architecture.Trunk,
    kinds: Collection[Kind],
    device: torch.device,
    dtype: torch.dtype,
    settings: Sequence[str] = ("auto",),
    quantised: ProductFormats = NOT_QUANTISED,
    *,
    expert_rank: int = 0,
) -> Kernels:
    """The implementations for these kinds of layers: by default the fastest that support the device and dtype,
    otherwise as `settings` (`train.kernels`) say. `quantised` are the formats of dense layers,
    `expert_rank` is the rank of the adapters of experts, if they have any."""
    modes, plain = kernel_modes(settings), references()
    fastest = _fastest(model, kinds, device, dtype, quantised, expert_rank)
    chosen: dict[str, KernelChoice | None] = {
        each.name: getattr(fastest, each.name) for each in fields(Kernels)
    }
    slow = []
    for op, choice in chosen.items():
        if choice is not None and modes[op] == "reference":
            chosen[op] = getattr(plain, op)
        elif choice is not None and modes[op] == "fused" and choice.name == "reference":
            slow.append(f"  {op}: {choice.reason}")
    if slow:
        given = " ".join(settings)
        raise ConfigError(
            "\n".join(
                [f"train.kernels = {given}: there is no fast kernel of", *slow, "set   auto for these ops"]
            )
        )
    return Kernels(**chosen)  # type: ignore[arg-type]


def _fastest(
    model: architecture.Trunk,
    kinds: Collection[Kind],
    device: torch.device,
    dtype: torch.dtype,
    quantised: ProductFormats,
    expert_rank: int,
) -> Kernels:
    attends = not {Kind.ATTENTION, Kind.LATENT_ATTENTION}.isdisjoint(kinds)
    recurs = not {Kind.MAMBA2, Kind.DELTA_NET}.isdisjoint(kinds)
    moe = model.moe if Kind.MOE in kinds else None
    hyper = model.hyper
    heads = model.attention if Kind.ATTENTION in kinds else None
    sink_head_dim = heads.head_dim if heads is not None and heads.sinks else None
    return Kernels(
        attention=attention.choose(device, dtype, sink_head_dim=sink_head_dim, causal=model.causal)
        if attends
        else None,
        ssd=ssd.choose(device, dtype) if Kind.MAMBA2 in kinds else None,
        delta_rule=delta_rule.choose(device, dtype) if Kind.DELTA_NET in kinds else None,
        causal_conv=causal_conv.choose(device, dtype) if recurs else None,
        gated_norm=gated_norm.choose(device, dtype) if recurs else None,
        glu=None if {Kind.MLP, Kind.MOE}.isdisjoint(kinds) else glu.choose(device, dtype),
        grouped_mlp=None
        if moe is None
        else grouped_mlp.choose(
            device,
            dtype,
            hidden=moe.latent or model.hidden,
            ffn=moe.ffn,
            experts=moe.experts,
            rank=expert_rank,
        ),
        router=None if moe is None else router.choose(device, dtype),
        permute=None if moe is None else permute.choose(device),
        hyper_connection=None
        if hyper is None
        else hyper_connection.choose(device, dtype, streams=hyper.streams),
        rms_norm=rms_norm.choose(device, dtype),
        rotary=rotary.choose(device, dtype) if attends else None,
        linear_cross_entropy=linear_cross_entropy.choose(device, dtype),
        optimizer=optimizer.choose(device, dtype),
        low_precision=dense.choose(device, dtype, quantised) if quantised.quantised else None,
    )


def references() -> Kernels:
    """The PyTorch reference implementations, which run everywhere and which the others are tested against."""
    return Kernels(
        attention=attention.REFERENCE,
        ssd=ssd.REFERENCE,
        delta_rule=delta_rule.REFERENCE,
        causal_conv=causal_conv.REFERENCE,
        gated_norm=gated_norm.REFERENCE,
        glu=glu.REFERENCE,
        grouped_mlp=grouped_mlp.REFERENCE,
        router=router.REFERENCE,
        permute=permute.REFERENCE,
        hyper_connection=hyper_connection.REFERENCE,
        rms_norm=rms_norm.REFERENCE,
        rotary=rotary.REFERENCE,
        linear_cross_entropy=linear_cross_entropy.REFERENCE,
        optimizer=optimizer.REFERENCE,
        low_precision=dense.REFERENCE,
    )
