"""The dense MLP whose ffn channels and tokens ranks share: the answer is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from braid import architecture
from braid.distributed.collectives import Groups, all_reduce_no_grad, own_slice
from braid.nn.mlp import Mlp
from tests.nn.moe_ranks import Layout, groups_of, random
from tests.ranks import run_ranks

HIDDEN, ROWS, TOKENS = 5, 3, 8
SHAPES = (
    architecture.Mlp(ffn=12, bias=True),
    architecture.Mlp(ffn=8, activation="relu2"),
)
LAYOUTS = (Layout(tp=4), Layout(tp=2, cp=2))


def built(shape: architecture.Mlp, groups: Groups = Groups()) -> Mlp:
    mlp = Mlp(shape, HIDDEN, groups=groups, dtype=torch.float64)
    parameters = dict(mlp.named_parameters())
    for name, place in mlp.canonical().items():
        place.write(parameters[place.parameter], place.held.of(random(name, *place.shape)))
    return mlp


def ran(shape: architecture.Mlp, groups: Groups = Groups()) -> tuple[Mlp, Tensor, Tensor]:
    """The layer with its gradients, its output and the gradient of its input, for this rank's tokens."""
    mlp = built(shape, groups)
    x_BtC, probe_BtC = (
        own_slice(random(name, ROWS, TOKENS, HIDDEN), groups.tp_cp, 1).contiguous() for name in ("x", "probe")
    )
    y_BtC = mlp(x_BtC.requires_grad_())
    (y_BtC * probe_BtC).sum().backward()
    assert x_BtC.grad is not None
    return mlp, y_BtC.detach(), x_BtC.grad


def compared(rank: int, world: int) -> dict[str, float]:
    """The worst relative deviation of everything."""
    worst: dict[str, float] = {}

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        deviation = float((actual - expected).norm() / expected.norm())
        worst[name] = max(worst.get(name, 0.0), deviation)

    for layout in LAYOUTS:
        groups = groups_of(layout)
        for shape in SHAPES:
            mlp, y, x_grad = ran(shape, groups)
            alone, whole_y, whole_x_grad = ran(shape)
            compare("y", y, own_slice(whole_y, groups.tp_cp, 1))
            compare("x", x_grad, own_slice(whole_x_grad, groups.tp_cp, 1))
            wholes = alone.canonical()
            assert mlp.canonical().keys() == wholes.keys()
            for name, place in mlp.canonical().items():
                assert place.shape == wholes[name].shape
                grad = all_reduce_no_grad(
                    all_reduce_no_grad(place.read(_grad(mlp, place.parameter)), place.copies), groups.dp_cp
                )
                compare(name, grad, place.held.of(wholes[name].read(_grad(alone, wholes[name].parameter))))
    return worst


def _grad(module: Any, parameter: str) -> Tensor:
    return module.get_parameter(parameter).grad


def test_ranks_find_what_one_process_finds() -> None:
    for worst in run_ranks(4, compared):
        assert {"y", "x", "gate.weight", "up.bias", "down.weight", "down.bias"} < worst.keys()
        assert max(worst.values()) < 1e-13, worst


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_two_for_each_weight_and_token(shape: architecture.Mlp) -> None:
    matrices = sum(p.numel() for p in built(shape).parameters() if p.ndim == 2)
    assert built(shape).flops(TOKENS) == 2 * TOKENS * matrices
