"""The memory of a rank: what it holds at most of each kind, and the highest sum over the moments of a step.

Not everything is highest at the same moment: activations are when forward ends, gradients when backward does.
So the peak is not the sum of the kinds. It is looked for at every part of the model on the way back, and in the
optimizer's update, where nothing of the activations is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from braid.choices import Strategy
from braid.nn.cost import Cost
from braid.planning.estimate.moments import Activations
from braid.planning.estimate.weights import HeldUnit


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    parameters: int
    """Weights as they are kept between steps."""
    gathered: int
    """Weights of other ranks' shards, as many as are there at a time."""
    gradients: int
    """Gradients at the end of the last backward of a step, those on their way between ranks included."""
    updated: int
    """Gradients as the optimizer is given them."""
    optimizer: int
    """Moments, and main copies of weights where these are apart."""
    activations: int
    """What all micro-batches that are under way keep for backward."""
    passing: int
    """What backward needs at a time besides, where it needs most."""
    peak: int
    """The most that is there at any moment."""
    peak_at: str
    """That moment: `backward of blocks.3`, `update`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """How a rank goes through a step."""

    alone: bool
    """Whether there is no other rank: then nothing is sharded, and narrow weights have main copies."""
    strategy: Strategy
    micro_batches: int
    activations: Activations
    gathered: int
    """The most bytes of gathered weights that are there at a time."""
    whole: bool = False
    """Whether all of a segment is one phase: then narrow gradients join the main ones when all of them are
    there, and else when those of their own phase are."""


def memory_of(units: list[HeldUnit], costs: Mapping[str, Cost], step: Step) -> Memory:
    """The memory of a rank with these units, whose parts cost this for one micro-batch."""
    parameters = sum(unit.kept_bytes for unit in units)
    optimizer = sum(_state(unit, step) for unit in units)
    updated = sum(unit.kept * _main(unit) for unit in units)
    steady = parameters + optimizer
    peak, peak_at = steady + updated, "update"
    parts = list(costs)
    for part in reversed(parts):
        grads = _gradients(units, parts, part, step)
        here = steady + step.gathered + step.activations.during[part] + grads
        if here > peak:
            peak, peak_at = here, f"backward of {part}"
    return Memory(
        parameters=parameters,
        gathered=step.gathered,
        gradients=max(updated, _gradients(units, parts, parts[0], step)),
        updated=updated,
        optimizer=optimizer,
        activations=step.activations.kept,
        passing=max(cost.passing for cost in costs.values()),
        peak=peak,
        peak_at=peak_at,
    )


def _main(unit: HeldUnit) -> int:
    """Bytes of a weight as the optimizer has it."""
    return max(unit.stored, 4)


def _state(unit: HeldUnit, step: Step) -> int:
    """Two moments, and a main copy where the model's own weights are narrower."""
    copies = 3 if step.alone and unit.stored < _main(unit) else 2
    return copies * unit.kept * _main(unit)


def _gradients(units: list[HeldUnit], parts: list[str], part: str, step: Step) -> int:
    """Gradients that are there while backward is in a part: those of this part and of the parts after it, and
    what earlier micro-batches have left."""
    place = parts.index(part)
    passed = [unit for unit in units if parts.index(unit.part) >= place]
    earlier = step.micro_batches > 1
    if step.alone:
        narrow = [unit for unit in units if unit.stored < _main(unit) and not unit.in_place]
        waiting = [unit for unit in narrow if (unit in passed if step.whole else unit.part == part)]
        main = units if earlier else [unit for unit in passed if not step.whole or unit not in narrow]
        return sum(unit.kept * _main(unit) for unit in main) + sum(unit.kept_bytes for unit in waiting)
    stay = earlier and step.strategy in ("none", "optimizer")
    most = max((_to_sum(unit, stay) for unit in units if unit.part == part), default=0)
    if stay:
        return sum(unit.gathered * unit.stored for unit in units) + most
    return sum(unit.kept_bytes for unit in (units if earlier else passed)) + most


def _to_sum(unit: HeldUnit, stay: bool) -> int:
    """A unit's own gradients, and the buffer from which they are summed over ranks. Those that are written in
    place are with the ones that `stay`, where any do."""
    own = unit.computed if not unit.in_place else 0 if stay else unit.stored
    return unit.gathered * (own + unit.stored)
