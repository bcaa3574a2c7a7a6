"""Peak memory of a rank: the maximum of each kind of memory, and the maximum of their sum over a step.

The kinds do not peak at the same time (activations at the end of forward, gradients at the end of backward), so
the peak is less than the sum of their maxima. It is evaluated during the backward of every part of the model,
and in the optimizer step, where no activations are left. What is held at that moment adds up to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from braid.nn.cost import Cost
from braid.planning.estimate.moments import Activations, Live
from braid.planning.estimate.weights import HeldUnit


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What a rank holds at one moment, in bytes, by kind."""

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    features: int
    """Rows of edges, and their gradients, that wait to be read or to leave."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank: the maximum of each kind, and what is held when their sum peaks."""

    parameters: int
    """Sharded weights, as held between steps."""
    gathered: int
    """All-gathered weights, at most at a time, and the quantised copies of a step."""
    gradients: int
    """Gradients at the end of the last backward of a step, including reduction buffers."""
    updated: int
    """Gradients as passed to the optimizer."""
    optimizer: int
    """Adam moments, and main parameters if they are separate from the weights."""
    saved: int
    """What the rank writes to a checkpoint, if it is the first of its replicas: as much host memory as a copy
    takes."""
    activations: int
    """Activations saved for backward by all live micro-batches."""
    temporary: int
    """Temporary tensors of backward, at most at a time."""
    peak: int
    """Maximum of the total: the sum of `at_peak`."""
    at_peak: HeldBytes
    """What is held at that moment."""
    peak_at: str
    """When the total peaks: `backward of blocks.3`, `update`; `forward of blocks.3` if that is frozen, or if
    blocks are offloaded."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Properties of a rank's step that memory depends on."""

    single: bool
    """Whether this is the only rank: nothing is sharded, and weights narrower than fp32 have main
    parameters."""
    micro_batches: int
    activations: Activations
    gathered: int
    """Maximum bytes of all-gathered weights."""
    whole: bool = False
    """Whether a segment is a single phase. Narrow gradients are added to the main gradients at the end of their
    phase: with one phase, all of them exist at once."""
    working: int = 0
    """Bytes that the optimizer works in when it updates."""


def memory_of(units: list[HeldUnit], costs: Mapping[str, Cost], step: Step) -> Memory:
    """Memory of a rank with these units; `costs` are those of each part of the model for one micro-batch."""
    parameters = sum(unit.kept_bytes for unit in units)
    optimizer = sum(_optimizer_bytes(unit, step) for unit in units)
    updated = sum(unit.kept_learned * _main_itemsize(unit) for unit in units)
    parts = list(costs)
    copies = sum(unit.copies_bytes for unit in units)

    def held(gathered: int, gradients: int, live: Live) -> HeldBytes:
        return HeldBytes(
            parameters=parameters,
            gathered=gathered,
            gradients=gradients,
            optimizer=optimizer,
            activations=live.saved,
            temporary=live.temporary,
            features=live.features,
        )

    moments = {"update": held(0, updated, Live(0, step.working, 0))}
    for part in reversed(parts):
        gradients = _gradients(units, parts, part, step)
        moments[f"backward of {part}"] = held(step.gathered + copies, gradients, step.activations.during[part])
    for part, live in step.activations.forward.items():
        accumulated = updated if step.micro_batches > 1 else 0
        moments[f"forward of {part}"] = held(step.gathered + copies, accumulated, live)
    peak_at = max(moments, key=lambda moment: moments[moment].total)  # the first of equal ones
    return Memory(
        parameters=parameters,
        gathered=step.gathered + copies,
        gradients=max(updated, _gradients(units, parts, parts[0], step)),
        updated=updated,
        optimizer=optimizer,
        saved=sum(_saved_bytes(unit) for unit in units),
        activations=step.activations.kept,
        temporary=max(step.working, *(cost.passing for cost in costs.values())),
        peak=moments[peak_at].total,
        at_peak=moments[peak_at],
        peak_at=peak_at,
    )


def _main_itemsize(unit: HeldUnit) -> int:
    """Bytes of one main parameter, as the optimizer holds it: fp32 or wider."""
    return max(unit.stored, 4)


def _saved_bytes(unit: HeldUnit) -> int:
    """A main parameter and the moments of what is trained, the weights themselves of the rest."""
    trained = (unit.kept_learned + unit.kept_moments) * _main_itemsize(unit)
    return trained + (unit.kept - unit.kept_learned) * unit.stored


def _optimizer_bytes(unit: HeldUnit, step: Step) -> int:
    """The moments, and a main parameter if the model's own weight is narrower."""
    main = unit.kept_learned if step.single and unit.stored < _main_itemsize(unit) else 0
    return (main + unit.kept_moments) * _main_itemsize(unit)


def _gradients(units: list[HeldUnit], parts: list[str], part: str, step: Step) -> int:
    """Gradients that exist during the backward of a part: those of this part and the parts after it, and those
    accumulated over earlier micro-batches."""
    index = parts.index(part)
    done = [unit for unit in units if parts.index(unit.part) >= index]
    accumulating = step.micro_batches > 1
    if step.single:
        narrow = [unit for unit in units if unit.stored < _main_itemsize(unit) and not unit.in_place]
        pending = [unit for unit in narrow if (unit in done if step.whole else unit.part == part)]
        main = units if accumulating else [unit for unit in done if not step.whole or unit not in narrow]
        return sum(unit.kept_learned * _main_itemsize(unit) for unit in main) + sum(
            unit.kept_learned * unit.stored for unit in pending
        )
    # Up to ZeRO-1, gradients accumulate unsharded until the last micro-batch; from ZeRO-2 on, they are
    # reduce-scattered after every micro-batch.
    unsharded = {unit.name: accumulating and unit.strategy in ("none", "optimizer") for unit in units}
    reducing = (_reduction_bytes(unit, unsharded[unit.name]) for unit in units if unit.part == part)
    return max(reducing, default=0) + sum(
        (unit.gathered_learned if unsharded[unit.name] else unit.kept_learned) * unit.stored
        for unit in (units if accumulating else done)
    )


def _reduction_bytes(unit: HeldUnit, unsharded: bool) -> int:
    """A unit's own gradients and its reduction buffer. In-place gradients are written to the accumulated
    unsharded ones, if there are any, and then take no memory of their own."""
    own = unit.computed if not unit.in_place else 0 if unsharded else unit.stored
    return unit.gathered_learned * (own + unit.stored)
