"""What other trainers run where braid runs something else, as far as their sources tell.

A published step is predicted as the plan of the same configuration in braid. Three facts about a source change
what its ranks run, and none of them is fitted:

    attention   `unfused`: scores are written and read, as before FlashAttention; `flash 2`: on Hopper, the
                generation before the kernels that were measured
    tp          without sequence parallelism an all-reduce takes the place of each pair of all-gather and
                reduce-scatter. Norms and residuals on all tokens move about the bytes that braid's copies
                around the pair do, so memory traffic stays the same
    device      a variant of the GPU: its share of the usual peak, its memory bandwidth
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from braid.nn.cost import Call
from braid.nn.work import Kernel, Moved, Pass, Piece, Product
from braid.timing.calibration import Calibration, seconds
from braid.timing.meter import ClusterMeter

FACTS = Path(__file__).with_name("other_trainers.json")
Attention = Literal["fused", "flash 2", "unfused"]
FLASH_2: Mapping[str, float] = {"forward": sqrt(1.5 * 2.0), "backward": sqrt(1.5 * 1.75)}
"""How many times longer FlashAttention-2 takes on Hopper than FlashAttention-3, whose paper (arXiv 2407.08608)
has 1.5 to 2.0 forward and 1.5 to 1.75 backward."""
SCORE_BYTES: Mapping[str, int] = {"forward": 13, "backward": 19}
"""Bytes of traffic of a score that is kept in two bytes: product, softmax, dropout with a mask of one byte."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the ranks of a source run."""

    name: str = "others"
    source: str = ""
    """Words that its sources contain."""
    attention: Attention = "fused"
    selective: tuple[str, ...] = ("core",)
    """What `selective` recomputes, in braid's regions."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A GPU that differs from the one of its name."""

    note: str
    """Words of the rows that ran on it."""
    peak_share: float
    bandwidth: float
    why: str

    def of(self, usual: Calibration) -> Calibration:
        """The calibration of the variant: products, attention and scans by its peak, the rest by its memory."""
        memory = self.bandwidth / usual.peak_bandwidth
        return replace(
            usual,
            peak_flops=usual.peak_flops * self.peak_share,
            peak_bandwidth=self.bandwidth,
            products=tuple(
                replace(table, seconds=tuple(each / self.peak_share for each in table.seconds))
                for table in usual.products
            ),
            kernels=tuple(
                replace(
                    table,
                    points=tuple(
                        (size, each / (self.peak_share if table.by == "flops" else memory))
                        for size, each in table.points
                    ),
                )
                for table in usual.kernels
            ),
            bandwidth=tuple((size, each / memory) for size, each in usual.bandwidth),
            optimizer=usual.optimizer * memory,
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the trainers and GPUs behind published rows."""

    trainers: tuple[Trainer, ...]
    variants: tuple[Variant, ...]

    @classmethod
    def of_file(cls, file: Path = FACTS) -> Facts:
        given = json.loads(file.read_text())
        return cls(
            trainers=tuple(
                Trainer(**{**each, "selective": tuple(each["selective"])}) for each in given["trainers"]
            ),
            variants=tuple(Variant(**each) for each in given["variants"]),
        )

    def trainer_of(self, row: Mapping[str, Any]) -> Trainer:
        """The trainer of a row's source; one that runs what braid does, if nothing is known."""
        return next((each for each in self.trainers if each.source in row["source"]), Trainer())

    def calibration_of(self, row: Mapping[str, Any], usual: Calibration) -> Calibration:
        """That of the row's GPU."""
        found = next((each for each in self.variants if each.note in row["note"]), None)
        return usual if found is None else found.of(usual)


@dataclass(frozen=True)
class TrainerMeter(ClusterMeter):
    """Seconds of what another trainer runs for the same plan."""

    trainer: Trainer = Trainer()
    sequence_parallel: bool = True

    def piece(self, piece: Piece, direction: Pass) -> tuple[str, float]:
        what, each = super().piece(piece, direction)
        if what != "attention" or not isinstance(piece.what, Kernel) or direction not in FLASH_2:
            return what, each
        if self.trainer.attention == "flash 2" and self.cluster.device in ("h100", "h200"):
            return what, each * FLASH_2[direction]
        if self.trainer.attention == "unfused":
            slower = _unfused(piece.what, direction, self.calibration) / seconds(
                piece, direction, self.calibration
            )
            return what, each * max(slower, 1.0)
        return what, each

    def call(self, call: Call, module: str) -> float:
        if call.family != "tp" or self.sequence_parallel:
            return super().call(call, module)
        if call.op == "all_gather":
            return 0.0
        return super().call(call._replace(op="all_reduce") if call.op == "reduce_scatter" else call, module)


def _unfused(kernel: Kernel, direction: Pass, calibration: Calibration) -> float:
    """The seconds of attention that keeps its scores: products of all pairs, causal or not, and traffic."""
    key = dict(kernel.key)
    tokens, head = int(key["tokens"]), int(key["head_dim"])
    pairs = tokens * (tokens + 1) // 2 if key["causal"] else tokens * tokens
    products = 2 if direction == "forward" else 7  # as the fused backward counts
    heads = max(round(kernel.flops / (2 * products * head * pairs)), 1)
    rows, columns = Product(tokens, tokens, head, heads), Product(tokens, head, tokens, heads)
    each = sum(seconds(Piece(product), "forward", calibration) for product in (rows, columns))
    moved = Moved(SCORE_BYTES[direction] * heads * tokens**2)
    return (1 if direction == "forward" else 2) * each + seconds(Piece(moved), direction, calibration)
