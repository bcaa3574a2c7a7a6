"""Mamba-2 and the gated delta net: however ranks share heads and tokens, the answer is that of one process.

Shapes: B rows, T tokens, t tokens of a rank, C hidden channels.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import ALONE, Group, Groups, all_reduce_no_grad, own_slice
from braid.kernels import delta_rule, ssd
from braid.nn.canonical import Canonical
from braid.nn.delta_net import DeltaNet
from braid.nn.mamba2 import Mamba2
from tests.ranks import run_ranks

HIDDEN, EPS, ROWS, TOKENS = 6, 1e-5, 2, 32
LENGTHS = ((1, 2, 9, 20), (17, 15))
"""Packed documents: some cross the slices of ranks, some are shorter than the convolution."""
TOPOLOGIES = {2: ((2, 1), (1, 2)), 4: ((4, 1), (2, 2), (1, 4)), 8: ((4, 2), (2, 4))}
"""By number of ranks: sizes of tp and cp."""

Shape = architecture.Mamba2 | architecture.DeltaNet
Mixer = Mamba2 | DeltaNet


def mamba2(groups: int, heads: int = 8, **more: Any) -> architecture.Mamba2:
    return architecture.Mamba2(heads=heads, groups=groups, head_dim=3, state=5, **more)


def delta_net(key_heads: int, value_heads: int = 8) -> architecture.DeltaNet:
    return architecture.DeltaNet(key_heads=key_heads, value_heads=value_heads, key_dim=5, value_dim=3)


SHAPES: tuple[Shape, ...] = (
    mamba2(1),
    mamba2(1, norm_per_group=False, bias=True),
    mamba2(2, bias=True, dt_min=0.3, dt_max=0.9),
    mamba2(2, norm_per_group=False, conv_bias=False),
    mamba2(8, conv=2),
    mamba2(6, heads=12),
    delta_net(1),
    delta_net(2),
    delta_net(8),
    delta_net(6, value_heads=12),
)


def fits(shape: Shape, tp: int, cp: int) -> bool:
    """The rules for sharing: heads divide by tp · cp, and groups divide by tp or tp by them."""
    groups, heads = counts(shape)
    return heads % (tp * cp) == 0 and (groups % tp == 0 or tp % groups == 0)


def counts(shape: Shape) -> tuple[int, int]:
    if isinstance(shape, architecture.Mamba2):
        return shape.groups, shape.heads
    return shape.key_heads, shape.value_heads


# ------------------------------------------------------------------------------------------- what is computed


def build(shape: Shape, groups: Groups = Groups(), dtype: torch.dtype = torch.float64) -> Mixer:
    """The layer with weights that depend on their canonical names alone."""
    if isinstance(shape, architecture.Mamba2):
        layer: Mixer = Mamba2(shape, HIDDEN, EPS, ssd.REFERENCE.function, groups=groups, dtype=dtype)
    else:
        layer = DeltaNet(shape, HIDDEN, EPS, delta_rule.REFERENCE.function, groups=groups, dtype=dtype)
    parameters = dict(layer.named_parameters())
    for name, place in layer.canonical().items():
        place.write(parameters[place.parameter], box(random(name, *place.shape) / 2, place))
    return layer


def random(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def box(whole: Tensor, place: Canonical) -> Tensor:
    """What a rank holds of a canonical tensor."""
    held = place.held
    return whole[tuple(slice(at, at + size) for at, size in zip(held.offset, held.shape, strict=True))]


def documents() -> Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)) % 2, torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows)


def compute(layer: Mixer, groups: Groups, packed: bool) -> dict[str, Tensor]:
    """This rank's output, its input's gradient, and the gradient of every canonical tensor that it holds."""
    x_BTC, probe_BTC = (random(name, ROWS, TOKENS, HIDDEN) for name in ("x", "probe"))
    x_BtC = own_slice(x_BTC, groups.tp_cp, 1).clone().requires_grad_()
    y_BtC = layer(x_BtC, documents() if packed else None)
    y_BtC.backward(own_slice(probe_BTC, groups.tp_cp, 1))
    assert x_BtC.grad is not None
    return {"output": y_BtC.detach(), "input": x_BtC.grad} | gradients(layer, groups)


def gradients(layer: Mixer, groups: Groups) -> dict[str, Tensor]:
    """As training sums them: over the ranks that hold copies, and over those that share a sequence."""
    grads = {}
    parameters = dict(layer.named_parameters())
    for name, place in layer.canonical().items():
        grad = parameters[place.parameter].grad
        assert grad is not None
        grads[name] = all_reduce_no_grad(all_reduce_no_grad(place.read(grad), place.copies), groups.cp)
    return grads


# ------------------------------------------------------------------------------------------------------ ranks


def families(tp: int, cp: int) -> dict[str, list[list[int]]]:
    """Who is with whom: cp outside, tp inside, and the runs within tp."""
    grid = torch.arange(tp * cp).view(cp, tp)
    runs = {f"run{k}": grid.view(-1, k).tolist() for k in (2, 4) if k < tp}
    return {"tp": grid.tolist(), "cp": grid.t().tolist(), "tp_cp": [grid.flatten().tolist()], **runs}


def connected(rank: int, tp: int, cp: int) -> Groups:
    groups: dict[str, Group] = {}
    for name, family in families(tp, cp).items():
        for members in family:
            handle = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                groups[name] = Group(name=name, size=len(members), rank=members.index(rank), handle=handle)
    runs = {group.size: group for name, group in groups.items() if name.startswith("run")}
    return Groups(tp=groups["tp"], cp=groups["cp"], tp_cp=groups["tp_cp"], tp_runs=runs)


def check_topologies(rank: int, world: int) -> None:
    """Compare every shape under every topology of this world with one process."""
    for tp, cp in TOPOLOGIES[world]:
        groups = connected(rank, tp, cp)
        for number, shape in enumerate(SHAPES):
            if fits(shape, tp, cp):
                check(shape, groups, packed=(number + tp) % 2 == 0)


def check(shape: Shape, groups: Groups, *, packed: bool) -> None:
    alone, layer = build(shape), build(shape, groups)
    expected, places = compute(alone, Groups(), packed), layer.canonical()
    for name, actual in compute(layer, groups, packed).items():
        whole = expected[name]
        part = box(whole, places[name]) if name in places else own_slice(whole, groups.tp_cp, 1)
        error = ((actual - part).norm() / whole.norm()).item()
        assert error < 1e-12, f"tp {groups.tp.size}, cp {groups.cp.size}, {shape}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.long) for world in (4, 8))])
def test_any_sharing_of_heads_and_tokens_gives_the_answer_of_one_process(world: int) -> None:
    run_ranks(world, check_topologies)


def bfloat16_output(rank: int, world: int, shape: Shape) -> Tensor:
    groups = connected(rank, 2, world // 2)
    x_BtC = own_slice(random("x", ROWS, TOKENS, HIDDEN), groups.tp_cp, 1).bfloat16()
    return build(shape, groups, torch.bfloat16)(x_BtC, documents()).detach()


@pytest.mark.parametrize("shape", [mamba2(1), mamba2(2, norm_per_group=False), delta_net(1)])
def test_bfloat16_ranks_stay_near_float32(shape: Shape) -> None:
    exact = build(shape, dtype=torch.float32)(random("x", ROWS, TOKENS, HIDDEN).float(), documents())
    joined = torch.cat(run_ranks(4, bfloat16_output, shape), 1)
    assert joined.dtype == torch.bfloat16
    assert (joined - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("shape", [mamba2(2), delta_net(2)])
def test_numbers_of_heads_are_float32_in_a_bfloat16_layer(shape: Shape) -> None:
    narrow, wide = (build(shape, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    kept = [name for name, parameter in narrow.named_parameters() if parameter.dtype == torch.float32]
    names = ("A_log", "D", "dt_bias") if isinstance(shape, architecture.Mamba2) else ("A_log", "dt_bias")
    assert kept == [f"scalars.{name}" for name in names]
    for theirs, ours in zip(wide.scalars(), narrow.scalars(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# --------------------------------------------------------------------------------------- facts, without ranks


def imagined(tp: int, cp: int, rank: int) -> Groups:
    """The groups of a rank of tp, none of which can communicate."""
    runs = {k: Group(name="run", size=k, rank=rank % k, handle=None) for k in range(2, tp) if tp % k == 0}
    at_cp = Group(name="cp", size=cp, rank=0, handle=None) if cp > 1 else ALONE
    return Groups(tp=Group(name="tp", size=tp, rank=rank, handle=None), cp=at_cp, tp_runs=runs)


@pytest.mark.parametrize(
    ("shape", "tp"), [(shape, tp) for shape in SHAPES for tp in (1, 2, 3, 4, 6, 8, 12) if fits(shape, tp, 1)]
)
def test_every_number_is_held_once_or_by_all_who_have_a_copy(shape: Shape, tp: int) -> None:
    holders: dict[str, Tensor] = {}
    for rank in range(tp):
        layer = build(shape, imagined(tp, 1, rank))
        held = {name: torch.zeros_like(parameter) for name, parameter in layer.named_parameters()}
        for name, place in layer.canonical().items():
            place.write(held[place.parameter], place.read(held[place.parameter]) + 1)
            box(holders.setdefault(name, torch.zeros(place.shape)), place).add_(1 / place.copies.size)
        assert all(bool((count == 1).all()) for count in held.values()), "a parameter has other places too"
    for name, count in holders.items():
        torch.testing.assert_close(count, torch.ones_like(count), msg=name)


@pytest.mark.parametrize("shape", [mamba2(8), delta_net(8)], ids=str)
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 4), (2, 4)])
def test_ranks_that_hold_no_copies_share_the_work(shape: Shape, tp: int, cp: int) -> None:
    assert build(shape, imagined(tp, cp, 0)).flops(TOKENS) * tp * cp == build(shape).flops(TOKENS)


def test_what_heads_have_in_common_is_computed_by_each_who_has_a_copy() -> None:
    alone, shared = build(mamba2(1)), build(mamba2(1), imagined(2, 2, 0))
    assert isinstance(alone, Mamba2)
    projected, convolved = 2 * TOKENS // 2 * HIDDEN * 2 * 5, 2 * TOKENS * 4 * 2 * 5
    extra = 4 * (projected + convolved) - (2 * projected + convolved)
    assert 4 * shared.flops(TOKENS) == alone.flops(TOKENS) + extra
