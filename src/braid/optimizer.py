"""Optimizer configuration: AdamW, Muon, and the learning-rate schedule of both.

The docstring below a field is its help text on the command line. tyro keeps its line breaks, so each is a
single line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from braid import validators
from braid.choices import PARAMETER_KINDS
from braid.errors import Problem

MuonKind = Literal["matrix", "expert", "router", "hyper_connection"]


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon: momentum, orthogonalised by a Newton-Schulz iteration."""

    kinds: tuple[MuonKind, ...] = ("matrix", "expert")
    """Kinds of parameters that Muon updates; AdamW updates all others."""
    momentum: float = 0.95
    """Decay of the average of gradients."""
    nesterov: bool = True
    """Orthogonalise the average that the next gradient would see, as Nesterov does, instead of the average."""
    iterations: int = 5
    """Newton-Schulz iterations."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the iterations and of what ranks exchange for them. auto: train.dtype."""
    scale: Literal["match_rms", "original"] = "match_rms"
    """Of updates: match_rms 0.2 sqrt(max(rows, columns)), as AdamW's; original sqrt(max(1, rows / columns))."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.fraction(f"{at}.momentum", self.momentum)
        yield from validators.at_least(f"{at}.iterations", self.iterations, 1)
        if not self.kinds:
            rule = "names the parameters that Muon updates, and there are none"
            yield Problem(
                field=f"{at}.kinds", value=self.kinds, rule=rule, remedy="matrix expert, or optim.name adamw"
            )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for matrices and AdamW for everything else (docs/optimizers.md)."""
    muon: Muon = Muon()
    """With muon: what it updates, and how."""

    lr: float = 3e-4
    """Peak learning rate."""
    lr_by_kind: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Peak learning rates of kinds of parameters, such as embedding (docs/optimizers.md); lr for all others."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Decay after warm-up: cosine, or wsd (warmup-stable-decay: constant, then linear decay at the end)."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay_steps: int = 0
    """wsd: steps of linear decay at the end."""
    final_lr_share: float = 0.1
    """Final learning rate as a fraction of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam betas."""
    eps: float = 1e-8
    """Adam epsilon, added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices only."""
    clip: float = 1.0
    """Clip gradients to this global norm; 0 disables clipping."""

    def problems(self, at: str) -> Iterator[Problem]:
        yield from validators.above(f"{at}.lr", self.lr, 0)
        for kind, rate in self.lr_by_kind.items():
            yield from validators.above(f"{at}.lr_by_kind[{kind}]", rate, 0)
            if kind not in PARAMETER_KINDS:
                yield Problem(
                    field=f"{at}.lr_by_kind",
                    value=kind,
                    rule=f"is no kind of parameter{validators.nearest(kind, PARAMETER_KINDS)}",
                    remedy=f"{', '.join(PARAMETER_KINDS[:-1])} or {PARAMETER_KINDS[-1]}",
                )
        if self.name == "muon":
            yield from self.muon.problems(f"{at}.muon")
        yield from validators.above(f"{at}.eps", self.eps, 0)
        for name, value in (("warmup_steps", self.warmup_steps), ("decay_steps", self.decay_steps)):
            yield from validators.at_least(f"{at}.{name}", value, 0)
        for name, amount in (("weight_decay", self.weight_decay), ("clip", self.clip)):
            yield from validators.at_least(f"{at}.{name}", amount, 0)
        yield from validators.fraction(f"{at}.final_lr_share", self.final_lr_share, one_allowed=True)
        for place, beta in enumerate(self.betas):
            yield from validators.fraction(f"{at}.betas[{place}]", beta)
        if self.schedule == "wsd" and self.decay_steps == 0:
            yield Problem(
                field=f"{at}.decay_steps",
                value=0,
                rule=f"{at}.schedule wsd needs a number of decay steps",
                remedy="1 or more",
            )
