"""`train.precision fp8`: what pays on a device, by its calibration.

Every kind of product has a few settings; the seconds that they save are those of a rank's layers in a step, as
`braid plan --time` predicts them, quantising included. A setting is picked if it saves more than `LEAST` of the
seconds of all layers; of several, the one that saves most. Without measured products in low precision nothing
is picked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from braid.config import Run
from braid.errors import ConfigError
from braid.nn.work import Moved, Piece
from braid.planning.estimate.weights import counted_by_station
from braid.planning.plan import Plan, check, plan
from braid.precision import ENDS, FASTEST
from braid.timing.calibration import Calibration, load, missing, seconds, shipped
from braid.timing.peaks import device_name
from braid.timing.seconds import Station, stations_of

CANDIDATES: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "dense layers": (("dense=fp8_block",), ("dense=fp8_block", "dense.weight_grad=bf16")),
        "experts": (("experts=fp8_block",),),
    }
)
"""Settings of each kind of product that may pay. `experts.down.input_grad=bf16` is none of them: it saves
bytes, but a GPU at its power limit slows down for products in bfloat16, which no table says
(docs/precision.md)."""
LEAST = 0.03
"""Of the seconds of all layers: less is within the error of predictions."""


@dataclass(frozen=True)
class Fastest:
    """The run with the word `fp8` replaced, and why."""

    run: Run
    reasons: tuple[str, ...]


def fastest(run: Run, world: int, device: str | None) -> Fastest:
    """A run whose precision has the word `fp8`, on a device by the name that its driver or a cluster gives it;
    None: there is none. Other runs stay as they are."""
    if FASTEST not in run.train.precision:
        return Fastest(run, ())
    if device is None:
        why = "fp8: nothing is quantised, as no GPU decides; `braid plan --cluster` names one"
        return Fastest(_with(run, ()), (why,))
    name = device_name(device) if device not in shipped() else device
    if name not in shipped():
        why = f"fp8: nothing is quantised, as braid has no calibration for {device}"
        return Fastest(_with(run, ()), (why,))
    return picked(run, world, load(name))


def picked(run: Run, world: int, calibration: Calibration) -> Fastest:
    """The same by a calibration."""
    plain = _with(run, ())
    if not any(table.format for table in calibration.products):
        why = f"fp8: nothing is quantised, as the calibration of {calibration.device} has no products in fp8"
        return Fastest(plain, (why,))
    if check(plain, world):  # its own problems come first
        return Fastest(plain, ())
    base = _seconds(plan(plain, world), calibration)
    chosen, reasons = list[str](), []
    for kind, candidates in CANDIDATES.items():
        found = dict(_timed(run, world, calibration, candidates))
        taken = {settings: each for settings, each in found.items() if isinstance(each, float)}
        if not taken:
            reasons += [
                f"fp8: {kind} stay in {run.train.dtype}: {why}" for why in dict.fromkeys(found.values())
            ]
            continue
        best = min(taken, key=lambda settings: taken[settings])
        gain = f"{base / taken[best]:.2f} times as fast on {calibration.device}, by its calibration"
        if taken[best] <= (1 - LEAST) * base:
            chosen += best
            reasons.append(f"fp8: {' '.join(best)} makes all layers {gain}")
        elif taken[best] != base:
            reasons.append(
                f"fp8: {kind} stay in {run.train.dtype}: with {' '.join(best)} all layers are {gain}"
            )
    return Fastest(_with(run, chosen), tuple(reasons))


def _with(run: Run, settings: Sequence[str]) -> Run:
    """The run with settings in the place of the word `fp8`. What is named after it wins, as ever."""
    own: list[str] = []
    for setting in run.train.precision:
        own += settings if setting == FASTEST else [setting]
    if not any(setting != ENDS for setting in own):
        own = ["bf16"]
    return replace(run, train=replace(run.train, precision=tuple(own)))


def _timed(
    run: Run, world: int, calibration: Calibration, candidates: Sequence[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], float | str]]:
    """Each candidate alone: the seconds of all layers, or why there are none."""
    for settings in candidates:
        quantised = _with(run, settings)
        if problems := check(quantised, world):
            yield settings, problems[0].rule
            continue
        try:
            yield settings, _seconds(plan(quantised, world), calibration)
        except ConfigError as error:
            yield settings, str(error)


def _seconds(planned: Plan, calibration: Calibration) -> float:
    """Of the layers of the rank that computes longest, in a step."""
    stations = stations_of(planned, counted_by_station(planned, "cuda"), 1.0)
    return max(_of_station(each, planned, calibration) for each in stations if each.original is None)


def _of_station(station: Station, planned: Plan, calibration: Calibration) -> float:
    total = 0.0
    for work in (work for kinds in station.works.values() for work in kinds.values()):
        if unknown := missing(work, calibration):
            raise ConfigError(unknown[0])
        total += sum(
            seconds(piece, direction, calibration)
            for direction, pieces in work.passes().items()
            for piece in pieces
        )
    micro_batches = planned.run.train.micro_batches
    moved = sum(unit.quantising_bytes for unit in station.units)
    weights = seconds(Piece(Moved(moved)), "forward", calibration) if moved else 0.0
    return micro_batches * total + weights
