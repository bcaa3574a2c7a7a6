"""Tables and JSON of the stages of a plan, with and without modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.planning.estimate import Estimate, Memory, StageEstimate

Table = tuple[list[str], list[list[str]]]
"""Columns and rows."""
MAX_LAYERS = 24
"""Symbols shown of a stage's pattern."""
HELD_COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations", "temporary")
"""What a rank holds when its memory peaks, fields of `HeldBytes`; they add up to the peak."""
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(size: float) -> str:
    """Bytes in the largest unit of which there is one or more: `206.7 GiB`."""
    for name, unit in _UNITS:
        if size >= unit:
            return f"{size / unit:,.1f} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B"


def table_unit(peak: int) -> tuple[str, int]:
    """The unit of a table of memory: GiB, or MiB for a peak below 1 GiB."""
    return ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)


def held_cells(memory: Memory, unit: int, *more: str) -> list[str]:
    """What is held at the peak, further cells, then the peak and when it is."""
    held = [f"{getattr(memory.at_peak, name) / unit:,.2f}" for name in HELD_COLUMNS]
    return [*held, *more, f"{memory.peak / unit:,.2f}", memory.peak_at]


def memory_table(result: Estimate) -> Table:
    """What a rank of each stage holds when its memory peaks."""
    _, unit = table_unit(result.peak)
    columns = ["stage", "live", *HELD_COLUMNS, "peak", "peak at", "layers"]
    rows = [
        [str(stage.stage), str(stage.live), *held_cells(stage.memory, unit), layers_cell(stage)]
        for stage in result.stages
    ]
    return columns, rows


def offload_table(result: Estimate, unit: int) -> Table:
    """Where the activations of a micro-batch are between forward and backward; no rows without offload."""
    named = [(str(stage.stage), stage) for stage in result.stages]
    for station in result.stations:
        named += [(f"{name} {stage.stage}", stage) for name, stage in station.modules.items()]
    rows = [
        [name, *(f"{bytes_ / unit:,.2f}" for bytes_ in asdict(stage.offload).values())]
        for name, stage in dict(named).items()
        if stage.offload is not None
    ]
    return ["stage", "held", "recomputed", "offloaded", "host pool"], rows


def offload_lines(result: Estimate, kept_peak: int | None) -> Iterator[str]:
    """How much offload lowers the peak."""
    if kept_peak is not None:
        yield (
            f"offload lowers the peak by {size_text(kept_peak - result.peak)}, from {size_text(kept_peak)} to "
            f"{size_text(result.peak)} on the fullest rank"
        )


def verdict(result: Estimate, limit: int) -> str:
    """Whether the peak fits into the memory of a device."""
    spare = limit - result.peak
    if spare >= 0:
        return f"fits into {size_text(limit)}: {size_text(spare)} are left"
    return f"does not fit into {size_text(limit)}: {size_text(-spare)} too much"


MEMORY_COPIES = 4
"""Parts that a rank has in shared memory at most: its own and a neighbour's, and both again while a newer step
takes their place."""


def host_memory(result: Estimate) -> Iterator[str]:
    """What saving beside training takes of the host's memory, if the run saves along the way."""
    train = result.plan.run.train
    if train.async_save and (train.save_every or train.memory_save_every):
        yield f"host memory for copies that are saved: {size_text(result.saved)} for each rank at most"
    if train.memory_save_every:
        most = size_text(MEMORY_COPIES * result.saved)
        yield f"host memory for checkpoints in memory: {most} for each rank at most"


def layers_cell(stage: StageEstimate) -> str:
    """The pattern of a stage, as far as it fits."""
    return stage.layers if len(stage.layers) <= MAX_LAYERS else stage.layers[: MAX_LAYERS - 3] + "..."


def traffic_table(stage: StageEstimate) -> Table:
    """What a rank of a stage sends in a step."""
    merged: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for call in stage.calls:
        key = (call.family, str(call.ranks), call.op, call.label)
        times, sent = merged.get(key, (0, 0))
        merged[key] = (times + call.times, sent + call.sent)
    rows = [
        [*key, f"{times:,}", size_text(sent)]
        for key, (times, sent) in sorted(merged.items(), key=lambda item: (item[0][0], -item[1][1]))
    ]
    if stage.sends:
        rows.append(["pp", "", "send", "activations and their gradients", "", size_text(stage.sends)])
    totals = [[family, "", "", "total", "", size_text(sent)] for family, sent in stage.sent.items()]
    return ["family", "ranks", "op", "for", "calls", "sent"], rows + totals


def stage_json(stage: StageEstimate) -> dict[str, Any]:
    """A stage, with all sizes in bytes."""
    return {
        "stage": stage.stage,
        "layers": stage.layers,
        "weights": stage.weights,
        "live_micro_batches": stage.live,
        "memory": asdict(stage.memory),
        "calls": [{**call._asdict(), "sent": call.sent} for call in stage.calls],
        "sent": stage.sent,
        "offload": None if stage.offload is None else asdict(stage.offload),
    }
