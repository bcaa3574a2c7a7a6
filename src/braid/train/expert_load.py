"""Expert load of a step: accumulated over micro-batches, reported as metrics, balanced by selection biases.

The bias update is the auxiliary-loss-free balancing of DeepSeek-V3 (arXiv:2412.19437).

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_reduce_no_grad
from braid.model.stacked import StackedModel
from braid.nn.moe.balance import Balance, Load, updated_bias
from braid.pattern import Layer

Counts = Mapping[Layer, Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Token counts of every MoE layer, over the micro-batches of a step so far."""

    counts_E: Counts = field(default_factory=dict)
    """Tokens routed to each expert."""
    kept_E: Counts = field(default_factory=dict)
    """Those of them within the expert's capacity, that is, not dropped."""
    raw_counts_E: Counts = field(default_factory=dict)
    """How often each expert was in the top-k of the raw scores."""

    def plus(self, balances: Mapping[Layer, Balance]) -> ExpertLoad:
        """The load with one more micro-batch added."""
        return ExpertLoad(
            counts_E=_plus(self.counts_E, {layer: b.counts_E for layer, b in balances.items()}),
            kept_E=_plus(self.kept_E, {layer: b.kept_E for layer, b in balances.items()}),
            raw_counts_E=_plus(self.raw_counts_E, {layer: b.raw_counts_E for layer, b in balances.items()}),
        )

    def all_reduce(self, group: Group) -> ExpertLoad:
        """Sum counts over the ranks that share the micro-batches. The forward has already summed raw counts."""
        if group.size == 1 or not self.counts_E:
            return self
        both = torch.stack([torch.cat([*counts.values()]) for counts in (self.counts_E, self.kept_E)])
        sizes = [len(counts_E) for counts_E in self.counts_E.values()]
        counts, kept = (row.split(sizes) for row in all_reduce_no_grad(both, group))
        return ExpertLoad(
            counts_E=dict(zip(self.counts_E, counts, strict=True)),
            kept_E=dict(zip(self.kept_E, kept, strict=True)),
            raw_counts_E=self.raw_counts_E,
        )

    def pairs(self) -> list[Tensor]:
        """`counts_E` and `kept_E` of every layer, stacked."""
        return [torch.stack([counts_E, self.kept_E[layer]]) for layer, counts_E in self.counts_E.items()]


def load_metrics(layers: Sequence[Load]) -> dict[str, float]:
    """Extremes over all MoE layers, and means of entropy and drop rate; empty for a dense model."""
    if not layers:
        return {}
    return {
        "moe_max_over_mean": max(each.max_over_mean for each in layers),
        "moe_min_over_mean": min(each.min_over_mean for each in layers),
        "moe_entropy": sum(each.entropy for each in layers) / len(layers),
        "moe_dropped": sum(each.dropped for each in layers) / len(layers),
    }


def _plus(sums: Counts, more: Counts) -> Counts:
    new = {layer: sums[layer] + counts_E if layer in sums else counts_E for layer, counts_E in more.items()}
    return {**sums, **new}


@torch.no_grad()
def update_selection_biases(
    model: StackedModel,
    loads: ExpertLoad,
    apply: Tensor | None = None,
    frozen: Collection[str] = frozenset(),
) -> None:
    """Move every selection bias towards balanced load, once per step, but those of the names in `frozen`; with
    `apply`, a 0-D bool on the device, only if it is true."""
    held = {id(buffer) for name, buffer in model.named_buffers() if name in frozen}
    for layer, moe in model.moe_layers():
        bias_E = moe.router.bias
        if bias_E is not None and id(bias_E) not in held:
            moved_E = updated_bias(bias_E, loads.counts_E[layer], moe.shape.selection_bias_rate)
            bias_E.copy_(moved_E if apply is None else torch.where(apply, moved_E, bias_E))
