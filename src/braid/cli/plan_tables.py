"""Tables and JSON of the stages of a plan, with and without modules."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.planning.estimate import StageEstimate

MAX_LAYERS = 24
"""Symbols shown of a stage's pattern."""
MEMORY_COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations", "temporary", "peak")
"""Fields of `Memory` shown in the table."""


def layers_cell(stage: StageEstimate) -> str:
    """The pattern of a stage, as far as it fits."""
    return stage.layers if len(stage.layers) <= MAX_LAYERS else stage.layers[: MAX_LAYERS - 3] + "..."


def traffic_table(stage: StageEstimate) -> tuple[list[str], list[list[str]]]:
    merged: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for call in stage.calls:
        key = (call.family, str(call.ranks), call.op, call.label)
        times, sent = merged.get(key, (0, 0))
        merged[key] = (times + call.times, sent + call.sent)
    rows = [
        [*key, f"{times:,}", mib(sent)]
        for key, (times, sent) in sorted(merged.items(), key=lambda item: (item[0][0], -item[1][1]))
    ]
    if stage.sends:
        rows.append(["pp", "", "send", "activations and their gradients", "", mib(stage.sends)])
    totals = [[family, "", "", "total", "", mib(sent)] for family, sent in stage.sent.items()]
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
    }


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
