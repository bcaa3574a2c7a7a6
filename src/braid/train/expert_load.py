"""Expert load over a step: summed over micro-batches, told as figures, evened out by selection biases.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from braid.distributed.collectives import Group, all_reduce_no_grad
from braid.model.language import LanguageModel
from braid.nn.moe.balance import Balance, Load, load, updated_bias
from braid.pattern import Layer

Counts = Mapping[Layer, Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Counts of every MoE layer over the micro-batches of a step so far."""

    counts_E: Counts = field(default_factory=dict)
    """How many tokens chose each expert."""
    kept_E: Counts = field(default_factory=dict)
    """How many of them found a place."""
    favourites_E: Counts = field(default_factory=dict)
    """How often each expert was among the best raw scores."""

    def plus(self, balances: Mapping[Layer, Balance]) -> ExpertLoad:
        """With one more micro-batch."""
        return ExpertLoad(
            counts_E=_plus(self.counts_E, {layer: b.counts_E for layer, b in balances.items()}),
            kept_E=_plus(self.kept_E, {layer: b.kept_E for layer, b in balances.items()}),
            favourites_E=_plus(self.favourites_E, {layer: b.favourites_E for layer, b in balances.items()}),
        )

    def over(self, group: Group) -> ExpertLoad:
        """The same over all ranks of a group, which share the micro-batches. Favourites are summed already."""
        if group.size == 1 or not self.counts_E:
            return self
        both = torch.stack([torch.cat([*counts.values()]) for counts in (self.counts_E, self.kept_E)])
        sizes = [len(counts_E) for counts_E in self.counts_E.values()]
        counts, kept = (row.split(sizes) for row in all_reduce_no_grad(both, group))
        return ExpertLoad(
            counts_E=dict(zip(self.counts_E, counts, strict=True)),
            kept_E=dict(zip(self.kept_E, kept, strict=True)),
            favourites_E=self.favourites_E,
        )

    def layers(self) -> list[Load]:
        """The load of each layer."""
        return [load(counts_E, self.kept_E[layer]) for layer, counts_E in self.counts_E.items()]


def figures(layers: Sequence[Load]) -> dict[str, float]:
    """The worst layer's extremes, the mean of the rest; nothing without layers of experts."""
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
def update_selection_biases(model: LanguageModel, loads: ExpertLoad) -> None:
    """Move every selection bias towards even load, once per step."""
    for layer, moe in model.moes():
        bias_E = moe.router.bias
        if bias_E is not None:
            bias_E.copy_(updated_bias(bias_E, loads.counts_E[layer], moe.shape.selection_bias_rate))
