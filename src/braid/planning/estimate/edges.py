"""Edges between modules: rows, bytes, and how long a rank holds them.

The figures are those of the fullest micro-batch: every sample has as many items and patches as its module
allows. A row lies on exactly one rank of each side, so a micro-batch sends as many bytes as it has rows, less
those that stay on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from braid.nn.dtypes import DTYPES
from braid.planning.estimate.rank import lane_patches
from braid.planning.modules import ModulePlan
from braid.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class EdgeEstimate:
    """Rows that a module passes to the language model, and their gradients."""

    name: str
    width: int
    """Channels of a row."""
    itemsize: int
    """Bytes of a number."""
    rows: int
    """Of a micro-batch, over all ranks."""
    source_rows: int
    """On one rank of the encoder's last stage."""
    target_rows: int
    """On one rank of the language model's first stage."""
    messages: int
    """Forwards and backwards of a step that pass rows."""
    in_flight: int
    """Micro-batches that the encoder may be ahead of the language model."""
    source_ranks: tuple[int, ...]
    """Ranks that make rows: the encoder's last stage."""
    target_ranks: tuple[int, ...]
    """Ranks that read rows: the language model's first stage."""

    @property
    def is_local(self) -> bool:
        """Whether one rank is on both sides, and no other on either."""
        return len({*self.source_ranks, *self.target_ranks}) == 1

    @property
    def bytes(self) -> int:
        """Of a micro-batch, one way."""
        return self.rows * self.row_bytes

    @property
    def step_bytes(self) -> int:
        """Of a step, both ways."""
        return self.messages * self.bytes

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def source_bytes(self) -> int:
        """Of a micro-batch, on one rank that makes rows."""
        return self.source_rows * self.row_bytes

    @property
    def target_bytes(self) -> int:
        """Of a micro-batch, on one rank that reads rows."""
        return self.target_rows * self.row_bytes


def edges_of(plan: Plan) -> Iterator[EdgeEstimate]:
    """The edges of a plan, in the order of its modules."""
    graph, run, axes = plan.schedule.graph, plan.run, plan.axes
    local_tokens = run.data.sequence_tokens // (axes.tp * axes.cp)
    for encoder in plan.encoders.values():
        edge = graph.edge(encoder.edge)
        assert edge is not None
        shape, bound = encoder.module.model, graph.segments[edge.source].bound
        assert bound is not None, "the schedule of several modules bounds every encoder"
        of_sample = shape.rows(encoder.module.most_patches)
        yield EdgeEstimate(
            name=edge.name,
            width=shape.projector.width,
            itemsize=DTYPES[run.train.dtype].itemsize,
            rows=plan.micro_batch_samples * of_sample,
            source_rows=_source_rows(plan, encoder),
            target_rows=plan.micro_batch_samples // axes.dp * min(of_sample, local_tokens),
            messages=run.train.micro_batches * (2 if plan.schedule.backwards[edge.source] else 1),
            in_flight=bound,
            source_ranks=graph.segments[edge.source].ranks,
            target_ranks=graph.segments[edge.target].ranks,
        )


def _source_rows(plan: Plan, encoder: ModulePlan) -> int:
    rows = lane_patches(plan, encoder) // encoder.module.model.group
    return -(-rows // (encoder.axes.tp * encoder.axes.cp))
