"""The optimizer's passes over many tensors: what float64 gives, wherever the tensors lie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from braid.kernels import optimizer
from braid.kernels.optimizer import PLAIN, Hyper, Moments, OptimizerKernels
from tests.kernels.interpreting import DEVICE, needs_kernels

WAYS = [
    pytest.param(lambda: PLAIN, id="reference"),
    pytest.param(
        lambda: optimizer.choose(torch.device("cuda"), torch.float32).function, id="fused", marks=needs_kernels
    ),
]
SIZES = ((3, 5), (17_000,), (7,), (0, 4), (1,), (16384,))
"""Less than a chunk, more than one, whole ones, and nothing: a rank's shard may be empty."""
HYPER = Hyper((0.9, 0.999), 1e-6)


def drawn(*, shifted: bool, narrow: bool) -> tuple[list[Moments], list[Tensor]]:
    """Parameters with and without narrow copies, and gradients. A shard may begin anywhere in memory."""
    generator = torch.Generator().manual_seed(5)

    def draw(size: tuple[int, ...]) -> Tensor:
        flat = torch.randn(math.prod(size) + 1, generator=generator).to(DEVICE)
        return (flat[1:] if shifted else flat[:-1].clone()).view(size)

    found = [
        Moments(
            draw(size),
            0.1 * draw(size),
            0.01 * draw(size).abs(),
            draw(size).half() if narrow and number % 2 else None,
            0.1 * (number % 3),
        )
        for number, size in enumerate(SIZES)
    ]
    return found, [draw(size) for size in SIZES]


def wide(parameters: list[Moments]) -> list[Moments]:
    return [
        each._replace(main=each[0].double(), exp_avg=each[1].double(), exp_avg_sq=each[2].double(), narrow=None)
        for each in parameters
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_step_is_the_formula(way, shifted: bool, narrow: bool) -> None:
    kernels: OptimizerKernels = way()
    parameters, gradients = drawn(shifted=shifted, narrow=narrow)
    exact, step = wide(parameters), torch.tensor(2.0, device=DEVICE)
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    kernels.adamw(parameters, [each.clone() for each in gradients], HYPER, 1e-2, step, scale=scale)
    assert float(step) == 3
    for each, want, gradient in zip(parameters, exact, gradients, strict=True):
        g = 0.3 * gradient.double()
        m = 0.9 * want.exp_avg + 0.1 * g
        v = 0.999 * want.exp_avg_sq + 0.001 * g.square()
        update = m / (1 - 0.9**3) / ((v / (1 - 0.999**3)).sqrt() + 1e-6)
        main = want.main * (1 - 1e-2 * want.weight_decay) - 1e-2 * update
        for found, wanted in zip(each[:3], (main, m, v), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
        assert each.narrow is None or torch.equal(each.narrow, each.main.half())


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_changes_nothing_even_with_bad_gradients(way) -> None:
    kernels: OptimizerKernels = way()
    parameters, gradients = drawn(shifted=False, narrow=True)
    before = [[tensor.clone() for tensor in each[:3]] for each in parameters]
    gradients[1][17] = torch.nan
    step, scale = torch.tensor(2.0, device=DEVICE), torch.tensor(torch.nan, dtype=torch.float64, device=DEVICE)
    kernels.adamw(parameters, gradients, HYPER, 1e-2, step, scale=scale, skip=torch.tensor(True, device=DEVICE))
    assert float(step) == 2
    for each, old in zip(parameters, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(each[:3], old, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_are_not_skipped_are_steps_and_repeat_to_the_last_bit(way) -> None:
    kernels: OptimizerKernels = way()
    found = []
    for skip in (None, torch.tensor(False, device=DEVICE)):
        parameters, gradients = drawn(shifted=False, narrow=True)
        step = torch.tensor(0.0, device=DEVICE)
        for _ in range(2):
            kernels.adamw(parameters, [each.clone() for each in gradients], HYPER, 1e-2, step, skip=skip)
        found.append([tensor for each in parameters for tensor in each[:3]])
        assert float(step) == 2
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shifted", [False, True])
def test_sums_of_squares(way, shifted: bool) -> None:
    kernels: OptimizerKernels = way()
    _, gradients = drawn(shifted=shifted, narrow=False)
    gradients.insert(1, torch.empty(0, 3, device=DEVICE))
    wanted = [float(each.double().square().sum()) for each in gradients]
    found = kernels.squares(gradients)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)
    assert torch.equal(found, kernels.squares(gradients))
    assert kernels.squares([]).tolist() == []
    assert kernels.squares([torch.empty(0, 3, device=DEVICE)]).tolist() == [0.0]
    for bad in (torch.nan, torch.inf, -torch.inf):
        gradients[2][16_999] = bad
        assert kernels.squares(gradients).isfinite().logical_not().nonzero().tolist() == [[2]]


@needs_kernels
def test_wide_parameters_fall_back() -> None:
    kernels = optimizer.choose(torch.device("cuda"), torch.float32).function
    parameters, gradients = drawn(shifted=False, narrow=False)
    exact, same = wide(parameters), wide(parameters)
    steps = [torch.tensor(0.0, device=DEVICE) for _ in range(2)]
    doubled = [each.double() for each in gradients]
    kernels.adamw(exact, doubled, HYPER, 1e-2, steps[0])
    PLAIN.adamw(same, doubled, HYPER, 1e-2, steps[1])
    assert all(torch.equal(one.main, other.main) for one, other in zip(exact, same, strict=True))
    assert torch.equal(kernels.squares(doubled), PLAIN.squares(doubled))


def test_choice() -> None:
    assert optimizer.choose(torch.device("cpu"), torch.bfloat16).name == "reference"
    assert optimizer.choose(torch.device("cuda"), torch.float64).name == "reference"
