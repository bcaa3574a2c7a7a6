"""FSDP shards of quantised weights: e4m3 values, made once a step, all-gathered as bytes.

    begin    amax of the shard's blocks ──► maximum over ranks ──► scales, on all ranks ──► values of the shard
    UNSHARD  all-gather of values           half the bytes of bfloat16

Blocks are those of the whole weight. Two all-reduces of one float per block give every rank the scales of all
that it gathers, and those of blocks that the edge of a tp or etp slice cuts: one call for all weights of a
group. Only formats that need a single copy of the weight are gathered like this; others would take as many
bytes as bfloat16.

Shapes: as the weight's matrix, O channels out and I channels in, after experts; o and i blocks of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from braid.distributed.collectives import Group, all_reduce_max_no_grad
from braid.engine import fsdp2
from braid.kernels.precision import Products
from braid.kernels.precision.grid import ScaleGrid
from braid.kernels.precision.quantize import Blocks, largest, scaled
from braid.kernels.precision.step_weight import Scales
from braid.nn.moe.experts import Experts
from braid.nn.precision import matrix, quantised_weights


class QuantisedShards:
    """Those of a model, by unit."""

    def __init__(self, root: nn.Module, units: Mapping[str, FSDPModule]) -> None:
        found = {unit: list(_weights(root, module)) for unit, module in units.items()}
        self._by_unit = {unit: weights for unit, weights in found.items() if weights}
        self._weights = [weight for weights in self._by_unit.values() for weight in weights]

    @torch.no_grad()
    def begin(self) -> None:
        """Quantise all shards. Collective over the ranks of each unit."""
        grids = [weight.amax() for weight in self._weights]
        _maximum((weight.gather.group, grid) for weight, grid in zip(self._weights, grids, strict=True))
        cut = zip(self._weights, grids, strict=True)
        _maximum((group, grid) for weight, grid in cut for group in weight.grid.cut_groups())
        for weight, grid in zip(self._weights, grids, strict=True):
            weight.quantise(grid)

    def end(self) -> None:
        for weight in self._weights:
            weight.gather.values = None
            weight.products.step_weight.clear()

    def gathered(self, unit: str) -> None:
        """A unit has been gathered."""
        for weight in self._by_unit.get(unit, ()):
            weight.gather.set_grad_dtype()


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """One weight, and this rank's shard of it."""

    products: Products
    gather: fsdp2.ValueGather
    grid: ScaleGrid

    def amax(self) -> Tensor:
        """The largest magnitudes of the shard's blocks among those of the whole weight."""
        shard_OI = matrix(self.gather.shard).float()
        grid = self.grid.zeros(shard_OI)
        if shard_OI.numel():
            self._own(self.grid.held(grid)).copy_(largest(shard_OI, *self._blocks()))
        return grid

    def quantise(self, grid: Tensor) -> None:
        """Make scales and values, from the largest magnitudes of all blocks."""
        form = self.products.forward
        assert form is not None
        scales_oi = form.scales(self.grid.held(grid))
        self.products.step_weight.gathered = Scales(
            scales_oi=scales_oi, rows=self.grid.rows, columns=self.grid.columns
        )
        shard = self.gather.shard
        shard_OI = matrix(shard).float()
        own = scaled(shard_OI, self._own(scales_oi), *self._blocks())
        self.products.count_weight(shard_OI, own, self.gather.group.size)
        self.gather.put(own.values.view(shard.shape))

    def _offsets(self) -> tuple[int, int]:
        """Where the shard begins in the matrix of this rank's slice: its row and its column."""
        gather = self.gather
        if gather.dim == len(gather.whole) - 1:
            return 0, gather.start
        return gather.start * gather.whole[gather.dim + 1 : -1].numel(), 0

    def _blocks(self) -> tuple[Blocks, Blocks]:
        row, column = self._offsets()
        return self.grid.rows.behind(row)[1], self.grid.columns.behind(column)[1]

    def _own(self, slice_oi: Tensor) -> Tensor:
        """The shard's part of what this rank's slice has for each block."""
        row, column = self._offsets()
        (first_row, rows), (first_column, columns) = (
            self.grid.rows.behind(row),
            self.grid.columns.behind(column),
        )
        high, wide = matrix(self.gather.shard).shape[-2:]
        return slice_oi.narrow(-2, first_row, rows.count(high)).narrow(-1, first_column, columns.count(wide))


def _weights(root: nn.Module, unit: FSDPModule) -> Iterator[_Weight]:
    for path, name, products in quantised_weights(root):
        if not products.shares_weight:
            continue
        module = root.get_submodule(path)
        family = "edp" if isinstance(module, Experts) else "dp_cp"
        gather = fsdp2.gather_values(unit, module, name, family)
        if gather is not None:
            shape = matrix(torch.empty(gather.whole, device="meta")).shape
            yield _Weight(products=products, gather=gather, grid=ScaleGrid.of(products, shape))


def _maximum(grids: Iterable[tuple[Group, Tensor]]) -> None:
    """The maximum of each grid over the ranks of its group, in place: one all-reduce for those of a family."""
    of_family: dict[str, tuple[Group, list[Tensor]]] = {}
    for group, grid in grids:
        if group.size > 1:
            of_family.setdefault(group.name, (group, []))[1].append(grid)
    for group, members in of_family.values():
        flat = all_reduce_max_no_grad(torch.cat([grid.flatten() for grid in members]), group)
        for grid, reduced in zip(members, flat.split([grid.numel() for grid in members]), strict=True):
            grid.copy_(reduced.view(grid.shape))
