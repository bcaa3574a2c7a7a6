"""How far two outcomes of the same run are apart, check by check.

The deviation of a figure is relative; that of a tensor is ‖found − reference‖ / ‖reference‖, where a reference
shorter than the floor counts as long as the floor. What is missing or not a number deviates infinitely.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from braid.config import Optim
from braid.prove.outcome import Outcome
from braid.prove.shrink import LEARNING_RATE

FLOOR = 1e-5
"""Tensors shorter than this count as this long; for second moments, its square."""

STREAMS_FLOOR = 1e-3
"""The same for hyper-connections. Residual streams begin as copies of one another, so that gradients of what
mixes them are what is left of terms that cancel: their rounding is that of the terms."""

ROUNDING: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 1e-12, torch.float32: 1e-6})
"""A tensor whose reference gradient is shorter than this has no gradient but rounding, and ranks have their
own. Such tensors have a second rule: see `_rounding_alone`."""

IDLE_STEP = MappingProxyType(
    {
        torch.float64: LEARNING_RATE * ROUNDING[torch.float64] / Optim().eps,
        torch.float32: LEARNING_RATE * ROUNDING[torch.float32],
    }
)
"""The most that a step makes of such a gradient: of AdamW in float64, of gradient descent in float32."""

FP64_BOUND = 1e-10
"""The promise: no check deviates by more in float64."""


Figures = Sequence[Mapping[str, float]]
"""Of several steps, by name."""


class Deviation(NamedTuple):
    """The worst of a check."""

    value: float
    where: str = ""


def deviations(found: Outcome, reference: Outcome) -> dict[str, Deviation]:
    """The worst deviation of every check, in the order in which a step makes what they look at."""
    biases, weights = _split(reference.weights)
    moments, saved = _split_moments(reference.saved)
    others = reference.figures[0].keys() - {"loss", "gradient norm"}
    idle = without_gradient(reference)
    (dtype,) = {gradient.dtype for gradient in reference.gradients.values()}
    rounding, moved = ROUNDING[dtype], len(reference.figures) * IDLE_STEP[dtype]
    checks = {
        "first loss": _figures(found.figures[:1], reference.figures[:1], {"loss"}),
        "other figures": _figures(found.figures[:1], reference.figures[:1], others),
        "gradients": _tensors(found.gradients, reference.gradients, idle, rounding),
        "gradient norm": _figures(found.figures[:1], reference.figures[:1], {"gradient norm"}),
        "selection biases": _tensors(found.weights, biases),
        "later figures": _figures(found.figures[1:], reference.figures[1:]),
        "weights": _tensors(found.weights, weights, idle, moved),
        "validation loss": Deviation(_off(found.val_loss, reference.val_loss)),
        "copies": Deviation(math.inf, found.quarrels[0]) if found.quarrels else Deviation(0.0),
    }
    if reference.saved and found.saved:
        checks["saved weights"] = _tensors(found.saved, saved, idle, moved)
        checks["saved moments"] = _tensors(found.saved, moments, idle, rounding)
        checks["saved as held"] = _same_as_held(found, reference)
    return checks


def without_gradient(reference: Outcome) -> set[str]:
    """Tensors whose gradient is nothing but rounding."""
    return {
        name
        for name, gradient in reference.gradients.items()
        if float(gradient.norm()) < ROUNDING[gradient.dtype]
    }


def red(checks: Mapping[str, Deviation], bound: float) -> dict[str, Deviation]:
    """The checks that see a difference."""
    return {name: deviation for name, deviation in checks.items() if not deviation.value <= bound}


def told(checks: Mapping[str, Deviation]) -> str:
    """For a person: what each check saw, and where."""
    return ", ".join(f"{name} {deviation.value:.1e} {deviation.where}" for name, deviation in checks.items())


def _figures(found: Figures, reference: Figures, names: Set[str] | None = None) -> Deviation:
    """Of these figures, or of all."""
    return _worst(
        (_off(those.get(name, math.nan), value), name)
        for those, these in zip(found, reference, strict=True)
        for name, value in these.items()
        if names is None or name in names
    )


def _off(found: float, reference: float) -> float:
    return abs(found - reference) / max(abs(reference), FLOOR)


def _tensors(
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    idle: Set[str] = frozenset(),
    most: float = 0.0,
) -> Deviation:
    """Tensors of these names are idle: they have no gradient, and may be so far apart."""

    def apart(name: str, tensor: Tensor) -> float:
        if _parameter(name) in idle:
            return _rounding_alone(found.get(name), tensor, most)
        return _apart(found.get(name), tensor, name)

    return _worst((apart(name, tensor), name) for name, tensor in reference.items())


def _parameter(name: str) -> str:
    """Whose moment it is, or itself."""
    return re.sub(r"^optimizer\.(exp_avg(_sq)?|momentum)\.", "", name)


def _rounding_alone(found: Tensor | None, reference: Tensor, most: float) -> float:
    """Nothing where every entry is as near as rounding leaves it, else infinitely much."""
    if found is None or found.shape != reference.shape:
        return math.inf
    return 0.0 if float((found.double() - reference.double()).abs().max()) <= most else math.inf


def _apart(found: Tensor | None, reference: Tensor, name: str) -> float:
    if found is None or found.shape != reference.shape:
        return math.inf
    floor = STREAMS_FLOOR if ".connection." in name else FLOOR
    floor = floor**2 if "exp_avg_sq" in name else floor
    distance = torch.linalg.vector_norm(found.double() - reference.double())
    return float(distance) / max(float(torch.linalg.vector_norm(reference.double())), floor)


def _worst(each: Iterator[tuple[float, str]]) -> Deviation:
    worst = Deviation(0.0)
    for value, where in each:
        if not value <= worst.value:
            worst = Deviation(value if math.isfinite(value) else math.inf, where)
    return worst


def _split(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Selection biases, and all other weights."""
    biases = {name: value for name, value in weights.items() if name.endswith("router.bias")}
    return biases, {name: value for name, value in weights.items() if name not in biases}


def _split_moments(saved: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The optimizer's tensors of a checkpoint, and all others."""
    moments = {name: value for name, value in saved.items() if name.startswith("optimizer.")}
    return moments, {name: value for name, value in saved.items() if name not in moments}


def _same_as_held(found: Outcome, reference: Outcome) -> Deviation:
    """A checkpoint has the same tensors whatever ranks wrote it, and what ranks hold is what they saved."""
    for name in found.saved.keys() ^ reference.saved.keys():
        return Deviation(math.inf, f"{name} is in one checkpoint alone")
    for name, value in found.weights.items():
        if not torch.equal(found.saved[name], value):
            return Deviation(math.inf, f"{name} was saved as something else")
    return Deviation(0.0)
