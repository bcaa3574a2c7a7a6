"""Quantised operands of sharded layers: the bytes of one process, wherever the edges of shards are."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid.distributed.collectives import Group
from braid.kernels.precision import FORMATS, Products, Quantized, Shards, Slice, quantize
from tests.ranks import run_ranks

NAMES = sorted(FORMATS)
ROWS, INPUTS, OUTPUTS = 6, 48 * 4, 72 * 4
"""No shard of either axis has whole blocks of 128; those of 144 outputs have none of 32 either."""


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight, and the gradient of the outputs: magnitudes that differ from channel to channel."""
    generator = torch.Generator().manual_seed(11)
    steep = torch.logspace(-3, 3, INPUTS), torch.logspace(3, -3, OUTPUTS)
    x, weight, grad = (
        torch.randn(shape, generator=generator)
        for shape in ((ROWS, INPUTS), (OUTPUTS, INPUTS), (ROWS, OUTPUTS))
    )
    x[2, 130], grad[3, 200] = math.nan, -math.inf
    return x * steep[0], weight * steep[1].unsqueeze(1), grad * steep[1]


def same(found: Quantized, whole: Quantized, rows: slice = slice(None), columns: slice = slice(None)) -> bool:
    """Whether the bytes of a part and the scale of each are those of the whole."""
    codes = torch.equal(found.values.view(torch.uint8), whole.values.view(torch.uint8)[rows, columns])
    scales = found.scale_of_each().expand(found.values.shape), whole.scale_of_each().expand(whole.values.shape)
    return codes and torch.equal(scales[0].nan_to_num(-1), scales[1][rows, columns].nan_to_num(-1))


def operands_of_shards(rank: int, world: int) -> list[str]:
    """What differs from one process: for column-parallel and row-parallel layers, each operand and format."""
    group = Group(name="tp", size=world, rank=rank, handle=dist.group.WORLD)
    part, whole = Slice(group), Products(forward=None, input_grad=None, weight_grad=None)
    x, weight, grad = tensors()
    differs: list[str] = []
    for name in NAMES:
        form = FORMATS[name]
        for shards in (Shards(outputs=part), Shards(inputs=part)):
            own = Products(forward=form, input_grad=form, weight_grad=None, shards=shards)
            i, o = (
                slice(None) if axis is None else slice(rank * size // world, (rank + 1) * size // world)
                for axis, size in ((shards.inputs, INPUTS), (shards.outputs, OUTPUTS))
            )
            w, all_rows = weight[o, i], slice(None)
            pairs = {
                "input": (own.quantized_x(x[:, i], form), whole.quantized_x(x, form), all_rows, i),
                "weight": (own.quantized_weight(w, form), whole.quantized_weight(weight, form), o, i),
                "gradient": (
                    own.quantized_grad(grad[:, o], form),
                    whole.quantized_grad(grad, form),
                    all_rows,
                    o,
                ),
                "transposed weight": (
                    own.quantized_weight_IO(w, form),
                    whole.quantized_weight_IO(weight, form),
                    i,
                    o,
                ),
            }
            differs += [f"{name} {operand} {shards}" for operand, pair in pairs.items() if not same(*pair)]
    return differs


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_shards_are_quantised_as_parts_of_the_whole(world: int) -> None:
    assert run_ranks(world, operands_of_shards) == [[]] * world


def test_scales_of_a_shard_alone_would_differ() -> None:
    """So that the test above compares something."""
    _, weight, _ = tensors()
    for name in NAMES:
        form = FORMATS[name]
        whole = quantize(weight, form, weight=True)
        assert not same(
            quantize(weight[:, INPUTS // 4 :], form, weight=True), whole, columns=slice(INPUTS // 4, None)
        )


def test_edges_between_blocks_need_no_collective() -> None:
    """The group has no communicator: a collective would fail."""
    group = Group(name="tp", size=2, rank=1, handle=None)
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    for name in ("fp8_block", "mxfp8"):
        assert not Slice(group).cuts(128, FORMATS[name].block or 0)
    assert Slice(group).cuts(144, 128)
    assert not Slice(Group(name="tp", size=1, rank=0, handle=None)).cuts(144, 128)
    own = quantize(weight[:, 128:], FORMATS["fp8_block"], weight=True, columns=Slice(group))
    assert same(own, quantize(weight, FORMATS["fp8_block"], weight=True), columns=slice(128, None))
